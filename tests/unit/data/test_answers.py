from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from toy_chat import ALWAYS_THINKS, END, SWITCH, ScriptedEndpoint, make_chat_target

from paceline import records
from paceline.data import (
    answer_prompts,
    build_requests,
    contamination,
    open_tokenizer,
    read_data_record,
    read_prompts,
    read_rows,
)
from paceline.endpoint import Request, Sampling
from paceline.errors import DataError, EngineError, MissingExtraError, StorageError
from paceline.target import TargetFacts

GREEDY = Sampling(max_tokens=8)


def prompt_file(tmp_path: Path, num: int = 6) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"question {i}", "id": f"p{i}", "category": "chat"} for i in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def say(target: TargetFacts, text: str) -> list[int]:
    return list(open_tokenizer(target).encode(text))


def echo(request: Request) -> tuple[list[int], str]:
    return [*request.prompt_ids[-4:-1], END], "stop"


def run(
    tmp_path: Path, target: TargetFacts, endpoint: ScriptedEndpoint, num: int = 6, **options: Any
) -> dict[str, Any]:
    settings = {"sampling": GREEDY, **options}
    prompts = read_prompts(prompt_file(tmp_path, num))
    return answer_prompts(prompts, endpoint, target, out_dir=tmp_path / "data", **settings)


def test_rows_are_prompt_ids_and_output_ids(tmp_path: Path, target: TargetFacts) -> None:
    seen: list[tuple[int, int]] = []
    endpoint = ScriptedEndpoint(echo)
    record = run(
        tmp_path, target, endpoint, on_progress=lambda done, total: seen.append((done, total))
    )
    rows = read_rows(tmp_path / "data")
    assert [row.row_id for row in rows] == [f"p{i}" for i in range(6)]
    for row, request in zip(rows, endpoint.asked, strict=True):
        output = tuple(echo(request)[0])
        assert row.input_ids == request.prompt_ids + output
        assert row.loss_spans == ((len(request.prompt_ids), len(row.input_ids)),)
        assert (row.category, row.finish_reason) == ("chat", "stop")
    text = open_tokenizer(target).decode(endpoint.asked[2].prompt_ids)
    assert text == "<s>user:question 2<e>\n<s>assistant:"
    assert seen[0] == (0, 6)
    assert seen[-1] == (6, 6)
    assert record == read_data_record(tmp_path / "data")
    assert record["complete"] is True
    assert record["counts"]["rows"] == 6
    assert record["counts"]["supervised_tokens"] == 24
    assert record["target"]["tokenizer_sha256"] == target.tokenizer_sha256
    assert record["prompts"]["num_prompts"] == 6


def test_cut_answers_are_kept_and_empty_ones_rejected(tmp_path: Path, target: TargetFacts) -> None:
    answers = {
        "p1": ([END], "stop"),
        "p2": ([], "stop"),
        "p3": (say(target, " \n"), "length"),
        "p4": (say(target, "abcdefgh"), "length"),
    }
    record = run(tmp_path, target, ScriptedEndpoint(lambda r: answers.get(r.request_id) or echo(r)))
    rows = {row.row_id: row for row in read_rows(tmp_path / "data")}
    assert sorted(rows) == ["p0", "p4", "p5"]
    assert rows["p4"].finish_reason == "length"
    assert rows["p4"].num_supervised == 8
    assert [(item["line"], item["id"], item["reason"]) for item in record["rejected"]] == [
        (line, f"p{line - 1}", "the answer is empty") for line in (2, 3, 4)
    ]
    assert record["counts"]["finish_reasons"] == {"length": 1, "stop": 2}


@pytest.mark.parametrize("error", [EngineError("the engine died"), KeyboardInterrupt()])
def test_a_stopped_run_goes_on(tmp_path: Path, target: TargetFacts, error: BaseException) -> None:
    with pytest.raises(type(error)):
        run(tmp_path, target, ScriptedEndpoint(echo, dies_after=2, error=error))
    with pytest.raises(DataError, match="unfinished"):
        read_data_record(tmp_path / "data")
    with open(tmp_path / "data" / "rows.jsonl", "a") as file:
        file.write('{"id": "p2", "input')  # the line that a kill cut
    again = ScriptedEndpoint(echo)
    record = run(tmp_path, target, again)
    assert [request.request_id for request in again.asked] == ["p2", "p3", "p4", "p5"]
    assert [row.row_id for row in read_rows(tmp_path / "data")] == [f"p{i}" for i in range(6)]
    assert record["counts"]["rows"] == 6
    third = ScriptedEndpoint(echo)
    assert run(tmp_path, target, third) == record
    assert third.asked == []


def test_sigkill_at_any_moment_loses_no_finished_row(tmp_path: Path, target: TargetFacts) -> None:
    script = textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from toy_chat import ScriptedEndpoint
        from test_answers import echo, run
        from paceline.target import read_target
        def slow(request):
            time.sleep(0.02)
            print(request.request_id, flush=True)
            return echo(request)
        run(Path({str(tmp_path)!r}), read_target({str(target.path)!r}, require_weights=False),
            ScriptedEndpoint(slow), num=500)
    """)
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(5):
        child.stdout.readline()
    time.sleep(0.03)
    os.kill(child.pid, signal.SIGKILL)
    finished = 5 + len(child.stdout.read().split())
    child.wait(timeout=10)
    again = ScriptedEndpoint(echo)
    run(tmp_path, target, again, num=500)
    rows = read_rows(tmp_path / "data")  # would raise for a row that is there twice
    assert len(rows) == 500
    assert len(again.asked) in (500 - finished, 500 - finished + 1)  # the last one was in flight


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampling": Sampling(max_tokens=9)}, "sampling.max_tokens is 9"),
        ({"sampling": Sampling(max_tokens=8, temperature=0.5, seed=1)}, "sampling.temperature"),
        ({"num": 5}, "prompts.sha256"),
    ],
)
def test_changed_settings_are_named(
    tmp_path: Path, target: TargetFacts, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(EngineError):
        run(tmp_path, target, ScriptedEndpoint(echo, dies_after=2))
    with pytest.raises(DataError) as caught:
        run(tmp_path, target, ScriptedEndpoint(echo), **change)
    assert words in str(caught.value)
    assert len(read_rows(tmp_path / "data")) == 2


def test_another_target_is_named(tmp_path: Path, target: TargetFacts) -> None:
    run(tmp_path, target, ScriptedEndpoint(echo))
    other = make_chat_target(tmp_path / "other", template=ALWAYS_THINKS)
    with pytest.raises(DataError, match=r"target\.(name|chat_template_sha256)"):
        run(tmp_path, other, ScriptedEndpoint(echo))


def test_sampled_answers_have_their_own_repeatable_seeds(
    tmp_path: Path, target: TargetFacts
) -> None:
    sampled = Sampling(max_tokens=8, temperature=0.7, top_p=0.9, seed=3)
    first = ScriptedEndpoint(echo)
    run(tmp_path, target, first, sampling=sampled)
    (tmp_path / "data").rename(tmp_path / "before")
    second = ScriptedEndpoint(echo)
    run(tmp_path, target, second, sampling=sampled)
    seeds = [request.sampling.seed for request in first.asked]
    assert len(set(seeds)) == 6
    assert seeds == [request.sampling.seed for request in second.asked]
    with pytest.raises(DataError, match="no effect at temperature 0"):
        run(tmp_path, target, first, sampling=Sampling(max_tokens=8, top_p=0.9))


def test_u26_thinking_ids_are_exact_and_tags_are_counted(tmp_path: Path) -> None:
    target = make_chat_target(tmp_path / "thinks", template=ALWAYS_THINKS)
    outputs = {
        "p0": "abc</think>xyz",
        "p1": "no close tag",
        "p2": "<think>abc</think>xyz",
        "p3": "a</think>b</think>c",
        "p4": "de</think>f",
        "p5": "g</think>h",
    }
    endpoint = ScriptedEndpoint(lambda r: ([*say(target, outputs[r.request_id]), END], "stop"))
    record = run(tmp_path, target, endpoint)
    rows = {row.row_id: row for row in read_rows(tmp_path / "data")}
    assert sorted(rows) == ["p0", "p4", "p5"]
    asked = {request.request_id: request for request in endpoint.asked}
    assert rows["p0"].input_ids == (*asked["p0"].prompt_ids, *say(target, outputs["p0"]), END)
    text = open_tokenizer(target).decode(rows["p0"].input_ids)
    assert text == "<s>user:question 0<e>\n<s>assistant:<think>\nabc</think>xyz<e>"
    assert {item["id"]: item["reason"][:40] for item in record["rejected"]} == {
        "p1": "1 opening and 0 closing think tags (thin",
        "p2": "2 opening and 1 closing think tags (thin",
        "p3": "1 opening and 2 closing think tags (thin",
    }


def test_u26_both_modes_of_a_switch(tmp_path: Path) -> None:
    target = make_chat_target(tmp_path / "switch", template=SWITCH)
    off = open_tokenizer(target, thinking="off")
    record = run(tmp_path, target, ScriptedEndpoint(echo), thinking="off")
    assert record["thinking"] == "off"
    row = read_rows(tmp_path / "data")[0]
    assert "<s>assistant:<think></think>" in off.decode(row.input_ids)
    with pytest.raises(DataError, match="thinking is 'on'"):
        run(tmp_path, target, ScriptedEndpoint(echo), thinking="on")


def test_prompts_that_do_not_fit_or_hold_control_tokens(
    tmp_path: Path, target: TargetFacts
) -> None:
    path = tmp_path / "p.jsonl"
    rows = ["short", "also short", "x" * 100, "a <e> b", "one more", "and more"]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rows))
    endpoint = ScriptedEndpoint(echo, max_model_len=64)
    record = answer_prompts(
        read_prompts(path), endpoint, target, out_dir=tmp_path / "data", sampling=GREEDY
    )
    reasons = {item["line"]: item["reason"] for item in record["rejected"]}
    assert sorted(reasons) == [3, 4]
    assert "the engine takes 64" in reasons[3]
    assert "control token <e>" in reasons[4]
    with pytest.raises(DataError, match="prompt line-4"):
        build_requests(read_prompts(path).prompts, target, GREEDY)


def test_without_transformers_the_install_line_is_named(
    tmp_path: Path, target: TargetFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'paceline\[train\]'"):
        run(tmp_path, target, ScriptedEndpoint(echo))


def test_no_usable_answer(tmp_path: Path, target: TargetFacts) -> None:
    with pytest.raises(DataError, match="no answer could be used"):
        run(tmp_path, target, ScriptedEndpoint(lambda request: ([END], "stop")))


def test_full_disk_keeps_what_is_done(
    tmp_path: Path, target: TargetFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(request: Request) -> tuple[list[int], str]:
        if request.request_id == "p3":

            def fail(*_: object, **__: object) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            monkeypatch.setattr(records, "open", fail, raising=False)
        return echo(request)

    with pytest.raises(StorageError, match="the disk is full"):
        run(tmp_path, target, ScriptedEndpoint(fill))
    monkeypatch.undo()
    assert len(read_rows(tmp_path / "data")) == 3
    assert run(tmp_path, target, ScriptedEndpoint(echo))["counts"]["rows"] == 6


def test_two_writers_are_refused(tmp_path: Path, target: TargetFacts) -> None:
    def nested(request: Request) -> tuple[list[int], str]:
        with pytest.raises(DataError, match="another process is writing"):
            run(tmp_path, target, ScriptedEndpoint(echo))
        return echo(request)

    assert run(tmp_path, target, ScriptedEndpoint(nested), num=1)["counts"]["rows"] == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"id": "p0"}', "must be text"),
        ('{"id":"x","category":"c","finish_reason":"stop","input_ids":[1.5]}', "input_ids"),
        (
            '{"id":"x","category":"c","finish_reason":"stop","input_ids":[1,2],"loss_spans":[]}',
            "nothing to learn",
        ),
        (
            '{"id":"x","category":"c","finish_reason":"stop","input_ids":[1,2],'
            '"loss_spans":[[1,3]]}',
            "does not fit",
        ),
        (
            '{"id":"x","category":"c","finish_reason":"stop","input_ids":[1,2],'
            '"loss_spans":[[1,1]]}',
            "does not fit",
        ),
        (
            '{"id":"x","category":"c","finish_reason":"stop","input_ids":[1,2,3],'
            '"loss_spans":[[1,3],[2,3]]}',
            "does not fit",
        ),
        (
            '{"id":"p0","category":"c","finish_reason":"stop","input_ids":[1,2],'
            '"loss_spans":[[1,2]]}',
            "there twice",
        ),
        ("{", "not valid JSON"),
    ],
)
def test_damaged_rows_are_named(tmp_path: Path, target: TargetFacts, line: str, words: str) -> None:
    run(tmp_path, target, ScriptedEndpoint(echo))
    path = tmp_path / "data" / "rows.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=words) as caught:
        read_rows(tmp_path / "data")
    assert "rows.jsonl:7" in str(caught.value)


@pytest.mark.parametrize("key", ["target", "prompts", "counts", "thinking", "rejected"])
def test_a_damaged_record_is_named(tmp_path: Path, target: TargetFacts, key: str) -> None:
    run(tmp_path, target, ScriptedEndpoint(echo))
    path = tmp_path / "data" / "data.json"
    record = json.loads(path.read_text())
    for broken in ({**record, key: 3}, {k: v for k, v in record.items() if k != key}):
        path.write_text(json.dumps(broken))
        with pytest.raises(DataError, match=f"'{key}' is missing"):
            read_data_record(tmp_path / "data")


def test_contamination_of_prompts_and_rows(tmp_path: Path, target: TargetFacts) -> None:
    path = tmp_path / "p.jsonl"
    words = "the quick brown fox jumps over the lazy dog today"
    path.write_text(json.dumps({"prompt": f"Say: {words}", "id": "train-one"}) + "\n")
    held = tmp_path / "h.jsonl"
    rows = [words.upper() + "!", "the quick brown fox jumps over a lazy dog now", "the lazy dog"]
    held.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rows))
    training, held_out = read_prompts(path), read_prompts(held)
    found = contamination(training.prompts, held_out.prompts)
    assert [(f.held_out_id, f.training_id, f.share) for f in found] == [
        ("line-1", "train-one", 1.0),
        ("line-3", "train-one", 1.0),  # shorter than an n-gram: the whole of it is there
    ]
    partly = contamination(training.prompts, held_out.prompts, ngram=5)
    # 10 words make six 5-grams; "the quick brown fox jumps" and "quick … over" are shared
    assert {f.held_out_id: f.share for f in partly}["line-2"] == pytest.approx(2 / 6)
    assert len(contamination(training.prompts, held_out.prompts, ngram=5, min_share=0.5)) == 2
    answer_prompts(
        training, ScriptedEndpoint(echo), target, out_dir=tmp_path / "data", sampling=GREEDY
    )
    from_rows = contamination(read_rows(tmp_path / "data"), held_out.prompts, target=target)
    assert [(f.held_out_id, f.share) for f in from_rows] == [("line-1", 1.0), ("line-3", 1.0)]
