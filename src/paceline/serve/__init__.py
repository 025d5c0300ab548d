"""The only room that knows vLLM: plan, child process, counters, memory inspector, HTTP server."""

from paceline.serve.checks import check_plan
from paceline.serve.endpoint import VllmEndpoint, start
from paceline.serve.install import VLLM_VERSION
from paceline.serve.plan import Plan, build_plan, describe_plan
from paceline.serve.server import format_command, serve_http

__all__ = [
    "VLLM_VERSION",
    "Plan",
    "VllmEndpoint",
    "build_plan",
    "check_plan",
    "describe_plan",
    "format_command",
    "serve_http",
    "start",
]
