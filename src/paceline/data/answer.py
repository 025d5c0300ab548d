"""Prompts -> the target's own answers -> rows, through what serves it; can stop and go on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from paceline.data.prompt import Prompt
from paceline.data.prompt_set import PromptSet, require_few_rejected
from paceline.data.rows import (
    ROWS_NAME,
    Row,
    append_row,
    build_settings,
    finish_record,
    opened_folder,
    order_rows,
    read_data_record,
    read_rows,
)
from paceline.data.tokens import ChatTokenizer, Thinking, open_tokenizer
from paceline.endpoint import Answer, Request, Sampling
from paceline.errors import DataError
from paceline.target import TargetFacts

__all__ = ["Answering", "answer_prompts"]


class _Limits(Protocol):
    @property
    def max_model_len(self) -> int: ...


class Answering(Protocol):
    """What is asked of a served target here: an Endpoint, or a server somewhere (served.py)."""

    @property
    def facts(self) -> _Limits: ...

    def generate(
        self,
        requests: Sequence[Request],
        *,
        concurrency: int = 1,
        on_answer: Callable[[Answer], None] | None = None,
    ) -> list[Answer]: ...


def answer_prompts(
    prompt_set: PromptSet,
    endpoint: Answering,
    target: TargetFacts,
    *,
    out_dir: str | Path,
    sampling: Sampling,
    concurrency: int = 1,
    thinking: Thinking = "none",
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Answers every prompt and returns the finished record of `out_dir`.

    Each finished answer is on disk at once; the same call on an unfinished folder asks only what
    is missing, and on a finished one asks nothing. A finished folder has the prompts' order.
    on_progress(done, total) counts prompts.
    Raises DataError for changed settings, for a prompt set of which more than half is rejected,
    and when no row is left; what the endpoint raises passes through, and nothing done is lost.
    """
    _require_effect(sampling)
    out_dir = Path(out_dir)
    tokenizer = open_tokenizer(target, thinking=thinking)
    require_few_rejected(prompt_set)
    settings = build_settings(
        prompt_set,
        target,
        made_by="answers",
        sampling=_recorded_sampling(sampling),
        thinking=thinking,
    )
    with opened_folder(out_dir, settings) as is_finished:
        if is_finished:
            return read_data_record(out_dir)
        done = (
            {row.row_id for row in read_rows(out_dir)} if (out_dir / ROWS_NAME).exists() else set()
        )
        rejected: list[dict[str, Any]] = [
            {"line": line, "id": None, "reason": reason} for line, reason in prompt_set.rejected
        ]
        waiting = [prompt for prompt in prompt_set.prompts if prompt.prompt_id not in done]
        requests = _build_requests(
            waiting, tokenizer, sampling, endpoint.facts.max_model_len, rejected
        )
        prompts = {prompt.prompt_id: prompt for prompt in waiting}
        prompt_ids = {request.request_id: request.prompt_ids for request in requests}
        num_done = len(prompt_set.prompts) - len(requests)
        total = len(prompt_set.prompts)

        def take(answer: Answer) -> None:
            nonlocal num_done
            prompt = prompts.pop(answer.request_id)  # a second answer to one prompt is our bug
            assert answer.prompt_ids == prompt_ids[answer.request_id]
            reason = _take_answer(answer, prompt, tokenizer, out_dir)
            if reason is not None:
                rejected.append(_rejection(prompt, reason))
            num_done += 1
            if on_progress is not None:
                on_progress(num_done, total)

        if on_progress is not None:
            on_progress(num_done, total)
        if requests:
            endpoint.generate(requests, concurrency=concurrency, on_answer=take)
        if len(rejected) >= total + len(prompt_set.rejected):
            raise DataError(
                f"no answer could be used (first: {rejected[0]['reason']})", where=str(out_dir)
            )
        order_rows(out_dir, [prompt.prompt_id for prompt in prompt_set.prompts])
        rejected.sort(key=lambda item: item["line"])
        return finish_record(out_dir, settings, rejected=rejected, seed=sampling.seed)


def _rejection(prompt: Prompt, reason: str) -> dict[str, Any]:
    return {"line": prompt.line, "id": prompt.prompt_id, "reason": reason}


def _require_effect(sampling: Sampling) -> None:
    if sampling.temperature == 0 and (sampling.top_p != 1.0 or sampling.top_k != 0):
        raise DataError(
            "top_p and top_k have no effect at temperature 0",
            fix="Leave them out, or raise the temperature.",
        )


def _recorded_sampling(sampling: Sampling) -> Mapping[str, Any]:
    """Greedy answers do not depend on the seed, so it is not one of their settings."""
    return asdict(sampling if sampling.temperature > 0 else replace(sampling, seed=None))


def _own_sampling(sampling: Sampling, prompt_id: str) -> Sampling:
    """A seed of its own for each prompt: the answer is the same whichever run asks for it."""
    if sampling.temperature == 0 or sampling.seed is None:
        return sampling
    digest = hashlib.sha256(f"{sampling.seed}/{prompt_id}".encode()).digest()
    return replace(sampling, seed=int.from_bytes(digest[:4], "big") >> 1)


def _build_requests(
    prompts: list[Prompt],
    tokenizer: ChatTokenizer,
    sampling: Sampling,
    max_model_len: int,
    rejected: list[dict[str, Any]],
) -> list[Request]:
    requests = []
    for prompt in prompts:
        try:
            ids = tokenizer.encode_prompt(prompt.messages)
        except DataError as problem:
            rejected.append(_rejection(prompt, problem.what))
            continue
        needed = len(ids) + sampling.max_tokens
        if needed > max_model_len:
            reason = f"needs {needed} tokens with its answer; the engine takes {max_model_len}"
            rejected.append(_rejection(prompt, reason))
            continue
        own = _own_sampling(sampling, prompt.prompt_id)
        requests.append(Request(request_id=prompt.prompt_id, prompt_ids=ids, sampling=own))
    return requests


def _take_answer(
    answer: Answer, prompt: Prompt, tokenizer: ChatTokenizer, out_dir: Path
) -> str | None:
    """Writes the answer's row, or returns why it is none."""
    eos = tokenizer.target.eos_token_ids
    words = (
        answer.output_ids[:-1]
        if answer.output_ids[-1:] and answer.output_ids[-1] in eos
        else (answer.output_ids)
    )
    if not words or not tokenizer.decode(words).strip():
        return "the answer is empty"
    ids = answer.prompt_ids + answer.output_ids
    reason = tokenizer.answer_problem(prompt.messages, ids)
    if reason is not None:
        return reason
    row = Row(
        row_id=prompt.prompt_id,
        category=prompt.category,
        input_ids=ids,
        loss_spans=((len(answer.prompt_ids), len(ids)),),
        finish_reason=answer.finish_reason,
    )
    append_row(out_dir, row)
    return None
