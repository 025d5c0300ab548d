"""Runs inside vLLM's worker: what was resolved, and the bytes a draft really takes.

Loaded through `worker_extension_cls`, so the engine is not changed. Memory rules: measurement notes
in docs/footguns.md; on a CPU the packed weight of a linear layer leaves an empty tensor behind and
is counted by its shape.
"""

from __future__ import annotations

import os
from typing import Any

from paceline.serve.pool import measure_pool

__all__ = ["Inspector"]


class Inspector:
    """Methods that `collective_rpc` finds on every worker. Names start with paceline_."""

    def paceline_facts(self) -> dict[str, Any]:
        """What the worker built: runner class and draft model class."""
        os.chdir("/")  # the folder of the models goes away once this is known
        runner = self.model_runner  # type: ignore[attr-defined]
        draft = _draft_model(runner)
        return {
            "runner": "v2" if _is_v2(runner) else "v1",
            "runner_class": f"{type(runner).__module__}.{type(runner).__name__}",
            "target_class": type(runner.get_model()).__name__,
            "draft_class": None if draft is None else type(draft).__name__,
            **_custom_proposer(runner),
        }

    def paceline_memory(self, context_tokens: int) -> dict[str, Any] | None:
        """Fields of MemoryFacts for one sequence of context_tokens; None without a draft model."""
        runner = self.model_runner  # type: ignore[attr-defined]
        draft = _draft_model(runner)
        if draft is None:
            return None
        owned = _storages(runner.get_model())
        weights, names_w, shared_w = _count(draft.named_parameters(), owned)
        packed = _packed_linears(draft, runner.get_model())
        buffers, names_b, shared_b = _count(draft.named_buffers(), owned)
        copies = _count_copies(draft)
        pool, plain = measure_pool(runner, draft, context_tokens)
        return {
            "context_tokens": context_tokens,
            "weights_bytes": weights + sum(packed.values()),
            "buffers_bytes": buffers + sum(copies.values()),
            "kv_bytes": pool["kv_bytes"] - plain["kv_bytes"],
            "state_bytes": pool["state_bytes"] - plain["state_bytes"],
            "shared": sorted({*shared_w, *shared_b}),
            "tensors": {**names_w, **packed, **names_b, **copies},
        }

    def paceline_pool(self, context_tokens: int) -> list[dict[str, Any]]:
        """What one sequence takes of the pool: with the draft, without (see measure_pool)."""
        runner = self.model_runner  # type: ignore[attr-defined]
        return list(measure_pool(runner, _draft_model(runner), context_tokens))

    def paceline_kernels(self) -> dict[str, dict[str, int]]:
        """ "target" and "draft" -> kernel -> how many matrices run on it; shared ones once."""
        runner = self.model_runner  # type: ignore[attr-defined]
        target = runner.get_model()
        owned = {id(module) for module in target.modules()}
        draft = _draft_model(runner)
        found = {"target": _count_kernels(target, set())}
        if draft is not None:
            found["draft"] = _count_kernels(draft, owned)
        return found


def _count_kernels(model: Any, owned: set[int]) -> dict[str, int]:
    """Kernel of every linear and output layer; "plain" for one that is not quantised."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    counts: dict[str, int] = {}
    for module in model.modules():
        if id(module) in owned or not isinstance(module, LinearBase | ParallelLMHead):
            continue
        scheme = getattr(module, "scheme", None)
        kernel = getattr(scheme, "kernel", None) or getattr(scheme, "fp8_linear", None)
        name = "plain" if scheme is None else type(kernel or scheme).__name__
        counts[name] = counts.get(name, 0) + 1
    return counts


def _custom_proposer(runner: Any) -> dict[str, str | None]:
    """The class that vLLM's `custom_class` loaded, and the family it says it drafts for."""
    config = runner.speculative_config
    if config is None or config.method != "custom_class":
        return {"proposer": None, "family": None}
    kind = type(runner.drafter)
    return {
        "proposer": f"{kind.__module__}.{kind.__qualname__}",
        "family": getattr(kind, "family", None),
    }


def _is_v2(runner: Any) -> bool:
    return any(
        kind.__module__.startswith("vllm.v1.worker.gpu.model_runner")
        for kind in type(runner).__mro__
    )


def _draft_model(runner: Any) -> Any:
    """The draft's module in either runner; None for none and for model-free methods."""
    proposer = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    model = getattr(proposer, "model", None)
    return model if hasattr(model, "named_parameters") else None


def _storages(module: Any) -> set[int]:
    tensors = [*module.parameters(), *module.buffers()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


def _count(named: Any, owned: set[int]) -> tuple[int, dict[str, int], list[str]]:
    """Bytes of unique storages outside `owned`; own name -> bytes; names that share."""
    total = 0
    own: dict[str, int] = {}
    shared: list[str] = []
    seen: set[int] = set()
    for name, tensor in named:
        if not tensor.numel():
            continue  # an emptied CPU linear, counted by shape
        storage = tensor.untyped_storage()
        if storage.data_ptr() in owned:
            shared.append(name)
        elif storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            own[name] = storage.nbytes()
            total += own[name]
    return total, own, shared


def _count_copies(draft: Any) -> dict[str, int]:
    """What DFlash makes of its weights once they are loaded, as plain tensors: name -> bytes."""
    found: dict[str, int] = {}
    for prefix, module in draft.named_modules():
        for name in ("_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights"):
            tensor = vars(module).get(name)
            if tensor is not None:
                found[f"{prefix}.{name}"] = tensor.untyped_storage().nbytes()
    return found


def _packed_linears(draft: Any, target: Any) -> dict[str, int]:
    """Matrices whose weight the CPU backend packed away: name -> bytes by shape."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    targets = {id(module) for module in target.modules()}
    found: dict[str, int] = {}
    for name, module in draft.named_modules():
        if not isinstance(module, LinearBase | ParallelLMHead) or id(module) in targets:
            continue
        width = _packed_width(module)
        if not width:
            continue
        if isinstance(module, ParallelLMHead):
            rows, columns = module.num_embeddings_padded, module.embedding_dim
        else:
            rows = getattr(module, "output_size_per_partition", module.output_size)
            columns = getattr(module, "input_size_per_partition", module.input_size)
        found[f"{name}.weight"] = rows * columns * width
    return found


def _packed_width(module: Any) -> int:
    """Bytes an element of a weight that is held out of sight; 0 for one that is in sight."""
    weight = getattr(module, "weight", None)
    if weight is not None:
        return 0 if weight.numel() else int(weight.element_size())
    # the int8 kernel drops the weight and keeps what it made of it
    scheme = type(getattr(module, "scheme", None)).__name__
    return 1 if scheme == "CompressedTensorsW8A8Int8" else 0
