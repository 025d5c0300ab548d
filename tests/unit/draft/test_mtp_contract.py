"""The MTP contract: names and shapes are those of the trained module; a stitched target's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from paceline.draft.mtp import (  # noqa: E402
    build_mtp_config,
    build_mtp_rules,
    read_mtp_sizes,
    stitch_target,
)
from paceline.errors import DraftError, StorageError  # noqa: E402
from paceline.target import read_target  # noqa: E402

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attn_output_gate": True,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}


def make_head(value: float) -> dict[str, Any]:
    rules = build_mtp_rules(read_mtp_sizes(CONFIG))
    return {name: torch.full(rule.shape, value) for name, rule in rules.items()}


def make_target(path: Path, *, split: bool) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    trunk = {"model.embed_tokens.weight": torch.ones(64, 32), "model.norm.weight": torch.ones(32)}
    files = {"model.safetensors": trunk, "mtp.safetensors": make_head(1.0)}
    if not split:
        files = {"model.safetensors": {**trunk, **make_head(1.0)}}
    for file, tensors in files.items():
        save_file(tensors, str(path / file), metadata={"format": "pt"})
    names = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {}, "weight_map": names}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_the_rules_are_the_modules_own_tensors() -> None:
    from paceline.train.families.mtp import build_module

    rules = build_mtp_rules(read_mtp_sizes(CONFIG))
    state = build_module(CONFIG).state_dict()
    assert {n: tuple(t.shape) for n, t in state.items()} == {n: r.shape for n, r in rules.items()}
    assert rules["mtp.layers.0.self_attn.q_proj.weight"].shape == (2 * 4 * 16, 32)


@pytest.mark.parametrize("key", ["hidden_size", "head_dim", "mtp_num_hidden_layers", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, True, "32", 2**40])
def test_a_senseless_size_is_named(key: str, value: object) -> None:
    with pytest.raises(DraftError, match=f"'{key}'"):
        read_mtp_sizes({**CONFIG, key: value})


def test_the_config_is_the_targets(tmp_path: Path) -> None:
    target = read_target(make_target(tmp_path / "t", split=True))
    config = build_mtp_config(target)
    same = {key: config[key] for key in CONFIG}
    assert same == CONFIG
    assert config["dtype"] == "bfloat16"


def test_a_target_without_a_head_is_refused(tmp_path: Path) -> None:
    path = make_target(tmp_path / "t", split=True)
    config = {k: v for k, v in CONFIG.items() if k != "mtp_num_hidden_layers"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DraftError, match="has no MTP head"):
        build_mtp_config(read_target(path))


@pytest.mark.parametrize("split", [True, False])
def test_a_stitched_target_has_the_new_head_once(tmp_path: Path, split: bool) -> None:
    source = make_target(tmp_path / "t", split=split)
    out = stitch_target(source, make_head(2.0), tmp_path / "new")
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    held: dict[str, str] = {}
    for file in out.glob("*.safetensors"):
        for name, tensor in load_file(str(file)).items():
            assert name not in held
            held[name] = file.name
            assert float(tensor.flatten()[0]) == (2.0 if name.startswith("mtp.") else 1.0)
    assert held == index
    linked = (out / "model.safetensors").stat().st_ino == (
        source / "model.safetensors"
    ).stat().st_ino
    assert linked == split
    assert (out / "config.json").stat().st_ino == (source / "config.json").stat().st_ino
    # the source is as it was
    assert float(load_file(str(source / index_file(source)))["mtp.norm.weight"][0]) == 1.0


def index_file(path: Path) -> str:
    names = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    return str(names["mtp.norm.weight"])


def test_a_wrong_head_is_not_stitched(tmp_path: Path) -> None:
    source = make_target(tmp_path / "t", split=True)
    head = make_head(2.0)
    for change in ({"mtp.norm.weight": torch.ones(31)}, {"lm_head.weight": torch.ones(64, 32)}):
        with pytest.raises(DraftError, match=next(iter(change))):
            stitch_target(source, {**head, **change}, tmp_path / "new")
    del head["mtp.fc.weight"]
    with pytest.raises(DraftError, match=r"mtp\.fc\.weight' is missing"):
        stitch_target(source, head, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    with pytest.raises(StorageError):
        stitch_target(source, make_head(2.0), tmp_path / "new")
