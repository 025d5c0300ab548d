"""What an engine is asked and answers: checked before it is sent, read when it comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.endpoint import Answer, Request
from paceline.errors import EngineError, PlanError
from paceline.serve.plan import Plan

__all__ = [
    "ONE_TOKEN_ENDS_IT",
    "check_ids",
    "check_requests",
    "dies_on_one_token",
    "read_answer",
    "show_request",
]

ONE_TOKEN_ENDS_IT = (
    "a prompt of one token ends vLLM 0.31.0's CPU engine on a target with recurrent layers"
    " (causal_conv1d_fwd_cpu)"
)


def dies_on_one_token(plan: Plan) -> bool:
    """Whether a prompt of one token would end this plan's engine for everyone."""
    return plan.device == "cpu" and plan.target.is_hybrid


def check_requests(plan: Plan, requests: Sequence[Request], concurrency: int) -> None:
    """Raises PlanError for what an engine of the plan cannot take."""
    if not 1 <= concurrency <= plan.max_num_seqs:
        raise PlanError(
            f"concurrency {concurrency}",
            expected=f"1 to {plan.max_num_seqs}, the engine's max_num_seqs",
            fix="Plan the engine with a larger max_num_seqs.",
        )
    for request in requests:
        where = f"request {request.request_id}"
        if request.sampling.max_tokens < 1:
            raise PlanError("max_tokens is below 1", where=where)
        check_ids(plan, where, request.prompt_ids, request.sampling.max_tokens)


def check_ids(plan: Plan, where: str, prompt_ids: Sequence[int], max_tokens: int) -> None:
    """Raises PlanError for tokens that an engine of the plan cannot read. where: for the error."""
    vocab_size, limit = plan.target.vocab_size, plan.max_model_len
    if not prompt_ids:
        raise PlanError("the prompt is empty", where=where)
    if len(prompt_ids) == 1 and dies_on_one_token(plan):
        raise PlanError(ONE_TOKEN_ENDS_IT, where=where, expected="two tokens or more")
    if not all(0 <= token < vocab_size for token in prompt_ids):
        raise PlanError(
            "the prompt holds a token id that the target does not have",
            where=where,
            expected=f"ids from 0 to {vocab_size - 1}",
        )
    if len(prompt_ids) + max_tokens > limit:
        raise PlanError(
            f"{len(prompt_ids)} prompt tokens and {max_tokens} new ones do not fit",
            where=where,
            expected=f"at most max_model_len = {limit} together",
            fix="Plan the engine with a larger max_model_len, or shorten the prompt.",
        )


def show_request(request: Request) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "prompt_ids": list(request.prompt_ids),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
    }


def read_answer(request: Request, event: Mapping[str, Any]) -> Answer:
    if event["finish_reason"] not in ("stop", "length"):
        raise EngineError(
            f"a request ended with {event['finish_reason']!r}",
            where=f"request {request.request_id}",
            expected="stop or length",
        )
    accepted, drafted = event["accepted"], event["drafted"]
    return Answer(
        request_id=request.request_id,
        prompt_ids=tuple(request.prompt_ids),
        output_ids=tuple(event["output_ids"]),
        finish_reason=event["finish_reason"],
        sent_at_s=event["sent_at_s"],
        chunk_times_s=tuple(event["chunk_times_s"]),
        chunk_tokens=tuple(event["chunk_tokens"]),
        per_step_accepted=None if accepted is None else tuple(accepted),
        per_step_drafted=None if drafted is None else tuple(drafted),
    )
