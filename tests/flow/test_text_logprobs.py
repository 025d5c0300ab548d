"""The likelihood of a finished text under the target alone, on real vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from paceline.endpoint import Request
from paceline.errors import PlanError
from paceline.serve import VllmEndpoint

pytestmark = pytest.mark.engine

BF16_NATS = 0.15  # one prefill of all against one of each prefix: they round differently


def test_text_logprobs_are_those_of_each_next_token(
    plain_endpoint: VllmEndpoint, ask: Callable[..., Request]
) -> None:
    request = ask("Name three colours.", max_tokens=8)
    (answer,) = plain_endpoint.generate([request])
    (found,) = plain_endpoint.text_logprobs([(answer.prompt_ids, answer.output_ids)])
    assert len(found) == len(answer.output_ids)
    prefixes = [[*answer.prompt_ids, *answer.output_ids[:n]] for n in range(len(answer.output_ids))]
    for token, logprob, choice in zip(
        answer.output_ids, found, plain_endpoint.next_token(prefixes, top=5), strict=True
    ):
        seen = dict(zip(choice.token_ids, choice.logprobs, strict=True))
        assert logprob == pytest.approx(seen[token], abs=BF16_NATS)
    # a text that the target would not write is far less likely, and order is kept
    other = [(answer.prompt_ids, answer.output_ids[::-1]), (answer.prompt_ids, answer.output_ids)]
    unlikely, again = plain_endpoint.text_logprobs(other)
    assert math.fsum(unlikely) < math.fsum(again) - 5
    assert again == pytest.approx(found, abs=BF16_NATS)


def test_a_text_that_does_not_fit_is_refused(plain_endpoint: VllmEndpoint) -> None:
    with pytest.raises(PlanError, match="do not fit"):
        plain_endpoint.text_logprobs([((1,), (2,) * 5000)])
    with pytest.raises(PlanError, match="token id"):
        plain_endpoint.text_logprobs([((1,), (10**6,))])
