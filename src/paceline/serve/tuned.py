"""Settings of the engine beyond a plan's own, as `paceline tune` finds them for `--config`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import PlanError
from paceline.serve.plan import Plan

__all__ = ["ServeConfig", "apply_engine_settings", "read_serve_config"]

# how each value must look; compiled and prefix_caching are arguments of build_plan
_ENGINE: Mapping[str, type] = {
    "compiled": bool,
    "prefix_caching": bool,
    "async_scheduling": bool,
    "cudagraph_sizes": list,
    "gdn_prefill_backend": str,
    "gdn_decode_kernel": str,
    "dynamic_k": list,
    "stream_interval": int,
}
_TOP: Mapping[str, type] = {"draft": str, "k": int, "min_acceptance": float}


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """A file of settings; None is what it leaves open."""

    draft: str | None = None
    k: int | None = None
    min_acceptance: float | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)


def read_serve_config(path: Path) -> ServeConfig:
    """Reads a TOML file that `paceline tune` wrote. Raises PlanError."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise PlanError(f"cannot be read: {problem.strerror}", where=str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise PlanError(f"is not TOML: {problem}", where=str(path)) from None
    engine = found.pop("engine", {})
    if not isinstance(engine, dict):
        raise PlanError("engine is not a table", where=str(path))
    for known, values, place in ((_TOP, found, ""), (_ENGINE, engine, "engine.")):
        for name, value in values.items():
            if name not in known:
                raise PlanError(
                    f"key {place + name!r} is unknown",
                    where=str(path),
                    expected=f"one of {', '.join(place + known_name for known_name in known)}",
                )
            wanted = known[name]
            right = isinstance(value, (int, float) if wanted is float else wanted)
            if not right or (isinstance(value, bool) and wanted is not bool):
                raise PlanError(
                    f"{place}{name} = {value!r}", where=str(path), expected=f"a {wanted.__name__}"
                )
    return ServeConfig(**found, engine=engine)


def apply_engine_settings(plan: Plan, settings: Mapping[str, Any]) -> Plan:
    """The plan with async_scheduling, cudagraph_sizes, gdn_prefill_backend, gdn_decode_kernel,
    dynamic_k and stream_interval as given; other names are not looked at.

    Raises PlanError where a setting has no effect on this plan.
    """
    args, env = dict(plan.engine_args), dict(plan.env)
    on_cpu = plan.device == "cpu"
    sizes, scheduling = settings.get("cudagraph_sizes"), settings.get("async_scheduling")
    if sizes is not None:
        _require(not on_cpu and not args["enforce_eager"], "cudagraph_sizes", "no CUDA graphs")
        args["cudagraph_capture_sizes"] = list(sizes)
    if scheduling is not None:
        _require(not on_cpu, "async_scheduling", "a CPU, where vLLM schedules in step")
        args["async_scheduling"] = scheduling
    for name in ("gdn_prefill_backend", "gdn_decode_kernel"):
        if settings.get(name) is not None:
            both = plan.target.is_hybrid and not on_cpu
            _require(both, name, "no recurrent layers on a GPU")
    if settings.get("gdn_prefill_backend") is not None:
        args["gdn_prefill_backend"] = settings["gdn_prefill_backend"]
    if settings.get("gdn_decode_kernel") is not None:
        env["VLLM_GDN_DECODE_KERNEL"] = settings["gdn_decode_kernel"]
    if settings.get("stream_interval") is not None:
        args["stream_interval"] = settings["stream_interval"]
    rows = settings.get("dynamic_k")
    if rows is not None:
        _require(plan.method != "none", "dynamic_k", "no draft")
        own = args["speculative_config"]["method"] == "custom_class" or plan.target.is_hybrid
        _require(not own, "dynamic_k", "a proposer or target that needs K tokens on every step")
        schedule = [list(row) for row in rows]
        config = {**args["speculative_config"], "num_speculative_tokens_per_batch_size": schedule}
        args["speculative_config"] = config
    return replace(plan, engine_args=args, env=env)


def _require(holds: bool, name: str, found: str) -> None:
    if not holds:
        raise PlanError(
            f"{name} has no effect here: the plan has {found}", where=name, fix="Leave it out."
        )
