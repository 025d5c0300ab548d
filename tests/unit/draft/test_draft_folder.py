"""What is written is read back; what is wrong is refused before it is written."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
from builders import (
    REMOVE,
    build_config,
    build_draft,
    build_shards,
    build_target_facts,
    build_tensors,
    random_bf16,
    write_safetensors,
)
from contract_cases import CASES, Case, quantize

from paceline.draft import (
    build_contract,
    list_bundled,
    read_draft,
    resolve_draft,
    write_draft,
)
from paceline.errors import DraftError, StorageError
from paceline.validate import validate_draft

AUX = "eagle_aux_hidden_state_layer_ids"


def test_read_a_sound_draft(tmp_path: Path) -> None:
    draft = read_draft(build_draft(tmp_path / "d"))
    assert (draft.family, draft.num_speculative_tokens, draft.name) == ("eagle3", 3, "toy draft")
    by_hand = 16 * 48 + 16 * 32 + 2 * 8 * 32 + 16 * 16 + 3 * 32 * 16 + 4 * 16 + 16 * 16
    assert draft.num_parameters == by_hand
    assert draft.files_bytes == sum(item.stat().st_size for item in draft.path.iterdir())
    assert draft.tensor_files["fc.weight"] == "model.safetensors"


def test_both_spellings_and_shards_are_one_draft(tmp_path: Path) -> None:
    plain = read_draft(build_draft(tmp_path / "a"))
    other = build_draft(tmp_path / "b")
    write_safetensors(other / "model.safetensors", build_tensors(build_config(), "layers.0"))
    assert set(read_draft(other).tensors) == set(plain.tensors)
    sharded = read_draft(build_shards(tmp_path / "c"))
    assert set(sharded.tensors) == set(plain.tensors)
    assert sharded.num_parameters == plain.num_parameters


def test_the_hash_follows_content_and_nothing_else(tmp_path: Path) -> None:
    first = read_draft(build_draft(tmp_path / "a")).sha256
    folder = build_draft(tmp_path / "b")
    assert read_draft(folder).sha256 == first
    (folder / "README.md").write_text("hello")
    assert read_draft(folder).sha256 == first
    (folder / "spec.json").write_text('{"family": "eagle3", "num_speculative_tokens": 4}')
    assert read_draft(folder).sha256 != first


def test_model_free_draft(tmp_path: Path) -> None:
    spec = {"family": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    draft = read_draft(tmp_path)
    assert (draft.family, draft.num_parameters, draft.config) == ("ngram", 0, {})
    assert draft.spec["prompt_lookup_max"] == 4
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DraftError, match="has no weights"):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tensors": {"fc.weight": REMOVE}}, "fc.weight"),
        ({"tensors": {"midlayer.mlp.down_proj.weight": REMOVE}}, "down_proj"),
        ({"tensors": {"extra": random_bf16(2, seed=1)}}, "no place"),
        ({"tensors": {"norm.weight": random_bf16(8, seed=1)}}, "rows 8, config implies 16"),
        ({"tensors": {"d2t": REMOVE}}, "draft vocabulary is 16 of 64"),
        ({"config": {"hidden_size": REMOVE}, "weights_follow_config": False}, "hidden_size"),
        ({"config": {AUX: [2, 1, 3]}}, "not ascending"),
        ({"config": {AUX: [1, 2], "num_aux_hidden_states": REMOVE}}, "builds fc for 3"),
        ({"spec": {"family": "hydra"}}, "hydra"),
        ({"spec": {"num_speculative_tokens": 0}}, "num_speculative_tokens"),
        ({"spec": {"num_speculative_tokens": True}}, "num_speculative_tokens"),
        ({"spec": {"temperature": 1}}, "temperature"),
    ],
)
def test_wrong_drafts_are_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d", **change)
    with pytest.raises(DraftError, match=reason) as caught:
        read_draft(folder)
    assert str(folder) in str(caught.value) or "config.json" in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "spec.json"])
def test_missing_files_are_named(name: str, tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    (folder / name).unlink()
    with pytest.raises(DraftError, match=name):
        read_draft(folder)


def test_resolve(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    assert resolve_draft(str(folder)) == folder
    for name in list_bundled():
        read_draft(resolve_draft(name))
    for spec, reason in (
        ("no-such", "there is no draft"),
        (str(folder / "spec.json"), "is a file"),
    ):
        with pytest.raises(DraftError, match=reason):
            resolve_draft(spec)
    with pytest.raises(DraftError, match="no such draft folder"):
        read_draft(tmp_path / "none")


# writing

torch = pytest.importorskip("torch")


def weights(config: dict[str, Any]) -> dict[str, Any]:
    views = {"BF16": torch.bfloat16, "I64": torch.int64, "BOOL": torch.bool}
    return {
        name: torch.frombuffer(bytearray(raw), dtype=views[dtype]).reshape(shape).clone()
        for name, (dtype, shape, raw) in build_tensors(config).items()
    }


def write(out: Path, **changes: Any) -> Any:
    config = changes.pop("config", build_config())
    options = {
        "family": "eagle3",
        "config": config,
        "tensors": changes.pop("tensors") if "tensors" in changes else weights(config),
        "num_speculative_tokens": 3,
        "metadata": {"name": "written", "trained": {"thinking": "none"}},
    }
    return write_draft(out, **{**options, **changes})


def test_written_folders_hold_four_files_and_pass_validation(tmp_path: Path) -> None:
    draft = write(tmp_path / "d")
    assert sorted(item.name for item in draft.path.iterdir()) == [
        "config.json",
        "metadata.json",
        "model.safetensors",
        "spec.json",
    ]
    assert draft.metadata["trained"]["lm_head"] == "own"
    report = validate_draft(draft.path, target=build_target_facts(tmp_path), deep=True)
    assert report.verdict == "pass", report.findings
    from safetensors.torch import load_file

    for name, tensor in load_file(draft.path / "model.safetensors").items():
        assert torch.equal(tensor, weights(build_config())[name])


def test_a_written_full_vocabulary_draft_passes_too(tmp_path: Path) -> None:
    draft = write(tmp_path / "d", config=build_config(draft_vocab_size=64))
    assert "lm_head.weight" not in draft.tensors
    assert draft.metadata["trained"]["lm_head"] == "shared with the target"
    report = validate_draft(draft.path, target=build_target_facts(tmp_path))
    assert report.verdict == "pass", report.findings


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fc.weight": None}, "fc.weight"),
        ({"fc.weight": torch.zeros(16, 32, dtype=torch.bfloat16)}, "fc expects 2 x 16"),
        ({"norm.weight": torch.zeros(16, dtype=torch.float64)}, "F64"),
        ({"d2t": torch.zeros(16, dtype=torch.int16)}, "int16"),
        ({"more": torch.zeros(1)}, "no place"),
        ({"norm.weight": torch.full((16,), float("nan"))}, "NaN"),
    ],
)
def test_nothing_is_written_when_a_tensor_is_wrong(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    tensors = {**weights(build_config()), **change}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(DraftError, match=reason):
        write(tmp_path / "d", tensors=tensors)
    assert list(tmp_path.iterdir()) == []


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    for change, reason in (
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"family": "hydra"}, "hydra"),
        ({"config": build_config(auto_map={})}, "auto_map"),
        ({"spec": {"block_size": 3}}, "block_size"),
    ):
        with pytest.raises(DraftError, match=reason):
            write(tmp_path / "d", **change)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept_unless_replaced(tmp_path: Path) -> None:
    write(tmp_path / "d")
    with pytest.raises(StorageError, match="already exists"):
        write(tmp_path / "d", num_speculative_tokens=5)
    assert read_draft(tmp_path / "d").num_speculative_tokens == 3
    assert write(tmp_path / "d", num_speculative_tokens=5, replace=True).num_speculative_tokens == 5


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match="the disk is full"):
        write(tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


def test_a_model_free_draft_has_no_weights(tmp_path: Path) -> None:
    draft = write(tmp_path / "d", family="ngram", config={}, tensors={}, metadata={"name": "n"})
    assert sorted(item.name for item in draft.path.iterdir()) == ["metadata.json", "spec.json"]


# quantised drafts, and the other families


def quantised(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Every linear layer packed or in FP8, sizes by hand for the toy's widths."""
    plain, packed = weights(config), {}
    for name, tensor in plain.items():
        stem = name.removesuffix("weight")
        if tensor.dim() != 2 or name == "lm_head.weight":
            packed[name] = tensor
            continue
        rows, columns = tensor.shape
        packed[f"{stem}weight_scale"] = torch.ones(rows, 1, dtype=torch.bfloat16)
        if kind == "float":
            packed[name] = tensor.to(torch.float8_e4m3fn)
        else:
            packed[f"{stem}weight_packed"] = torch.ones(rows, columns // 8, dtype=torch.int32)
            packed[f"{stem}weight_shape"] = torch.tensor([rows, columns])
    return packed


@pytest.mark.parametrize(("kind", "bits"), [("int", 4), ("float", 8)])
def test_a_quantised_draft_is_written_and_read(kind: str, bits: int, tmp_path: Path) -> None:
    config = build_config(quantization_config=quantize(kind, bits, None))
    tensors = quantised(kind, config)
    draft = write(tmp_path / "d", config=config, tensors=tensors)
    assert set(draft.tensors) == set(tensors)
    dtype = "F8_E4M3" if kind == "float" else "I32"
    assert dtype in {tensor.dtype for tensor in draft.tensors.values()}
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        if name == "t2d":
            continue
        with pytest.raises(DraftError, match=re.escape(name.rpartition(".")[0] or name)):
            write(tmp_path / "e", config=config, tensors=rest)
    if kind == "float":
        bad = tensors["fc.weight"].float()
        bad[0, 0] = float("nan")
        with pytest.raises(DraftError, match="NaN"):
            write(
                tmp_path / "e",
                config=config,
                tensors={**tensors, "fc.weight": bad.to(torch.float8_e4m3fn)},
            )


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if "quantization_config" not in c.config],
    ids=lambda case: case.name,
)
def test_every_family_is_written_and_read(case: Case, tmp_path: Path) -> None:
    rules = build_contract(case.family, case.config).tensors
    tensors = {
        name: torch.arange(rule.shape[0]) * 0
        if "I64" in rule.dtypes
        else torch.full(rule.shape, 0.5, dtype=torch.bfloat16)
        for name, rule in rules.items()
        if rule.required
    }
    draft = write_draft(
        tmp_path / "d",
        family=case.family,
        config=case.config,
        tensors=tensors,
        num_speculative_tokens=3,
        metadata={"name": case.name},
    )
    assert set(draft.tensors) == set(tensors)
    trained = draft.metadata.get("trained", {})
    assert ("embeddings" in trained) == (case.family in ("eagle3", "mtp", "dflash"))
