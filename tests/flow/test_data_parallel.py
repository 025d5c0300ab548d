"""Two engines that answer together, real vLLM: what one makes; one that dies loses no row."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from command_line import every_core

from paceline.cli.arms import start_targets
from paceline.data import Answering, DataParallel, answer_prompts, read_prompts, read_rows
from paceline.endpoint import Sampling
from paceline.errors import EngineError
from paceline.serve import VllmEndpoint
from paceline.target import TargetFacts

pytestmark = pytest.mark.engine

NUM = 8
SAMPLING = Sampling(max_tokens=12, temperature=0.3, seed=4)


def answer(endpoint: Answering, target: TargetFacts, out: Path, **options: Any) -> dict[str, Any]:
    prompts = read_prompts(f"train:{NUM}")
    settings = {"sampling": SAMPLING, "concurrency": 4, **options}
    return answer_prompts(prompts, endpoint, target, out_dir=out, **settings)


def test_one_dies_and_the_rows_are_those_of_one_engine(
    smollm2: TargetFacts, plain_endpoint: VllmEndpoint, tmp_path: Path
) -> None:
    out = tmp_path / "data"
    with (
        every_core(),
        start_targets(smollm2, out, num=2, max_num_seqs=2, device="cpu") as engines,
    ):
        first, second = engines
        assert isinstance(second, VllmEndpoint)
        assert [one.facts.settings["num_threads"] for one in engines] == [
            os.cpu_count() // 2  # type: ignore[operator]
        ] * 2
        pid = second._process.pid

        def stop_it_and_then_kill_it(done: int, total: int) -> None:
            if done in (0, 2):  # before it is asked; in the middle of its share
                os.kill(pid, signal.SIGKILL if done else signal.SIGSTOP)

        with pytest.raises(EngineError, match="died"):
            answer(DataParallel(engines), smollm2, out, on_progress=stop_it_and_then_kill_it)
        kept = read_rows(out)
        assert len(kept) == NUM // 2  # the other one ended its share
        counts = answer(first, smollm2, out, concurrency=2)["counts"]
        assert counts["rows"] == NUM
    rows = read_rows(out)
    assert {row.row_id: row for row in kept}.items() <= {row.row_id: row for row in rows}.items()
    answer(plain_endpoint, smollm2, tmp_path / "alone")
    alone = read_rows(tmp_path / "alone")
    assert [row.row_id for row in rows] == [row.row_id for row in alone]
    assert [row.loss_spans[0][0] for row in rows] == [row.loss_spans[0][0] for row in alone]
    same = sum(row.input_ids == other.input_ids for row, other in zip(rows, alone, strict=True))
    assert same >= NUM - 2, same  # other rows beside one round its products another way
