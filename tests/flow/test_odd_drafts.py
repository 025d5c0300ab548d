"""The odd but valid folders that validate lets through, by vLLM's own loader: it takes them too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from builders import build_config
from contract_cases import CASES, build_tensors_of, write_folder
from contract_probe import CHILD
from odd_drafts import ODD_DRAFTS, UNCOVERED

pytestmark = pytest.mark.engine


def test_vllm_loads_every_odd_draft(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    config = {**build_config(), "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4}
    for key in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"):
        del config[key]
    (target / "config.json").write_text(json.dumps(config))
    asked = []
    covered = {name: make for name, (make, _) in ODD_DRAFTS.items() if name not in UNCOVERED}
    for number, make in enumerate(covered.values()):
        folder = make(tmp_path / f"case-{number}" / "draft")
        asked.append(
            {
                "target": str(target),
                "draft": str(folder),
                "settings": {"method": "eagle3", "num_speculative_tokens": 3},
                "weights": [],
                "configs": [],
                "folders": [],
            }
        )
    # vLLM builds K heads of a Medusa draft whatever its config counts
    (medusa,) = [case for case in CASES if case.name == "medusa, one output layer"]
    write_folder(medusa, tmp_path / "heads" / "draft", build_tensors_of(medusa))
    uncounted = {key: value for key, value in medusa.config.items() if key != "num_heads"}
    (tmp_path / "heads" / "draft" / "config.json").write_text(json.dumps(uncounted))
    (tmp_path / "heads" / "config.json").write_text(json.dumps(medusa.target))
    asked.append(
        {
            **asked[0],
            "target": str(tmp_path / "heads"),
            "draft": str(tmp_path / "heads" / "draft"),
            "settings": {"method": "medusa", "num_speculative_tokens": 3},
        }
    )
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, str(CHILD), str(tmp_path / "asked.json"), str(tmp_path / "answers.json")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads((tmp_path / "answers.json").read_text())
    names = [*covered, "Medusa heads that nobody counted"]
    assert {
        name: answer["weights"][0] for name, answer in zip(names, answers, strict=True)
    } == dict.fromkeys(names)
