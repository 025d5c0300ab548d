"""Several servers or engines of one target as one: each has its share of the requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from paceline.data.answer import Answering
from paceline.data.served import Limits, open_server
from paceline.endpoint import Answer, Request
from paceline.errors import PacelineError, PlanError
from paceline.target import TargetFacts

__all__ = ["DataParallel", "open_servers"]


class DataParallel:
    """Every n-th request goes to the same of n; limits are the tightest one's."""

    def __init__(self, members: Sequence[Answering]) -> None:
        self.facts = Limits(max_model_len=min(m.facts.max_model_len for m in members))
        self._members = tuple(members)

    def generate(
        self,
        requests: Sequence[Request],
        *,
        concurrency: int = 1,
        on_answer: Callable[[Answer], None] | None = None,
    ) -> list[Answer]:
        """Answers in request order; on_answer from one thread at a time.

        concurrency: of all together, evenly. When one fails, the others end their shares (their
        answers are not lost), then its EngineError is raised: the same call again spreads what is
        missing over all of them.
        """
        num = len(self._members)
        lock, stopping = threading.Lock(), threading.Event()

        def take(answer: Answer) -> None:
            with lock:
                if stopping.is_set():
                    raise KeyboardInterrupt
                if on_answer is not None:
                    on_answer(answer)

        def ask(number: int) -> list[Answer]:
            return self._members[number].generate(
                requests[number::num], concurrency=max(1, concurrency // num), on_answer=take
            )

        pool = ThreadPoolExecutor(max_workers=num)
        shares = [pool.submit(ask, number) for number in range(num)]
        try:
            problems = [share.exception() for share in shares]
        except KeyboardInterrupt:
            stopping.set()  # the next answer of each ends its share
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
        for problem in sorted(
            (p for p in problems if p is not None), key=lambda p: isinstance(p, PacelineError)
        ):
            raise problem  # a fault of ours before another's
        found = {answer.request_id: answer for share in shares for answer in share.result()}
        return [found[request.request_id] for request in requests]


def open_servers(
    urls: Sequence[str], target: TargetFacts, *, model: str | None = None
) -> Answering:
    """One server or several, each asked for what it serves. Raises PlanError, EngineError."""
    again = next((url for n, url in enumerate(urls) if url in urls[:n]), None)
    if again is not None:
        raise PlanError(f"the server {again} is named twice", fix="Name each once.")
    servers = [open_server(url, target, model=model) for url in urls]
    return servers[0] if len(servers) == 1 else DataParallel(servers)
