"""Whatever value of a config key validate lets pass, vLLM's own loader takes: sampled, no engine.

Every key of every family's table is tried with values of every kind, every so many of them; those
that validate refuses are left out, the rest is put to vLLM.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from contract_cases import CASES, Case, build_tensors_of, write_folder
from contract_probe import CHILD

from paceline.draft import FAMILIES, find_variant
from paceline.draft.uncovered import (
    SERVED_ARCHITECTURES,
    SERVED_ENVELOPES,
    SERVED_QUANTIZATIONS,
)
from paceline.target import read_target
from paceline.validate import validate_draft

pytestmark = pytest.mark.engine

TRIED = {
    "eagle3, Llama layer, cut vocabulary": 9,
    "eagle3, Qwen3 layer": 23,
    "dflash": 13,
    "draft_model, Llama": 23,
    "draft_model, Qwen2": 23,
    "medusa, one output layer": 17,
}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 3, 2**20, 0.5, "x", "bfloat16", [], {}, {"a": 1}),
    *(["full_attention"], ["sliding_attention"], ["linear_attention"], [0, 1, 2]),
)


def change_one_key(case: Case) -> Iterator[dict[str, Any]]:
    variant = find_variant(case.family, case.config)
    assert variant is not None
    for key in variant.keys:
        yield from ({**case.config, key: value} for value in VALUES)
    for key, keys in variant.nested.items():
        own = case.config.get(key) or {}
        for name in keys:
            yield from ({**case.config, key: {**own, name: value}} for value in VALUES)


def test_what_passes_here_is_taken_by_vllm(tmp_path: Path) -> None:
    asked, settings = [], []
    for number, (name, stride) in enumerate(TRIED.items()):
        (case,) = [case for case in CASES if case.name == name]
        place = tmp_path / f"case-{number}"
        (place / "target").mkdir(parents=True)
        (place / "target" / "config.json").write_text(json.dumps(case.target))
        target = read_target(place / "target", require_weights=False)
        folder = place / "draft"
        write_folder(case, folder, build_tensors_of(case))
        passed = []
        for config in list(change_one_key(case))[number::stride]:
            (folder / "config.json").write_text(json.dumps(config))
            if config != case.config and validate_draft(folder, target=target).verdict != "fail":
                passed.append(config)
        (folder / "config.json").write_text(json.dumps(case.config))
        files = []
        for index, config in enumerate(passed):
            path = place / f"{index}.json"
            path.write_text(json.dumps(config))
            files.append(str(path))
            settings.append({k: v for k, v in config.items() if case.config.get(k, ...) != v})
        asked.append(
            {
                "target": str(place / "target"),
                "draft": str(folder),
                "settings": {
                    "method": case.family,
                    "num_speculative_tokens": 3,
                    **case.settings,
                },
                "weights": [],
                "configs": files,
                "folders": [],
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
    errors = [error for answer in answers for error in answer["configs"]]
    assert len(errors) > 60
    refused = [
        (changed, error)
        for changed, error in zip(settings, errors, strict=True)
        if error not in (None, "another")
    ]
    assert refused == []


def test_the_names_that_vllm_reads_are_those_of_the_installed_one() -> None:
    script = Path(__file__).parents[2] / "scripts" / "write_config_names.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stderr} run python scripts/write_config_names.py"


def test_forms_without_a_contract_are_ones_that_vllm_knows() -> None:
    """By its own registries, read as text: each name in `draft/uncovered.py` is one of them."""
    root = Path(find_spec("vllm").origin).parent  # type: ignore[union-attr, arg-type]
    registry = (root / "model_executor/models/registry.py").read_text()
    named = set().union(*SERVED_ARCHITECTURES.values())
    assert {name for name in named if f'"{name}"' not in registry} == set()
    envelopes = (root / "transformers_utils/configs/speculators/algos.py").read_text()
    assert all(f'@register_speculator("{kind}")' in envelopes for kind in SERVED_ENVELOPES)
    methods = (root / "model_executor/layers/quantization/__init__.py").read_text()
    assert all(f'"{method}"' in methods for method in SERVED_QUANTIZATIONS)
    # and none that a contract here describes
    described = {
        name for family in FAMILIES.values() for v in family.variants for name in v.architectures
    }
    assert not named & described
