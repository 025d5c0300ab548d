"""Rules about sizes: inside the config, against the target, and against the contest's context."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.draft import Eagle3Sizes
from paceline.target import TargetFacts
from paceline.validate.case import Case
from paceline.validate.decoder import check_decoder
from paceline.validate.report import Finding, finding
from paceline.validate.rope import MAX_TABLE_ROWS, check_rope, count_table_rows

__all__ = ["check_fit", "check_positions"]

_FILE = "config.json"
_MAX_POSITIONS = 262_144


def check_fit(case: Case) -> Iterator[Finding]:
    """Rules that need the sizes; most also need the target."""
    if case.sizes is None:
        return
    yield from check_decoder(case)
    yield from check_rope(case)
    yield from check_positions(case)
    if case.sizes.draft_vocab_size > case.sizes.vocab_size:
        yield finding(
            "cfg.vocab",
            _FILE,
            "the draft vocabulary is larger than the vocabulary",
            where="draft_vocab_size",
            found=case.sizes.draft_vocab_size,
            expected=f"at most {case.sizes.vocab_size}",
            fix="A draft vocabulary is a part of the target's.",
        )
    if case.target is not None:
        yield from _check_width(case.sizes, case.target)
        yield from _check_vocabulary(case.sizes, case.target)


def _check_width(sizes: Eagle3Sizes, target: TargetFacts) -> Iterator[Finding]:
    """`cfg.hidden`."""
    if sizes.target_hidden_size != target.hidden_size:
        yield finding(
            "cfg.hidden",
            _FILE,
            f"the draft reads hidden states {sizes.target_hidden_size} wide, target"
            f" '{target.name}' makes them {target.hidden_size} wide",
            where="hidden_size",
            found=sizes.target_hidden_size,
            expected=str(target.hidden_size),
            fix="Point --target at the model the draft was trained for, or train for this one.",
        )


def _check_vocabulary(sizes: Eagle3Sizes, target: TargetFacts) -> Iterator[Finding]:
    """`cfg.vocab`."""
    if sizes.vocab_size != target.vocab_size:
        tokens = target.num_tokenizer_tokens
        rest = ", the rest is padding" if tokens and tokens < target.vocab_size else ""
        known = f" (its tokenizer has {tokens} tokens{rest})" if tokens else ""
        yield finding(
            "cfg.vocab",
            _FILE,
            f"vocab_size is {sizes.vocab_size}, target '{target.name}' has {target.vocab_size}"
            f" embedding rows{known}",
            where="vocab_size",
            found=sizes.vocab_size,
            expected=str(target.vocab_size),
            fix="Rebuild the vocabulary map for this target; editing the number alone breaks the"
            " weights.",
        )


def _tell_short(case: Case, last: int) -> str:
    if case.family in ("draft_model", "dflash"):
        return (
            f"vLLM 0.31.0 does not stretch the rotary table of a {case.family} draft, and past"
            f" {last:,} tokens it stops drafting or reads beyond the table"
        )
    return (
        "vLLM 0.31.0 stretches an eagle3 draft's rotary table to the target's length, but its V1"
        f" runner still stops drafting once a sequence passes {last:,} tokens"
    )


def check_positions(case: Case) -> Iterator[Finding]:
    """`cfg.pos`: enough positions for the context, and no rotary table that nobody needs."""
    stated = case.config.get("max_position_embeddings")
    positions = stated if isinstance(stated, int) and not isinstance(stated, bool) else 2048
    k = case.num_speculative_tokens or 1
    context = case.limits.context_tokens
    needed = context + k + 1
    where = "max_position_embeddings"
    target = case.target.max_position_embeddings if case.target else None
    ceiling = max(_MAX_POSITIONS, target or 0)
    if positions < 1:
        yield finding(
            "cfg.pos",
            _FILE,
            "there must be positions",
            where=where,
            found=stated,
            expected=f"at least {needed}",
            fix="Copy the target's value.",
            severity="error",
        )
    elif positions > ceiling or count_table_rows(case, positions) > 4 * ceiling:
        rows = int(count_table_rows(case, positions))
        refused = case.is_contest or rows > MAX_TABLE_ROWS
        yield finding(
            "cfg.pos",
            _FILE,
            f"{positions:,} positions make a rotary table of {rows:,} rows that nobody needs, in"
            " memory that the file sizes hide",
            where=where,
            found=stated,
            expected=f"at most {ceiling:,}",
            fix="Copy the target's value.",
            severity="error" if refused else "warning",
        )
    elif positions < needed:
        own = target is not None and target < needed and positions >= target
        useful = needed if target is None else min(needed, target)
        default = " (not stated: the default)" if stated is None else ""
        yield finding(
            "cfg.pos",
            _FILE,
            f"{positions:,} positions{default} are fewer than {needed:,} (context {context:,} + K"
            f" {k} + 1); "
            + (
                f"the target itself ends at {target:,}"
                if own
                else _tell_short(case, max(positions - k, 0))
            ),
            where=where,
            found=positions,
            expected=f"at least {useful:,}",
            fix="Nothing the draft could do: a longer target is needed for that context."
            if own
            else f"Train and state at least {useful:,} positions.",
            severity="warning",
        )
