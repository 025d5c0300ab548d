"""`paceline draft`: out to the speculators format and in again, with what was left out named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from command_line import Outcome

from paceline.draft import read_draft, read_tensors, resolve_draft

Run = Callable[..., Outcome]


def test_out_and_in_again(run: Run, tmp_path: Path) -> None:
    outside, again = tmp_path / "outside", tmp_path / "again"
    words = ("draft", "export", "pocket-eagle3", "--verifier", "org/pocket", "--out", outside)
    assert "(eagle3, K = 3, 12 tensors)" in run(*words).out
    config = json.loads((outside / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/pocket"
    (outside / "config.json").write_text(json.dumps({**config, "made_by": "somebody"}))
    outcome = run("draft", "import", outside, "--out", again, "--k", 2)
    outcome.require(0)
    assert "(eagle3, K = 2, 12 tensors)" in outcome.out
    assert "left out, vLLM reads none of it: made_by\n" in outcome.out
    first, second = read_draft(resolve_draft("pocket-eagle3")), read_draft(again)
    assert second.num_speculative_tokens == 2
    theirs = read_tensors(second)
    for name, tensor in read_tensors(first).items():
        assert tensor.equal(theirs[name]), name


def test_what_is_no_draft_is_told(run: Run, tmp_path: Path) -> None:
    run("draft", "import", tmp_path / "no", "--out", tmp_path / "o").require(2, "no such folder")
    (tmp_path / "o").mkdir()
    words = ("draft", "export", "pocket-eagle3", "--verifier", "v", "--out", tmp_path / "o")
    run(*words).require(5, "already exists")
