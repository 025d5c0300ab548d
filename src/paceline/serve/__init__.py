"""The only room that knows vLLM: plan, child process, counters, memory inspector, HTTP server."""

from paceline.serve.checks import check_plan
from paceline.serve.confined import open_confined
from paceline.serve.endpoint import VllmEndpoint, start
from paceline.serve.install import VLLM_VERSION
from paceline.serve.plan import Plan, build_plan, describe_plan
from paceline.serve.run_case import RunCase, Told
from paceline.serve.run_rules import check_observed
from paceline.serve.sandbox import Isolation, find_isolation
from paceline.serve.server import format_command, serve_http
from paceline.serve.shape_run import ShapeDraft, find_machine, open_shape
from paceline.serve.smoke import Observed, SmokeTest, observe_draft

__all__ = [
    "VLLM_VERSION",
    "Isolation",
    "Observed",
    "Plan",
    "RunCase",
    "ShapeDraft",
    "SmokeTest",
    "Told",
    "VllmEndpoint",
    "build_plan",
    "check_observed",
    "check_plan",
    "describe_plan",
    "find_isolation",
    "find_machine",
    "format_command",
    "observe_draft",
    "open_confined",
    "open_shape",
    "serve_http",
    "start",
]
