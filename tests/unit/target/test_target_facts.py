from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from toy_target import TOKENIZER, write_target, write_tensors

from paceline.errors import TargetError
from paceline.target import describe_target, read_target


def test_dense_target(tmp_path: Path) -> None:
    facts = read_target(write_target(tmp_path / "toy"))
    assert facts.name == "toy"
    assert (facts.hidden_size, facts.head_dim, facts.num_key_value_heads) == (16, 4, 2)
    assert (facts.vocab_size, facts.num_tokenizer_tokens) == (64, 60)
    assert facts.layer_types == ("full_attention",) * 4
    assert not facts.is_hybrid
    assert facts.eos_token_ids == (2,)
    assert facts.tie_word_embeddings
    lines = dict(describe_target(facts))
    assert lines["vocabulary"] == "64 embedding rows, 60 tokens, 4 rows of padding"
    assert lines["output head"] == "tied to the embeddings"
    assert lines["special tokens"] == "begin 1; end 2; padding 2"


def test_hybrid_with_nested_config(tmp_path: Path) -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    text = {
        "hidden_size": 32,
        "head_dim": 16,
        "layer_types": kinds,
        "mtp_num_hidden_layers": 1,
        "eos_token_id": [2, 3],
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }
    folder = write_target(
        tmp_path / "hybrid",
        config={"text_config": text, "model_type": "qwen3_5"},
        tensors={"model.language_model.embed_tokens.weight": (64, 32)},
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7]}))
    facts = read_target(folder)
    assert facts.is_hybrid
    assert facts.model_type == "qwen3_5"
    assert (facts.hidden_size, facts.head_dim, facts.num_mtp_layers) == (32, 16, 1)
    assert facts.eos_token_ids == (2, 3, 7)
    assert facts.rope_parameters["partial_rotary_factor"] == 0.25
    assert "order 3l+1f" in dict(describe_target(facts))["layers"]


def test_layer_interval_and_old_rope_keys(tmp_path: Path) -> None:
    config = {
        "full_attention_interval": 2,
        "rope_theta": 5e5,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "partial_rotary_factor": 0.5,
    }
    facts = read_target(write_target(tmp_path / "t", config=config, drop=("rope_parameters",)))
    assert facts.layer_types == ("linear_attention", "full_attention") * 2
    assert facts.rope_parameters == {
        "rope_theta": 5e5,
        "factor": 2.0,
        "rope_type": "linear",
        "partial_rotary_factor": 0.5,
    }


def test_fingerprints_see_content_not_formatting(tmp_path: Path) -> None:
    first = read_target(write_target(tmp_path / "a"))
    model = {**TOKENIZER["model"], "merges": [["t1", "t2"], ["t3", "t4"]]}
    folder = write_target(tmp_path / "b", tokenizer={**TOKENIZER, "model": model, "version": "1"})
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4, sort_keys=True))
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    second = read_target(folder)
    assert replace(second, name="", path=first.path) == replace(first, name="")

    swapped = {**TOKENIZER["model"], "merges": ["t3 t4", "t1 t2"]}
    other = read_target(write_target(tmp_path / "c", tokenizer={**TOKENIZER, "model": swapped}))
    assert other.tokenizer_sha256 != first.tokenizer_sha256
    third = read_target(
        write_target(tmp_path / "d", tensors={"model.embed_tokens.weight": (64, 16)})
    )
    assert third.weights_fingerprint != first.weights_fingerprint
    assert third.tokenizer_sha256 == first.tokenizer_sha256


def test_without_tokenizer_facts_are_none(tmp_path: Path) -> None:
    facts = read_target(write_target(tmp_path / "t", tokenizer=None, template=None))
    assert facts.tokenizer_sha256 is None
    assert facts.num_tokenizer_tokens is None
    assert facts.chat_template_sha256 is None
    assert "no tokenizer" in dict(describe_target(facts))["vocabulary"]


@pytest.mark.parametrize(
    ("config", "drop", "words"),
    [
        ({}, ("hidden_size",), "hidden_size: is missing"),
        ({"num_hidden_layers": 0}, (), "num_hidden_layers: is 0"),
        ({"layer_types": ["full_attention"]}, (), "a list of 4 names"),
        ({"num_attention_heads": 3}, (), "head_dim"),
        ({"rms_norm_eps": None}, (), "rms_norm_eps"),
        ({"architectures": []}, (), "architectures"),
        ({"vocab_size": 72}, (), "has shape [64, 16]"),
        ({"tie_word_embeddings": False}, (), "no lm_head.weight"),
        ({"text_config": 3}, (), "text_config: is not an object"),
        ({"eos_token_id": "x"}, (), "eos_token_id"),
    ],
)
def test_wrong_config_is_named(
    tmp_path: Path, config: dict[str, object], drop: tuple[str, ...], words: str
) -> None:
    folder = write_target(tmp_path / "t", config=config, drop=drop)
    with pytest.raises(TargetError) as caught:
        read_target(folder)
    assert words in str(caught.value)


def test_untied_head_is_inferred_from_weights(tmp_path: Path) -> None:
    shapes = {"model.embed_tokens.weight": (64, 16), "lm_head.weight": (64, 16)}
    drop = ("tie_word_embeddings",)
    assert not read_target(
        write_target(tmp_path / "a", drop=drop, tensors=shapes)
    ).tie_word_embeddings
    assert read_target(write_target(tmp_path / "b", drop=drop)).tie_word_embeddings


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no such target"):
        read_target(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TargetError, match=r"no config\.json"):
        read_target(tmp_path / "empty")
    folder = write_target(tmp_path / "t", tensors={})
    with pytest.raises(TargetError, match="no safetensors weights"):
        read_target(folder)
    assert read_target(folder, require_weights=False).weights_fingerprint is None
    (folder / "config.json").write_text('{"hidden_size": 1, "hidden_size": 2}')
    with pytest.raises(TargetError, match="appears twice"):
        read_target(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(TargetError, match="not valid JSON"):
        read_target(folder)


def test_cut_weights_and_missing_shards(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "t")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(TargetError, match="cut short"):
        read_target(folder)

    (folder / "model.safetensors").unlink()
    write_tensors(folder / "a.safetensors", {"model.embed_tokens.weight": (64, 16)})
    index = {"weight_map": {"model.embed_tokens.weight": "a.safetensors", "x": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(TargetError, match=r"b\.safetensors is missing"):
        read_target(folder)
    index["weight_map"]["x"] = "a.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(TargetError, match=r"'x' is not in a\.safetensors"):
        read_target(folder)


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "t")
    blob = tmp_path / "blob"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    assert read_target(folder).weights_fingerprint is not None


def test_a_vision_tower_beside_the_text_model_is_read(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "seeing")
    shapes = {"visual.patch_embed.proj.weight": [4, 3, 2, 2, 2]}
    write_tensors(folder / "model-00002-of-00002.safetensors", shapes)
    alone = read_target(write_target(tmp_path / "alone"))
    assert read_target(folder).weights_fingerprint != alone.weights_fingerprint
