"""The only room that knows vLLM: plan, child process, counters, memory inspector, HTTP server."""

from paceline.serve.applied import find_altered_weights, with_applied_weights
from paceline.serve.checks import check_plan
from paceline.serve.command import format_command
from paceline.serve.conductor import Operation
from paceline.serve.confined import open_confined
from paceline.serve.endpoint import VllmEndpoint, start
from paceline.serve.install import VLLM_VERSION, find_device
from paceline.serve.launch import open_server
from paceline.serve.plan import Plan, build_plan, describe_plan
from paceline.serve.process import start_ahead
from paceline.serve.run_case import RunCase, Told
from paceline.serve.run_rules import check_observed
from paceline.serve.sandbox import Isolation, find_isolation
from paceline.serve.second_boot import Beside, check_repeat, observe_beside
from paceline.serve.server import build_plain_plan, serve_http
from paceline.serve.shape_run import ShapeDraft, find_machine, open_shape
from paceline.serve.smoke import Observed, SmokeTest, observe_draft
from paceline.serve.spread import require_places, spread_plan
from paceline.serve.step_clock import HostOverhead, measure_host_overhead, with_step_clock
from paceline.serve.tuned import ServeConfig, apply_engine_settings, read_serve_config

__all__ = [
    "VLLM_VERSION",
    "Beside",
    "HostOverhead",
    "Isolation",
    "Observed",
    "Operation",
    "Plan",
    "RunCase",
    "ServeConfig",
    "ShapeDraft",
    "SmokeTest",
    "Told",
    "VllmEndpoint",
    "apply_engine_settings",
    "build_plain_plan",
    "build_plan",
    "check_observed",
    "check_plan",
    "check_repeat",
    "describe_plan",
    "find_altered_weights",
    "find_device",
    "find_isolation",
    "find_machine",
    "format_command",
    "measure_host_overhead",
    "observe_beside",
    "observe_draft",
    "open_confined",
    "open_server",
    "open_shape",
    "read_serve_config",
    "require_places",
    "serve_http",
    "spread_plan",
    "start",
    "start_ahead",
    "with_applied_weights",
    "with_step_clock",
]
