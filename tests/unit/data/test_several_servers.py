"""`--server` several times: every server gets its share, one that fails loses nothing."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from test_served import server

from paceline.data import answer_prompts, open_servers, open_tokenizer, read_prompts, read_rows
from paceline.endpoint import Sampling
from paceline.errors import EngineError, PlanError
from paceline.target import TargetFacts


def answer(urls: list[str], target: TargetFacts, tmp_path: Path) -> dict[str, Any]:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "why " * (i + 1), "id": f"p{i}"} for i in range(12)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return answer_prompts(
        read_prompts(prompts),
        open_servers(urls, target),
        target,
        out_dir=tmp_path / "data",
        sampling=Sampling(max_tokens=8),
        concurrency=4,
    )


def test_each_server_answers_its_share(target: TargetFacts, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(target)
    with server(tokenizer=tokenizer) as (one, asked), server(tokenizer=tokenizer) as (two, others):
        assert answer([one, two], target, tmp_path)["counts"]["rows"] == 12
    assert (len(asked), len(others)) == (6, 6)
    rows = {row.row_id: row for row in read_rows(tmp_path / "data")}
    assert len(rows) == 12
    asked_for = {tuple(body["prompt"]) for body in (*asked, *others)}
    assert {row.input_ids[: row.loss_spans[0][0]] for row in rows.values()} == asked_for


def test_the_file_is_the_one_that_one_alone_makes(target: TargetFacts, tmp_path: Path) -> None:
    """Same rows, same order: whoever is done first, and after a stop."""
    tokenizer, made = open_tokenizer(target), []
    for name, slow in (("one", [0.0]), ("two", [0.05, 0.0]), ("three", [0.0, 0.0, 0.05])):
        (tmp_path / name).mkdir()
        with contextlib.ExitStack() as stack:
            urls = [stack.enter_context(server(tokenizer=tokenizer, slow=s))[0] for s in slow]
            answer(urls, target, tmp_path / name)
        made.append((tmp_path / name / "data" / "rows.jsonl").read_bytes())
    assert made[0] == made[1] == made[2]
    assert [json.loads(line)["id"] for line in made[0].splitlines()] == [f"p{n}" for n in range(12)]


def test_one_fails_the_other_goes_on_and_the_rest_is_spread_again(
    target: TargetFacts, tmp_path: Path
) -> None:
    tokenizer = open_tokenizer(target)
    with (
        server(tokenizer=tokenizer) as (good, asked),
        server(tokenizer=tokenizer, statuses=[404] * 12) as (bad, _),
    ):
        with pytest.raises(EngineError, match="answered 404"):
            answer([good, bad], target, tmp_path)
        assert len(read_rows(tmp_path / "data")) == len(asked) == 6
    with server(tokenizer=tokenizer) as (one, asked), server(tokenizer=tokenizer) as (two, others):
        assert answer([one, two], target, tmp_path)["counts"]["rows"] == 12
    assert (len(asked), len(others)) == (3, 3)


def test_the_tightest_context_counts(target: TargetFacts) -> None:
    tokenizer = open_tokenizer(target)
    long, short = ([{"id": "toy", "max_model_len": n}] for n in (512, 64))
    with (
        server(tokenizer=tokenizer, models=long) as (one, _),
        server(tokenizer=tokenizer, models=short) as (two, _),
    ):
        assert open_servers([one, two], target).facts.max_model_len == 64
        with pytest.raises(PlanError, match="named twice"):
            open_servers([one, one], target)
