"""The odd but valid folders that validate lets through, by vLLM's own loader: it takes them too.

One child loads all of them. What validate refuses of them, vLLM refuses as well.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import Tensor, build_config, random_bf16
from contract_cases import CASES, Case, build_tensors_of, write_folder
from contract_probe import CHILD
from foreign_quantized import to_awq, to_gptq
from odd_drafts import ODD_DRAFTS, UNCOVERED

from paceline.draft import INDEX_NAME, MASK_EMBEDDING
from paceline.target import read_target
from paceline.validate import Report, validate_draft

pytestmark = pytest.mark.engine

BY_NAME = {case.name: case for case in CASES}
EAGLE3, MTP, DFLASH = (
    BY_NAME[name] for name in ("eagle3, Llama layer, cut vocabulary", "mtp, Qwen3.5", "dflash")
)
MEDUSA, WHOLE = BY_NAME["medusa, one output layer"], BY_NAME["draft_model, Llama"]
FAMILIES = (EAGLE3, MTP, DFLASH, MEDUSA, WHOLE)
# keys that a loader could run code by, or that mean another model, and vLLM passes over
PASSED_OVER: tuple[dict[str, Any], ...] = (
    {"auto_map": {"AutoModel": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}},
    {"auto_map": {"AutoConfig": "evil.Evil"}},
    {"_name_or_path": "/root/outputs/draft"},
    {"_attn_implementation": "flex_attention", "attn_implementation": "sdpa"},
    {"max_seq_len": 2**30, "mamba_ssm_dtype": "float32"},
)
FUSED = {"modules_in_block_to_quantize": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}
Quantize = Callable[[dict[str, Tensor]], tuple[dict[str, Tensor], dict[str, Any]]]
# name -> (case, its weights in another format, more settings, whether vLLM loads it)
FOREIGN: dict[str, tuple[Case, Quantize, dict[str, Any], bool]] = {
    "eagle3 by AWQ": (EAGLE3, to_awq, {}, True),
    "dflash by AWQ": (DFLASH, to_awq, {}, True),
    "draft_model by AWQ": (WHOLE, to_awq, {}, True),
    "draft_model by GPTQ": (WHOLE, to_gptq, {}, True),
    "eagle3 by GPTQ, layers by vLLM's names": (EAGLE3, to_gptq, FUSED, True),
    "dflash by GPTQ, layers by vLLM's names": (DFLASH, to_gptq, FUSED, True),
    "eagle3 by GPTQ": (EAGLE3, to_gptq, {}, False),
    "dflash by GPTQ": (DFLASH, to_gptq, {}, False),
}
# what torch.save is given -> whether vLLM takes it for the mask token's row
MASKS: dict[str, tuple[Callable[[], Any], bool]] = {
    "a row": (lambda: _ones(64), True),
    "a dict": (lambda: {"embedding": _ones(1, 64), "mask_token_id": 255}, True),
    "a row too short": (lambda: _ones(63), False),
    "another token": (lambda: {"embedding": _ones(64), "mask_token_id": 3}, False),
    "no row": (lambda: {"mask": _ones(64)}, False),
}


def _ones(*shape: int) -> Any:
    import torch

    return torch.ones(shape, dtype=torch.bfloat16)


def write(place: Path, case: Case, config: dict[str, Any] | None = None) -> Path:
    """Folder `draft` of a case below `place`, with its target beside it."""
    changed = case if config is None else dataclasses.replace(case, config=config)
    return write_with(place, changed, build_tensors_of(case))


def write_with(place: Path, case: Case, tensors: dict[str, Tensor]) -> Path:
    write_folder(case, place / "draft", tensors)
    (place / "target").mkdir(exist_ok=True)
    (place / "target" / "config.json").write_text(json.dumps(case.target))
    return place / "draft"


def ask(folder: Path, case: Case, others: list[Path] | None = None) -> dict[str, Any]:
    return {
        "target": str(folder.parent / "target"),
        "draft": str(folder),
        "settings": {"method": case.family, "num_speculative_tokens": 3, **case.settings},
        "weights": [],
        "configs": [],
        "folders": [str(other) for other in others or []],
    }


def write_others(place: Path, case: Case) -> list[Path]:
    """Folders with keys that vLLM passes over, and one that names no class."""
    found = []
    for number, more in enumerate(PASSED_OVER):
        own = {key: more[key] for key in more if key != "mamba_ssm_dtype" or case is MTP}
        folder = write(place / f"key-{number}", case, {**case.config, **own})
        (folder / "evil.py").write_text(f"open({str(place / 'ran')!r}, 'w')\nclass Evil: ...\n")
        found.append(folder)
    unnamed = {key: value for key, value in case.config.items() if key != "architectures"}
    return [*found, write(place / "no-class", case, unnamed)]


def write_foreign(place: Path, name: str) -> Path:
    case, quantize, more, _ = FOREIGN[name]
    tensors, settings = quantize(build_tensors_of(case))
    config = {**case.config, "quantization_config": {**settings, **more}}
    return write_with(place, dataclasses.replace(case, config=config), tensors)


def write_layouts(place: Path) -> dict[str, tuple[Case, Path]]:
    """The same weights laid out as no submission may be, and as vLLM loads them."""
    halves = dataclasses.replace(EAGLE3, num_shards=2)
    parts = write_with(place / "parts", halves, build_tensors_of(EAGLE3))
    (parts / INDEX_NAME).unlink()
    for number, path in enumerate(sorted(parts.glob("*.safetensors"))):
        path.rename(parts / f"part{number}.safetensors")
    total = write_with(place / "total", halves, build_tensors_of(EAGLE3))
    index = json.loads((total / INDEX_NAME).read_text())
    (total / INDEX_NAME).write_text(json.dumps({**index, "metadata": {"total_size": 1}}))
    other = write(place / "other", EAGLE3)
    data = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(
        data.replace(b'{"format": "pt"}', b'{"format":"mlx"}')
    )
    beside = {f"model.layers.{i}.mlp.up_proj.weight": random_bf16(4, 4, seed=i) for i in range(3)}
    whole = write_with(place / "whole", MTP, {**build_tensors_of(MTP), **beside})
    (place / "linked").mkdir()
    linked = write(place / "linked", EAGLE3)
    (place / "second-name").hardlink_to(linked / "model.safetensors")
    return {
        "parts": (EAGLE3, parts),
        "total": (EAGLE3, total),
        "other": (EAGLE3, other),
        "whole": (MTP, whole),
        "linked": (EAGLE3, linked),
    }


def write_masks(place: Path) -> list[Path]:
    import torch

    folders = []
    for number, (make, _) in enumerate(MASKS.values()):
        folder = write(place / f"mask-{number}", DFLASH)
        torch.save(make(), folder / MASK_EMBEDDING)
        folders.append(folder)
    return folders


def odd_questions(place: Path) -> dict[str, dict[str, Any]]:
    config = {**build_config(), "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4}
    for key in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"):
        del config[key]
    asked = {}
    covered = {name: make for name, (make, _) in ODD_DRAFTS.items() if name not in UNCOVERED}
    for number, (name, make) in enumerate(covered.items()):
        folder = make(place / f"case-{number}" / "draft")
        (folder.parent / "target").mkdir()
        (folder.parent / "target" / "config.json").write_text(json.dumps(config))
        asked[name] = ask(folder, EAGLE3)
    # vLLM builds K heads of a Medusa draft whatever its config counts
    uncounted = {key: value for key, value in MEDUSA.config.items() if key != "num_heads"}
    asked["Medusa heads that nobody counted"] = ask(
        write(place / "heads", MEDUSA, uncounted), MEDUSA
    )
    return asked


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("odd")


@pytest.fixture(scope="module")
def answers(place: Path) -> dict[str, dict[str, list[str | None]]]:
    """By name, as contract_child.py answers."""
    asked = odd_questions(place)
    for case in FAMILIES:
        here = place / case.family[:3]
        asked[f"keys, {case.family}"] = ask(write(here, case), case, write_others(here, case))
    for number, (name, (case, *_)) in enumerate(FOREIGN.items()):
        asked[name] = ask(write_foreign(place / f"foreign-{number}", name), case)
    for name, (case, folder) in write_layouts(place / "layouts").items():
        asked[f"layout {name}"] = ask(folder, case)
    asked["masks"] = ask(write(place / "masks", DFLASH), DFLASH, write_masks(place / "masks"))
    (place / "asked.json").write_text(json.dumps(list(asked.values())))
    done = subprocess.run(
        [sys.executable, str(CHILD), str(place / "asked.json"), str(place / "answers.json")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((place / "answers.json").read_text())
    return dict(zip(asked, found, strict=True))


def judge(folder: Path, case: Case, *, by_hand: bool = False) -> Report:
    target = read_target(folder.parent / "target", require_weights=False)
    given = {"family": case.family, "num_speculative_tokens": 3}
    if by_hand:
        (folder / "spec.json").unlink()
    return validate_draft(folder, target=target, by_hand=given if by_hand else None)


def list_errors(report: Report) -> list[str]:
    return [f"{item.rule}: {item.message}" for item in report.findings if item.severity == "error"]


def test_vllm_loads_every_odd_draft(answers: dict[str, Any]) -> None:
    names = [*(name for name in ODD_DRAFTS if name not in UNCOVERED)]
    names.append("Medusa heads that nobody counted")
    assert {name: answers[name]["weights"][0] for name in names} == dict.fromkeys(names)


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.family)
def test_keys_that_vllm_passes_over_are_not_refused_by_hand(
    case: Case, answers: dict[str, Any], place: Path
) -> None:
    *passed, unnamed = answers[f"keys, {case.family}"]["folders"]
    assert passed == [None] * len(PASSED_OVER)
    here = place / case.family[:3]
    assert not (here / "ran").exists(), "vLLM imported a stranger's module"
    for number in range(len(PASSED_OVER)):
        assert list_errors(judge(here / f"key-{number}" / "draft", case, by_hand=True)) == []
    refused = bool(list_errors(judge(here / "no-class" / "draft", case)))
    assert refused == (unnamed is not None), unnamed


@pytest.mark.parametrize("name", ["parts", "total", "other", "whole", "linked"])
def test_layouts_that_vllm_loads_are_not_refused_by_hand(
    name: str, answers: dict[str, Any], place: Path
) -> None:
    assert answers[f"layout {name}"]["weights"] == [None]
    case = MTP if name == "whole" else EAGLE3
    folder = place / "layouts" / name / "draft"
    assert list_errors(judge(folder, case)), "no submission"
    assert list_errors(judge(folder, case, by_hand=True)) == []


@pytest.mark.parametrize("name", FOREIGN)
def test_other_formats_of_quantisation(name: str, answers: dict[str, Any], place: Path) -> None:
    case, _, _, is_loaded = FOREIGN[name]
    (error,) = answers[name]["weights"]
    assert (error is None) == is_loaded, error
    report = judge(place / f"foreign-{list(FOREIGN).index(name)}" / "draft", case)
    assert "cfg.contract" in {item.rule for item in report.findings}
    assert bool(list_errors(report)) == (not is_loaded), list_errors(report)


def test_a_pickled_mask_embedding(answers: dict[str, Any], place: Path) -> None:
    """vLLM builds another model with a row ("another": it holds a flag), and stops without one."""
    for number, (name, error) in enumerate(zip(MASKS, answers["masks"]["folders"], strict=True)):
        _, is_taken = MASKS[name]
        assert (error == "another") == is_taken, (name, error)
        report = judge(place / "masks" / f"mask-{number}" / "draft", DFLASH)
        assert bool(list_errors(report)) == (not is_taken), name
