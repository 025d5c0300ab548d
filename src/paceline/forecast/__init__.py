"""What a draft will take and score, from shapes alone, before any training."""

from __future__ import annotations

from paceline.forecast.cache import CacheUse, Group, LayerCache, group_layers, measure_cache
from paceline.forecast.describe import describe_forecast
from paceline.forecast.design import Design, native_baseline, parse_design, read_design
from paceline.forecast.memory import DraftMemory, measure_memory
from paceline.forecast.run import Forecast, build_forecast
from paceline.forecast.score import Goal, StepTime
from paceline.forecast.shape import CachePlan, TargetShape, list_shapes, read_shape

__all__ = [
    "CachePlan",
    "CacheUse",
    "Design",
    "DraftMemory",
    "Forecast",
    "Goal",
    "Group",
    "LayerCache",
    "StepTime",
    "TargetShape",
    "build_forecast",
    "describe_forecast",
    "group_layers",
    "list_shapes",
    "measure_cache",
    "measure_memory",
    "native_baseline",
    "parse_design",
    "read_design",
    "read_shape",
]
