"""A serving plan: every engine argument, fixed and printable before anything starts.

`build_plan` fills in what the caller left open, `check_plan` (checks.py) says whether it can work,
`describe_plan` prints it. Nothing here imports vLLM.
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.draft import Draft
from paceline.errors import PlanError
from paceline.methods import METHODS
from paceline.serve.install import find_device
from paceline.serve.model_free import build_model_free, is_model_free, read_settings
from paceline.serve.parallel import build_parallel, needs_runner_v1
from paceline.serve.pool_size import size_pool
from paceline.target import TargetFacts

__all__ = ["Plan", "build_plan", "content_name", "describe_plan"]

_CPU_MAX_MODEL_LEN = 2048
_CUDA_MAX_MODEL_LEN = 16384 + 64
_GPU_SHARE = 0.02  # vLLM only asks for this much to be free; the pool's size is stated


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to serve one target.

    method: family of methods.METHODS; "none" without speculation, then num_speculative_tokens is 0.
    engine_args: arguments of vLLM's EngineArgs; "model" and speculative_config["model"] are names
    inside the staging folder that `start` makes. env: the engine's environment, exact.
    notes: what build_plan decided or turned off and the caller should know.
    """

    target: TargetFacts
    draft: Draft | None
    method: str
    num_speculative_tokens: int
    device: str  # "cpu" | "cuda"
    runner: str  # "v1" | "v2"
    num_threads: int | None  # CPU only
    engine_args: dict[str, Any]
    env: dict[str, str]
    notes: tuple[str, ...] = field(default=())

    @property
    def max_model_len(self) -> int:
        return int(self.engine_args["max_model_len"])

    @property
    def max_num_seqs(self) -> int:
        return int(self.engine_args["max_num_seqs"])

    @property
    def draft_name(self) -> str | None:
        """Name of the draft's folder inside the staging folder; None where none is staged."""
        if self.draft is None or self.draft.is_native or not METHODS[self.method].has_weights:
            return None
        name: str = self.engine_args["speculative_config"]["model"]
        return name


def build_plan(
    target: TargetFacts,
    draft: Draft | None = None,
    *,
    method: str | None = None,
    num_speculative_tokens: int | None = None,
    device: str | None = None,
    max_model_len: int | None = None,
    dtype: str = "bfloat16",
    enforce_eager: bool | None = None,
    prefix_caching: bool = False,
    kv_cache_bytes: int | None = None,
    max_num_seqs: int = 8,
    num_threads: int | None = None,
    ngram_min: int | None = None,
    ngram_max: int | None = None,
    seed: int = 0,
) -> Plan:
    """Fixes every setting. K comes from the draft unless given; method from the draft's family.

    device: "cpu" or "cuda"; None takes the build of vLLM that is installed.
    max_model_len: tokens; None is the target's own length, at most 2,048 on a CPU and 16,448 on
    CUDA. enforce_eager: None is True on a CPU (a compiled start takes minutes), False on CUDA.
    kv_cache_bytes: None fits max_num_seqs full sequences, at most 256 MiB on a CPU and 16 GiB on
    CUDA, but always one.
    ngram_min, ngram_max: lengths looked up by `ngram`; 1 and 5 when neither is set.
    Raises PlanError for settings that contradict each other or have no effect.
    """
    notes: list[str] = []
    method = _choose_method(draft, method)
    device = device or find_device()
    if device not in ("cpu", "cuda"):
        raise PlanError(f"device {device!r} is unknown", expected="cpu or cuda")
    k = _choose_k(method, draft, num_speculative_tokens)
    if max_model_len is None:
        limit = _CPU_MAX_MODEL_LEN if device == "cpu" else _CUDA_MAX_MODEL_LEN
        max_model_len = min(target.max_position_embeddings, limit)
    if prefix_caching and target.is_hybrid:
        prefix_caching = False
        notes.append(
            "prefix caching is turned off: with a recurrent (hybrid) target and speculation vLLM"
            " 0.31.0 restores a stale state (vLLM #53912), and its CPU build has no kernel for it"
        )
    if num_threads is not None and device != "cpu":
        raise PlanError("num_threads has no effect on CUDA", fix="Leave it out.")
    if device == "cpu" and num_threads is None:
        num_threads = len(os.sched_getaffinity(0))
    if kv_cache_bytes is None:
        kv_cache_bytes = size_pool(
            target,
            draft,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            num_speculative_tokens=k or 0,
        )

    is_v1 = device == "cpu" or needs_runner_v1(draft)
    runner = "v1" if is_v1 else METHODS[method].gpu_runner
    if device == "cuda" and needs_runner_v1(draft):
        notes.append(
            "vLLM's V2 runner drafts in parallel for dflash alone: this draft runs on the V1"
            " runner, and its times are not only its own"
        )
    engine_args: dict[str, Any] = {
        "model": content_name("target", target.weights_fingerprint, target.path),
        "dtype": dtype,
        "load_format": "safetensors",
        "trust_remote_code": False,
        "generation_config": "vllm",
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "enforce_eager": device == "cpu" if enforce_eager is None else enforce_eager,
        "enable_prefix_caching": prefix_caching,
        "kv_cache_memory_bytes": kv_cache_bytes,
        "async_scheduling": runner == "v2" and not is_model_free(method),
        "disable_log_stats": False,
        "tensor_parallel_size": 1,
        "seed": seed,
        "worker_extension_cls": "paceline.serve.inspector.Inspector",
    }
    if device == "cuda":
        engine_args["gpu_memory_utilization"] = _GPU_SHARE
    if device == "cuda" and target.is_hybrid:
        engine_args["gdn_prefill_backend"] = "triton"  # the other one needs FlashInfer's kernels
    is_nested = "text_config" in target.config and "vocab_size" not in target.config
    if method == "medusa" and is_nested:  # vLLM asks a multimodal target's outer config, and stops
        engine_args["hf_overrides"] = {"vocab_size": target.vocab_size}
    speculative = _speculation(method, draft, k, ngram_min, ngram_max, notes)
    if speculative:
        engine_args.update(speculative, per_request_spec_decode_metrics="detailed")
    return Plan(
        target=target,
        draft=draft,
        method=method,
        num_speculative_tokens=k,
        device=device,
        runner=runner,
        num_threads=num_threads,
        engine_args=engine_args,
        env=build_env(device, runner, num_threads),
        notes=tuple(notes),
    )


def content_name(kind: str, sha256: str | None, path: Path) -> str:
    """ "draft-" or "target-" and 12 hex digits of the content, of the path where none is known."""
    digest = sha256 or hashlib.sha256(os.fsencode(path)).hexdigest()
    return f"{kind}-{digest[:12]}"


def _choose_method(draft: Draft | None, method: str | None) -> str:
    if draft is not None:
        if method is not None and method != draft.family:
            raise PlanError(
                f"method {method!r} does not fit the draft, whose family is {draft.family!r}",
                where=str(draft.path),
                fix="Leave the method out: it comes from the draft's spec.json.",
            )
        method = draft.family
    elif method is None:
        method = "none"
    if method not in METHODS:
        raise PlanError(f"method {method!r} is unknown", expected=f"one of {', '.join(METHODS)}")
    if draft is None and METHODS[method].has_weights:
        raise PlanError(
            f"method {method!r} needs a draft folder", fix="Pass --draft with the folder."
        )
    return method


def _choose_k(method: str, draft: Draft | None, k: int | None) -> int:
    if method == "none":
        if k:
            raise PlanError(
                f"K = {k} has no effect without a draft", fix="Leave K out, or name a draft."
            )
        return 0
    if k is None:
        k = draft.num_speculative_tokens if draft is not None else 3
    return k


def _speculation(
    method: str,
    draft: Draft | None,
    k: int,
    ngram_min: int | None,
    ngram_max: int | None,
    notes: list[str],
) -> dict[str, Any]:
    """Engine arguments that make it speculate; none without a draft."""
    if method != "ngram" and (ngram_min is not None or ngram_max is not None):
        raise PlanError(
            f"ngram_min and ngram_max have no effect with method {method!r}", fix="Leave them out."
        )
    if method == "none":
        return {}
    if is_model_free(method):
        return build_model_free(
            method,
            draft.spec if draft is not None else {},
            k,
            bounds=(ngram_min, ngram_max),
            where=f"{draft.path}/spec.json" if draft is not None else f"method {method!r}",
            notes=notes,
        )
    config: dict[str, Any] = {
        "method": METHODS[method].vllm_method,
        "num_speculative_tokens": k,
        "rejection_sample_method": "standard",
        "draft_sample_method": "greedy",
        **build_parallel(draft),
    }
    if draft is not None and not draft.is_native:  # without a model vLLM takes the target's head
        config["model"] = content_name("draft", draft.sha256, draft.path)
        # the draft is always read as safetensors, whatever the target is
        config["draft_load_config"] = {"load_format": "safetensors"}
    return {"speculative_config": config}


def build_env(device: str, runner: str, num_threads: int | None) -> dict[str, str]:
    """What an engine's environment holds beside the caller's own."""
    env = {
        "VLLM_PLUGINS": "",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        # One process, no second and third import of vLLM and no scheduler process beside the
        # compute threads: measured start 9 s against 18 s, 33 against 28 tokens/s, 1.5 GB against
        # 2.9 GB. The engine code is the same.
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        env["OMP_NUM_THREADS"] = str(num_threads)
        env["VLLM_CPU_INT4_W4A8"] = "0"
        env["CUDA_VISIBLE_DEVICES"] = ""
    else:
        env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        env["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # no second import of vLLM: 17 s
    return env


def describe_plan(plan: Plan) -> list[tuple[str, str]]:
    """The plan as (label, value) lines, every engine argument and environment variable included."""
    spec = dict(plan.engine_args.get("speculative_config") or {})
    lines = [
        ("target", f"{plan.target.name} ({plan.target.path})"),
        ("draft", "none" if plan.draft is None else str(plan.draft.path)),
        ("method", plan.method),
        ("K", str(plan.num_speculative_tokens) if plan.method != "none" else "not used"),
        ("device", plan.device),
        ("model runner", plan.runner),
        ("engine python", os.environ.get("PACELINE_VLLM_PYTHON") or sys.executable),
    ]
    if plan.method == "ngram":
        found = read_settings(plan)
        bounds = f"{found['prompt_lookup_min']}/{found['prompt_lookup_max']}"
        lines.append(("n-gram min/max", bounds))
    if plan.draft_name is not None:
        lines.append(("draft served as", plan.draft_name))
    for name, value in plan.engine_args.items():
        if name != "speculative_config":
            lines.append((name, _show(value)))
    lines += [(f"speculative_config.{name}", _show(value)) for name, value in spec.items()]
    lines += [(f"env {name}", value or '""') for name, value in sorted(plan.env.items())]
    return lines


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if not isinstance(value, Path) else value.name
