"""`paceline train --nproc-per-node`: real processes, one voice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.data import read_prompts, rows_from_conversations
from paceline.draft import read_draft
from paceline.errors import RecipeError
from paceline.target import read_target
from paceline.train import launch_training

RECIPE = """
family = "mtp"
dtype = "float32"
[draft]
num_speculative_tokens = 2
[optim]
lr = 1e-4
num_steps = 2
tokens_per_batch = 256
max_length = 64
"""


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"Count to {n}, please."},
                {"role": "assistant", "content": " ".join(str(i) for i in range(n))},
            ]
        }
        for n in range(4, 10)
    ]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = read_prompts(str(texts))
    rows_from_conversations(prompts, read_target("pocket"), tmp_path / "data", thinking="off")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return [
        *("train", str(tmp_path / "recipe.toml"), "--target", "pocket"),
        *("--data", str(tmp_path / "data"), "--out", str(tmp_path / "draft"), "--device", "cpu"),
    ]


def run(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", "from paceline.cli import main; main()", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def test_two_processes_speak_with_one_voice(places: list[str], tmp_path: Path) -> None:
    code, said = run(*places, "--nproc-per-node", "2")
    assert code == 0, said
    assert said.count("training: 2/2") == said.count("draft: ") == 1, said
    assert "Traceback" not in said
    assert read_draft(tmp_path / "draft").family == "mtp"


@pytest.mark.parametrize(
    ("num_machines", "meet_at", "reason"),
    [
        (2, None, "several machines need a place to meet"),
        (1, "127.0.0.1:1", "several machines need a place to meet"),
        (2, "here", "--meet-at is 'here'"),
    ],
)
def test_settings_that_cannot_work_start_nothing(
    num_machines: int, meet_at: str | None, reason: str
) -> None:
    with pytest.raises(RecipeError, match=reason):
        launch_training(
            ["train"], num_processes=2, num_machines=num_machines, meet_at=meet_at, device="cpu"
        )


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ("draft", "already exists"),
        ("draft.checkpoint", "an unfinished training lies beside --out"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--nproc-per-node", "2")])
def test_a_place_that_is_taken_is_told_before_torch(
    places: list[str], tmp_path: Path, left: str, words: str, more: tuple[str, ...]
) -> None:
    (tmp_path / left).mkdir()
    script = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            os.write(2, b'torch is looked for')\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from paceline.cli import main\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *places, *more], capture_output=True, text=True, check=False
    )
    assert words in done.stderr
    assert done.returncode
    assert "torch is looked for" not in done.stderr
