"""What makes a draft smaller beside the bits of its weights: a window, a vocabulary, a shared head.

Each writes a plain draft folder again; nothing is trained. What a change costs in acceptance is
measured like a quantisation's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.draft import Draft, read_tensors, write_draft
from paceline.errors import DraftError, PlanError, TargetError
from paceline.target import TargetFacts

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.quantize.calibration import CalibrationRow

__all__ = [
    "Reshape",
    "choose_tokens",
    "count_tokens",
    "explain_no_window",
    "read_vocabulary",
    "reshape_draft",
]

_WINDOWED = ("eagle3", "draft_model", "dflash")
_MTP_WINDOW = "vLLM 0.31.0 builds an MTP layer with the target's full attention: it reads no window"
_NO_ATTENTION = "the family has no attention of its own"
_NO_VOCABULARY = {
    "mtp": "vLLM 0.31.0 gives an MTP head the target's whole vocabulary",
    "medusa": "vLLM 0.31.0 turns a Medusa draft's token_map into a parameter and then stops",
    "draft_model": "a draft_model must have the target's vocabulary size",
}


@dataclass(frozen=True, kw_only=True)
class Reshape:
    """window: tokens that the draft's attention looks back, None as it is. tokens: ascending
    target ids of the new draft vocabulary, None as it is. shares_head: the target's output layer
    and embeddings instead of the draft's own, with the whole vocabulary."""

    window: int | None = None
    tokens: tuple[int, ...] | None = None
    shares_head: bool = False


def count_tokens(rows: Sequence[CalibrationRow]) -> dict[str, Counter[int]]:
    """category -> how often each target id stands in an answer; "" where rows have none."""
    counts: dict[str, Counter[int]] = {}
    for row in rows:
        category = str(getattr(row, "category", ""))
        for start, end in row.loss_spans:
            counts.setdefault(category, Counter()).update(row.input_ids[start:end])
    return counts


def choose_tokens(
    counts: Mapping[str, Counter[int]],
    num_tokens: int,
    *,
    target: TargetFacts,
    allowed: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], dict[str, float]]:
    """(ascending target ids, category -> share of answer tokens inside; "all" for all of them).

    End tokens first, then the most frequent, then the lowest ids. allowed: ids that the draft can
    say today; None for all. Raises PlanError for a size that does not fit.
    """
    pool = set(range(target.vocab_size)) if allowed is None else set(allowed)
    if not 1 <= num_tokens < len(pool):
        raise PlanError(
            f"a vocabulary of {num_tokens}",
            where="--vocab",
            expected=f"1 to {len(pool) - 1}: the draft has {len(pool)} today",
        )
    total: Counter[int] = Counter()
    for found in counts.values():
        total.update(found)
    ends = [token for token in target.eos_token_ids if token in pool]
    ranked = sorted(total.keys() & pool, key=lambda token: (-total[token], token))
    chosen = set(list(dict.fromkeys([*ends, *ranked, *sorted(pool)]))[:num_tokens])
    coverage = {
        name: sum(n for token, n in found.items() if token in chosen) / sum(found.values())
        for name, found in {"all": total, **counts}.items()
        if name and found
    }
    return tuple(sorted(chosen)), coverage


def read_vocabulary(draft: Draft) -> tuple[int, ...] | None:
    """Target ids that the draft can say, ascending; None for the target's whole vocabulary."""
    offsets = read_tensors(draft).get("d2t")
    if offsets is None:
        return None
    return tuple(number + int(offset) for number, offset in enumerate(offsets.tolist()))


def reshape_draft(
    draft: Draft,
    target: TargetFacts,
    change: Reshape,
    out_dir: str | Path,
    *,
    coverage: Mapping[str, float] | None = None,
    replace: bool = False,
) -> Draft:
    """Writes the changed draft. Raises PlanError, with vLLM's reason, for what cannot be done."""
    if draft.config.get("quantization_config") is not None:
        raise DraftError(
            "this draft is quantised already",
            where=f"{draft.path}/config.json",
            fix="Change the 16-bit draft first, then quantise it.",
        )
    _require_possible(draft, target, change)
    config, tensors = dict(draft.config), read_tensors(draft)
    told: dict[str, Any] = {"from_sha256": draft.sha256}
    if change.window is not None:
        config.update(_window_keys(draft, change.window))
        told["window"] = change.window
    if change.shares_head:
        told["shared"] = _share(target, config, tensors)
    elif change.tokens is not None:
        _cut(target, config, tensors, change.tokens)
        told.update(draft_vocab_size=len(change.tokens), coverage=dict(coverage or {}))
    spec = {k: v for k, v in draft.spec.items() if k not in ("family", "num_speculative_tokens")}
    metadata = {**draft.metadata, "reshaped": told}
    if isinstance(metadata.get("trained"), Mapping):
        # write_draft says again what is shared
        kept = {k: v for k, v in metadata["trained"].items() if k not in ("embeddings", "lm_head")}
        metadata["trained"] = kept
    return write_draft(
        out_dir,
        family=draft.family,
        config=config,
        tensors=tensors,
        num_speculative_tokens=draft.num_speculative_tokens,
        metadata=metadata,
        spec=spec,
        replace=replace,
    )


def explain_no_window(draft: Draft) -> str | None:
    """Why this draft's attention cannot be given a window; None where it can."""
    if draft.family not in _WINDOWED:
        return _MTP_WINDOW if draft.family == "mtp" else _NO_ATTENTION
    if draft.config.get("quantization_config") is not None:
        return (
            "a quantised draft is not changed: give its 16-bit original a window, then quantise it"
        )
    own = draft.config.get("sliding_window") or (draft.config.get("dflash_config") or {}).get(
        "use_swa"
    )
    return "the draft has a window of its own" if own else None


def _require_possible(draft: Draft, target: TargetFacts, change: Reshape) -> None:
    """Raises PlanError, with vLLM's reason, before anything is read."""
    family = draft.family
    if change.window is not None:
        if family not in _WINDOWED:
            why = _MTP_WINDOW if family == "mtp" else _NO_ATTENTION
            raise PlanError(why, where="--window", expected="a draft with attention of its own")
        if not 16 <= change.window < target.max_position_embeddings:
            raise PlanError(
                f"a window of {change.window} tokens",
                where="--window",
                expected=f"16 to {target.max_position_embeddings - 1}",
            )
    if change.shares_head and change.tokens is not None:
        raise PlanError(
            "--share-head takes the target's whole vocabulary, --vocab a part of it",
            expected="one of the two",
        )
    if change.shares_head and family not in ("eagle3", "dflash"):
        raise PlanError(
            "an MTP head shares the target's output layer always"
            if family == "mtp"
            else f"vLLM 0.31.0 shares no output layer with a draft of family {family}",
            where="--share-head",
        )
    if change.tokens is not None and family not in ("eagle3", "dflash"):
        raise PlanError(_NO_VOCABULARY.get(family, "the family has no vocabulary"), where="--vocab")
    needs_targets = change.shares_head or (
        change.tokens is not None and "lm_head.weight" not in draft.tensors
    )
    if needs_targets and int(draft.config["hidden_size"]) != target.hidden_size:
        raise PlanError(
            f"the draft is {draft.config['hidden_size']} wide, the target's output layer reads"
            f" {target.hidden_size}",
            where="--share-head" if change.shares_head else "--vocab",
        )


def _window_keys(draft: Draft, window: int) -> dict[str, Any]:
    layers = int(draft.config.get("num_hidden_layers") or 1)
    keys = {"sliding_window": window, "layer_types": ["sliding_attention"] * layers}
    if draft.family == "dflash":
        settings = dict(draft.config.get("dflash_config") or {})
        return {"dflash_config": {**settings, "use_swa": True, "swa_window_size": window}}
    if draft.config.get("model_type") in ("qwen2", "qwen3"):  # else Qwen's config drops it
        return {**keys, "use_sliding_window": True, "max_window_layers": 0}
    return keys


def _share(
    target: TargetFacts, config: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, float]:
    """Takes the draft's own ends out; name -> relative difference to what stands in for it."""
    taken: dict[str, float] = {}
    offsets = tensors.get("d2t")
    for name in ("lm_head.weight", "embed_tokens.weight"):
        own = tensors.pop(name, None)
        if own is None:
            continue
        theirs = read_target_matrix(target, "head" if name.startswith("lm_head") else "embedding")
        if offsets is not None and name.startswith("lm_head"):
            import torch

            theirs = theirs[torch.arange(len(own)) + offsets]
        wide = theirs.float()
        taken[name] = float((own.float() - wide).norm() / wide.norm())
    if not taken:
        raise PlanError("the draft shares the target's ends already", where="--share-head")
    tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    config["draft_vocab_size"] = target.vocab_size
    return taken


def _cut(
    target: TargetFacts,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    tokens: Sequence[int],
) -> None:
    import torch

    ids = torch.tensor(list(tokens), dtype=torch.int64)
    own, offsets = tensors.get("lm_head.weight"), tensors.get("d2t")
    if own is None:
        rows = read_target_matrix(target, "head")[ids]
    elif offsets is None:
        rows = own[ids]
    else:
        today = torch.arange(len(own)) + offsets
        place = torch.searchsorted(today, ids)
        rows = own[place]
        assert bool((today[place] == ids).all()), "tokens outside the draft's vocabulary"
    kind = tensors["fc.weight"].dtype
    tensors["lm_head.weight"] = rows.to(kind).contiguous()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors.pop("t2d", None)
    config["draft_vocab_size"] = len(ids)


def read_target_matrix(target: TargetFacts, which: str) -> Tensor:
    """The target's "embedding" or "head" [V, D], as stored. Raises TargetError without one."""
    from safetensors import safe_open

    ending = "embed_tokens.weight"
    if which == "head" and not target.tie_word_embeddings:
        ending = "lm_head.weight"
    for file in sorted(Path(target.path).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                if name.endswith(ending) and not name.startswith("mtp."):
                    matrix: Tensor = opened.get_tensor(name)
                    return matrix
    raise TargetError(f"the target has no plain '{ending}'", where=str(target.path))
