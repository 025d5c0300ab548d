"""Drafts that fill all K slots in one pass: what they need of the engine, and when it is wrong.

Source of the facts: vllm/v1/spec_decode/{dflash,llm_base_proposer}.py, qwen3_dflash.py and
config/vllm.py of 0.31.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.draft import (
    Draft,
    drafts_in_parallel,
    read_dflash_attention,
    read_dflash_layer_ids,
    read_mask_token_id,
)
from paceline.errors import DraftError, PlanError

if TYPE_CHECKING:
    from paceline.serve.plan import Plan

__all__ = ["build_parallel", "check_parallel", "is_parallel", "needs_runner_v1"]


def is_parallel(draft: Draft | None) -> bool:
    """All K tokens come from one pass over masked slots: dflash, and P-EAGLE."""
    if draft is None:
        return False
    return draft.family == "dflash" or (
        draft.family == "eagle3" and drafts_in_parallel(draft.config)
    )


def needs_runner_v1(draft: Draft | None) -> bool:
    """vLLM's V2 runner drafts in parallel for dflash alone."""
    return draft is not None and draft.family == "eagle3" and is_parallel(draft)


def build_parallel(draft: Draft | None) -> dict[str, Any]:
    """What `speculative_config` needs: vLLM turns it on itself for dflash, never for eagle3."""
    return {"parallel_drafting": True} if needs_runner_v1(draft) else {}


def check_parallel(plan: Plan, draft: Draft, notes: list[str]) -> None:
    """Raises PlanError for a draft that this engine would refuse, or silently get wrong."""
    where = f"{draft.path}/config.json"
    token, rows = read_mask_token_id(draft.config), plan.target.vocab_size
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < rows:
        raise PlanError(
            f"the mask token is {token}",
            where=where,
            expected=f"an id from 0 to {rows - 1}, a row of the target's embeddings",
        )
    if draft.family == "dflash":
        _check_dflash(plan, draft, where)
    elif plan.device == "cpu":
        _check_fc(draft, where)
    stated, k = draft.num_speculative_tokens, plan.num_speculative_tokens
    if k < stated and any(not causal for _, causal in _see(draft)):
        notes.append(
            f"K = {k}, but the draft was trained to fill {stated} slots that see one another: a"
            " shorter block is another input"
        )


def _check_fc(draft: Draft, where: str) -> None:
    """vLLM projects `mask_hidden` once, at the engine's start, as [F] and not as [1, F]."""
    scales = {".".join(name.split(".")[-2:]) for name in draft.tensors}
    if scales & {"fc.weight_scale", "fc.weight_packed"}:
        raise PlanError(
            "'fc' is quantised, and vLLM 0.31.0 runs it on the masked state as one row without a"
            " batch, on which its packed kernels of a CPU end the engine at its start",
            where=f"{where}: quantization_config",
            expected="fc in 16 bit in a parallel EAGLE-3 draft",
            fix="Quantise the 16-bit draft with `paceline quantize`, which keeps fc, or serve this"
            " one on a GPU.",
        )


def _see(draft: Draft) -> list[tuple[int | None, bool]]:
    return read_dflash_attention(draft.config) if draft.family == "dflash" else []


def _check_dflash(plan: Plan, draft: Draft, where: str) -> None:
    config, k = draft.config, plan.num_speculative_tokens
    try:
        layers = _see(draft)
    except DraftError as problem:
        raise PlanError(problem.what, where=where, expected=problem.expected) from None
    block = config.get("block_size")
    if isinstance(block, int) and k > block - 1:
        raise PlanError(
            f"K = {k} does not fit a block of {block}: one slot is the anchor",
            where=f"{where}: block_size",
            expected=f"at most K = {block - 1}",
        )
    if plan.device == "cpu" and len(layers) > 1:
        raise PlanError(
            f"a DFlash draft of {len(layers)} layers loses acceptance on a CPU without a word: vLLM"
            " 0.31.0's CPU kernel normalises the context keys of all layers with the first layer's"
            " weights",
            where=f"{where}: num_hidden_layers",
            expected="1 layer on a CPU",
            fix="Serve it on a GPU, or train a draft of one layer.",
        )
    slides = {window is not None for window, _ in layers}
    if len(slides) > 1 and plan.runner == "v1":
        raise PlanError(
            "the draft mixes sliding and full attention, which vLLM 0.31.0's V1 runner refuses",
            where=f"{where}: layer_types",
            expected="layers of one kind, or the V2 runner of a GPU",
        )
    ids, top = read_dflash_layer_ids(config), plan.target.num_hidden_layers
    good = ids is not None and all(
        isinstance(tap, int) and not isinstance(tap, bool) and 0 <= tap <= top for tap in ids
    )
    if not good:
        raise PlanError(
            "tapped layers are not named" if ids is None else f"tapped layers {list(ids)}",
            where=f"{where}: dflash_config.target_layer_ids",
            expected=f"layers from 0 to {top - 1}; without them vLLM taps others than fc was"
            " trained on",
        )
