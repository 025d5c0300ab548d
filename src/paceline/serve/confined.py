"""One engine in the sandbox, to be measured: the same plan and the same proofs as outside it."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import paceline
from paceline.errors import EngineError
from paceline.records import storage_errors
from paceline.serve.checks import check_plan
from paceline.serve.endpoint import VllmEndpoint, await_facts, check_facts
from paceline.serve.install import engine_python
from paceline.serve.plan import Plan
from paceline.serve.process import EngineProcess, build_child_env, find_cache, find_kernels
from paceline.serve.sandbox import (
    Sandbox,
    SandboxWatch,
    clean_env,
    find_isolation,
    wrap_command,
)
from paceline.serve.staging import make_staging, remove_staging

__all__ = ["build_confined_env", "build_sandbox", "lend_caches", "open_confined"]

_GIB = 2**30
_SILENCE_S = 180.0
_START_S = 900.0


@contextlib.contextmanager
def open_confined(
    plan: Plan, *, log_path: str | Path, time_s: float, memory_bytes: int | None = None
) -> Iterator[VllmEndpoint]:
    """A started and proven engine that has no network and can write nowhere but its scratch folder.

    time_s: of everything together. memory_bytes: resident, all its processes; None is worked out
    from the plan. Raises PlanError before anything starts; EngineError afterwards, also when the
    sandbox had to end it. Where the system allows no namespaces, limits and environment remain:
    `find_isolation` says so.
    """
    check_plan(plan)
    staging = make_staging(plan)
    process: EngineProcess | None = None
    watch: SandboxWatch | None = None
    try:
        sandbox = build_sandbox(plan, staging, time_s=time_s, memory_bytes=memory_bytes)
        process = EngineProcess(
            env=build_confined_env(plan, staging, sandbox),
            log_path=Path(log_path),
            wrap=lambda command: wrap_command(command, sandbox),
        )
        watch = SandboxWatch(process.pid, memory_bytes=sandbox.memory_bytes, time_s=time_s)
        begun = time.monotonic()
        facts = await_facts(plan, process, staging, begun=begun, deadline=begun + _START_S)
        check_facts(plan, facts)
        yield VllmEndpoint(plan, process, facts, silence_s=_SILENCE_S)
    except EngineError as problem:
        if watch is None or not watch.ended_for:
            raise
        limit = f"{time_s:,.0f} s" if watch.ended_for == "time" else f"{watch.peak_bytes:,} bytes"
        raise EngineError(
            f"the sandbox ended the engine: it took more {watch.ended_for} than allowed",
            where=str(log_path),
            expected=f"less than {limit}",
        ) from problem
    finally:
        if process is not None:
            process.close()
        if watch is not None:
            watch.close()
        remove_staging(staging)


def build_sandbox(plan: Plan, staging: Path, *, time_s: float, memory_bytes: int | None) -> Sandbox:
    """The sandbox of one plan; its scratch is made inside the staging folder."""
    scratch = staging / "scratch"
    scratch.mkdir()
    staged = [staging / str(plan.engine_args["model"]) / "config.json"]
    if plan.draft_name is not None:
        staged.append(staging / plan.draft_name / "config.json")
    needs = (Path(engine_python()), Path(paceline.__file__), *staged)
    limit = memory_bytes or _memory_limit(plan)
    return Sandbox(
        isolation=find_isolation(needs),
        scratch=scratch,
        needs=needs,
        memory_bytes=limit,
        # a CUDA driver maps far more than it holds
        data_bytes=2 * limit if plan.device == "cpu" else None,
        time_s=time_s,
    )


def _memory_limit(plan: Plan) -> int:
    """Room for an engine of this target and draft: weights, their casts, the cache, and vLLM."""
    sizes = [item.stat().st_size for item in plan.target.path.glob("*.safetensors")]
    draft_bytes = plan.draft.files_bytes if plan.draft is not None else 0
    cache = plan.engine_args.get("kv_cache_memory_bytes") or 0
    return 4 * _GIB + 3 * sum(sizes) + 6 * draft_bytes + 2 * int(cache)


def build_confined_env(plan: Plan, staging: Path, sandbox: Sandbox) -> dict[str, str]:
    """The child's environment without secrets, with its caches inside."""
    env = clean_env(build_child_env(plan.env, staging), sandbox.scratch)
    return {**env, **lend_caches(staging, plan.device)}


def lend_caches(staging: Path, device: str) -> dict[str, str]:
    """Environment variables for copies of what vLLM knows of its own model classes, which inside
    can be read and not written, and on a GPU of the kernels that were tuned before."""
    known, lent = find_cache(), staging / "vllm-cache"
    env = {"VLLM_CACHE_ROOT": str(lent)}
    with storage_errors(lent):
        lent.mkdir()
        if (known / "modelinfos").is_dir():
            shutil.copytree(known / "modelinfos", lent / "modelinfos")
        if device == "cuda":
            copy = staging / "scratch" / "triton"
            env["TRITON_CACHE_DIR"] = str(copy)
            # before the first engine, or while another writes there
            with contextlib.suppress(FileNotFoundError, shutil.Error):
                shutil.copytree(find_kernels(), copy)
    return env
