"""What a draft will take and score, from shapes alone, before any training."""

from __future__ import annotations

from paceline.forecast.cache import CacheUse, Group, LayerCache, group_layers, measure_cache
from paceline.forecast.describe import describe_forecast
from paceline.forecast.design import Design, native_baseline, parse_design, read_design
from paceline.forecast.draft_config import build_draft_config, list_own_tensors
from paceline.forecast.fit import describe_fit, fit_runs, fit_step_model
from paceline.forecast.from_draft import design_of_draft, read_design_or_draft
from paceline.forecast.latency import build_latency, describe_latency
from paceline.forecast.measure import Measured, measure_steps
from paceline.forecast.measure_plan import (
    Configuration,
    MeasurePlan,
    build_measure_plan,
    read_measure_plan,
)
from paceline.forecast.measured_record import describe_measured
from paceline.forecast.memory import DraftMemory, measure_cache_of, measure_memory
from paceline.forecast.phase import Phase, build_phase_record, read_phase
from paceline.forecast.run import Forecast, build_forecast
from paceline.forecast.scaling import ScalingFit, fit_scaling
from paceline.forecast.scaling_points import read_scaling_points
from paceline.forecast.scaling_record import describe_scaling, scaling_to_json
from paceline.forecast.score import Goal, StepTime
from paceline.forecast.search import Candidate, Search, search_designs
from paceline.forecast.search_record import describe_search, search_to_json
from paceline.forecast.shape import CachePlan, TargetShape, list_shapes, read_shape
from paceline.forecast.space import Space, list_spaces, parse_space, read_space
from paceline.forecast.step_model import StepModel, read_step_model, write_step_model
from paceline.forecast.steps import StepPoint, StepRun, append_run, read_runs

__all__ = [
    "CachePlan",
    "CacheUse",
    "Candidate",
    "Configuration",
    "Design",
    "DraftMemory",
    "Forecast",
    "Goal",
    "Group",
    "LayerCache",
    "MeasurePlan",
    "Measured",
    "Phase",
    "ScalingFit",
    "Search",
    "Space",
    "StepModel",
    "StepPoint",
    "StepRun",
    "StepTime",
    "TargetShape",
    "append_run",
    "build_draft_config",
    "build_forecast",
    "build_latency",
    "build_measure_plan",
    "build_phase_record",
    "describe_fit",
    "describe_forecast",
    "describe_latency",
    "describe_measured",
    "describe_scaling",
    "describe_search",
    "design_of_draft",
    "fit_runs",
    "fit_scaling",
    "fit_step_model",
    "group_layers",
    "list_own_tensors",
    "list_shapes",
    "list_spaces",
    "measure_cache",
    "measure_cache_of",
    "measure_memory",
    "measure_steps",
    "native_baseline",
    "parse_design",
    "parse_space",
    "read_design",
    "read_design_or_draft",
    "read_measure_plan",
    "read_phase",
    "read_runs",
    "read_scaling_points",
    "read_shape",
    "read_space",
    "read_step_model",
    "scaling_to_json",
    "search_designs",
    "search_to_json",
    "write_step_model",
]
