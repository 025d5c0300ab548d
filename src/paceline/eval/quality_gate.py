"""The verdict on one task: pass, fail, or undecided with the reason.

A gate never passes where the answers' format is broken, as then nobody knows what was measured, and
never fails for answers that were cut: it fails only where it would with every cut answer right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.eval.quality import PairedLoss, Tally, wilson_interval
from paceline.rules import QualityGate

__all__ = ["GateResult", "Verdict", "join_verdicts", "judge_quality"]

Verdict = Literal["pass", "fail", "undecided"]


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """reasons: one sentence for each thing that decided, empty for a plain pass."""

    verdict: Verdict
    reasons: tuple[str, ...]


def judge_quality(
    gate: QualityGate,
    arm: Tally,
    *,
    plain: Tally | None,
    loss: PairedLoss | None,
    applies_minimum: bool,
    max_broken_share: float,
    confidence: float,
) -> GateResult:
    """Holds an arm to the challenge's minimum, where that is meant for it, and to the plain target.

    applies_minimum: the target is the challenge's own. plain, loss: of the unoptimised target on
    the same questions; None without one.
    """
    found: list[tuple[Verdict, str]] = []
    broken = _judge_format(arm, plain, max_broken_share, confidence)
    if broken is not None:
        found.append(broken)
    if applies_minimum:
        found.append(_judge_minimum(gate, arm))
    if loss is not None:
        found.append(_judge_loss(gate, loss))
    if not applies_minimum and loss is None:
        found.append(("undecided", "nothing to compare with: name the unoptimised target"))
    return GateResult(
        verdict=join_verdicts([verdict for verdict, _ in found]),
        reasons=tuple(reason for verdict, reason in found if verdict != "pass"),
    )


def join_verdicts(verdicts: list[Verdict]) -> Verdict:
    """The worst one: a failure, else what is undecided, else a pass. Nothing asked is no pass."""
    if not verdicts:
        return "undecided"
    return next((word for word in ("fail", "undecided") if word in verdicts), "pass")


def _judge_format(
    arm: Tally, plain: Tally | None, max_broken_share: float, confidence: float
) -> tuple[Verdict, str] | None:
    share = arm.broken_share
    of_plain = plain.broken_share if plain is not None else None
    if of_plain is not None and of_plain > max_broken_share:
        return "undecided", (
            f"the unoptimised target's own answers cannot be read ({of_plain:.1%}): its chat "
            "template or thinking mode does not fit the task"
        )
    if share is None or share <= max_broken_share:
        return None
    if of_plain is None:
        return "undecided", f"{share:.1%} of the finished answers cannot be read"
    interval = wilson_interval(arm.broken, arm.num_finished, confidence=confidence)
    is_sure = interval is not None and interval[0] > max_broken_share
    return "fail" if is_sure else "undecided", (
        f"{share:.1%} of the finished answers cannot be read, {of_plain:.1%} of the unoptimised "
        "target's"
    )


def _judge_minimum(gate: QualityGate, arm: Tally) -> tuple[Verdict, str]:
    if arm.lowest >= gate.minimum:
        return "pass", ""
    if arm.highest < gate.minimum:
        return "fail", f"at most {arm.highest:.3f} right, {gate.minimum:.3f} asked"
    return "undecided", (
        f"between {arm.lowest:.3f} and {arm.highest:.3f} right, {gate.minimum:.3f} asked: "
        f"{arm.cut} of {arm.num_questions} answers were cut, raise --max-tokens"
    )


def _judge_loss(gate: QualityGate, loss: PairedLoss) -> tuple[Verdict, str]:
    edge = -gate.max_loss
    if loss.low is None or loss.high is None:
        return "undecided", "no question was finished by both: raise --max-tokens"
    if loss.high < edge and loss.highest < edge:
        return "fail", (
            f"{-(loss.difference or 0.0):.3f} lost to the unoptimised target, surely more than "
            f"{gate.max_loss:.3f}"
        )
    if loss.low >= edge and loss.lowest >= edge:
        return "pass", ""
    if loss.low >= edge:
        return "undecided", (
            f"{loss.num_cut} questions were cut, too many to say that at most {gate.max_loss:.3f} "
            "was lost: raise --max-tokens"
        )
    return "undecided", (
        f"too few questions to say whether more than {gate.max_loss:.3f} was lost: "
        f"{loss.low:+.3f} to {loss.high:+.3f}"
    )
