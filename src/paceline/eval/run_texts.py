"""Whether a draft that was merely started left the target's text alone: `run.fidelity`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.endpoint import Answer, TokenChoice
from paceline.eval.fidelity import Text, build_fidelity
from paceline.eval.gate import find_withheld
from paceline.rules import Rules

__all__ = ["find_text_faults"]


def find_text_faults(
    plain: Sequence[Answer],
    drafted: Sequence[Answer],
    choices: Mapping[str, TokenChoice],
    rules: Rules,
) -> tuple[list[str], int]:
    """(why the texts are not the target's, by the gate of a measured run; how many really fork).

    plain, drafted: greedy answers to the same requests. choices: request id -> the target's own
    candidates at the first difference. [] where the gate passes.
    """
    fidelity = build_fidelity(
        _texts(plain),
        _texts(drafted),
        {(request_id, 0): choice for request_id, choice in choices.items()},
        {},
        rules,
    )
    withheld = find_withheld({"draft": fidelity}, rules)
    return withheld.get("draft", []), int(fidelity["real_fork"])


def _texts(answers: Sequence[Answer]) -> dict[tuple[str, int], Text]:
    return {
        (answer.request_id, 0): Text(
            output_ids=answer.output_ids, finish_reason=answer.finish_reason
        )
        for answer in answers
    }
