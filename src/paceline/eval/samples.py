"""Sample answers, step by step, for a report: what was accepted, what the target wrote itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.endpoint import Answer

__all__ = ["Step", "build_samples", "split_steps", "token_texts"]

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One target pass of an answer: output_ids[start:start + num_accepted] were drafted.

    num_own: tokens of the target itself, 1, or 0 when a stop cut the step. num_drafted is 0 for
    prefill and for a step without a draft. drafting_step: its place among drafting steps, or None.
    """

    start: int
    num_accepted: int
    num_own: int
    num_drafted: int
    num_rejected: int
    drafting_step: int | None


def split_steps(answer: Answer) -> list[Step] | None:
    """The answer's passes in order, prefill first; None when chunks do not tell them apart.

    Drafting steps come from vLLM's per-step record. Where it does not cover the answer, steps
    without a draft lie between them and are found by chunk: one chunk a step.
    """
    accepted = answer.per_step_accepted or ()
    drafted = answer.per_step_drafted or ()
    total = len(answer.output_ids)
    steps = [_plain_step(0)]
    covered = 1 + sum(took + 1 for took in accepted)
    # more chunks than drafting steps: some had no draft, even where a cut step hides that
    if covered >= total and len(answer.chunk_tokens) - 1 <= len(accepted):
        sizes = [took + 1 for took in accepted]
    elif answer.chunk_tokens[0] == 1:
        sizes = list(answer.chunk_tokens[1:])
    else:
        return None
    start, nth = 1, 0
    for size in sizes:
        took = accepted[nth] if nth < len(accepted) else None
        room = total - start
        if took is not None and (took + 1 == size or (size == room and took + 1 > room)):
            delivered = min(took, room)
            steps.append(
                Step(
                    start=start,
                    num_accepted=delivered,
                    num_own=1 if took < room else 0,
                    num_drafted=drafted[nth],
                    num_rejected=drafted[nth] - took,
                    drafting_step=nth,
                )
            )
            nth += 1
        elif size == 1:
            steps.append(_plain_step(start))
        else:
            return None
        start += min(size, room)
    return steps if start == total and nth == len(accepted) else None


def _plain_step(start: int) -> Step:
    return Step(
        start=start, num_accepted=0, num_own=1, num_drafted=0, num_rejected=0, drafting_step=None
    )


def build_samples(
    answers: Sequence[Answer],
    decode: Decode,
    proposals: Mapping[str, Sequence[Sequence[int]]] | None = None,
    *,
    arm: str = "candidate",
    categories: Mapping[str, str] | None = None,
    prompts: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """result.json's "samples". An answer whose steps cannot be told apart is left out.

    decode: ids -> text. proposals: request id -> drafted ids of each drafting step, if a replay
    knows them; else "rejected" is null and only its number is known. categories, prompts: request
    id -> category, text; without a text the prompt's ids are decoded. "target" is null where a
    stop cut the step before the target's own token.
    """
    samples = []
    for answer in answers:
        steps = split_steps(answer)
        if steps is None:
            continue
        texts = token_texts(answer.output_ids, decode)
        own = (proposals or {}).get(answer.request_id)
        samples.append(
            {
                "id": answer.request_id,
                "category": (categories or {}).get(answer.request_id),
                "prompt": (prompts or {}).get(answer.request_id) or decode(list(answer.prompt_ids)),
                "arm": arm,
                "steps": [_show_step(step, texts, own, decode) for step in steps],
            }
        )
    return samples


def _show_step(
    step: Step, texts: list[str], proposals: Sequence[Sequence[int]] | None, decode: Decode
) -> dict[str, Any]:
    end = step.start + step.num_accepted
    rejected = None
    if proposals is not None and step.drafting_step is not None:
        drafted = proposals[step.drafting_step]
        rejected = [decode([token]) for token in drafted[len(drafted) - step.num_rejected :]]
    elif step.num_rejected == 0:
        rejected = []
    return {
        "accepted": texts[step.start : end],
        "target": texts[end] if step.num_own else None,
        "rejected": rejected,
        "num_rejected": step.num_rejected,
    }


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """One text a token; together they are decode(ids).

    A character spread over several tokens is shown with the last of them.
    """
    texts: list[str] = []
    shown = ""
    for end in range(1, len(ids) + 1):
        whole = decode(list(ids[:end]))
        if whole.endswith("\ufffd") and end < len(ids):
            texts.append("")
            continue
        texts.append(whole[len(shown) :])
        shown = whole
    return texts
