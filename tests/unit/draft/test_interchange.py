"""Drafts of other tools become folders of ours: same weights bit for bit, same meaning."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from builders import Tensor, build_config, build_tensors, encode_d2t, random_bf16, write_safetensors
from contract_cases import CASES, build_tensors_of, write_folder

from paceline.draft import (
    build_contract,
    export_draft,
    import_draft,
    read_dflash_layer_ids,
    read_draft,
)
from paceline.errors import DraftError

LAYER: dict[str, Any] = {
    key: value
    for key, value in build_config().items()
    if key
    not in (
        "architectures",
        "draft_vocab_size",
        "norm_before_residual",
        "eagle_aux_hidden_state_layer_ids",
        "num_aux_hidden_states",
    )
}


def envelope(kind: str, **changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": {**LAYER, "_name_or_path": "somewhere", "pretraining_tp": 1},
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": 16,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "embed_requires_grad": False,
        **changes,
    }
    return {key: value for key, value in config.items() if value is not ...}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def raw(folder: Path) -> dict[str, bytes]:
    """Every tensor's bytes, read here and not by the code under test."""
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {
        name: data[8 + size + entry["data_offsets"][0] : 8 + size + entry["data_offsets"][1]]
        for name, entry in header.items()
    }


def test_speculators_eagle3(tmp_path: Path) -> None:
    tensors = build_tensors(build_config(), layer="layers.0")
    tensors["verifier_lm_head.weight"] = random_bf16(64, 16, seed=5)
    source = write(tmp_path / "theirs", envelope("eagle3"), tensors)
    draft = import_draft(source, tmp_path / "ours")
    assert (draft.family, draft.num_speculative_tokens) == ("eagle3", 5)
    assert draft.config["architectures"] == ["Eagle3LlamaForCausalLM"]
    assert draft.config["norm_before_residual"] is True  # speculators' default, not vLLM's
    assert draft.config["num_aux_hidden_states"] == 3
    theirs = raw(source)
    assert theirs.pop("verifier_lm_head.weight")
    assert raw(tmp_path / "ours") == theirs
    imported = draft.metadata["trained"]["imported"]
    assert imported["dropped_tensors"] == ["verifier_lm_head.weight"]
    assert "_name_or_path" in imported["dropped_keys"]
    stated = import_draft(
        write(
            tmp_path / "b",
            envelope("eagle3", norm_before_residual=False),
            build_tensors(build_config()),
        ),
        tmp_path / "ours-b",
        num_speculative_tokens=2,
    )
    assert (stated.config["norm_before_residual"], stated.num_speculative_tokens) == (False, 2)


def test_speculators_parallel_eagle3(tmp_path: Path) -> None:
    tensors = {**build_tensors(build_config()), "mask_hidden": random_bf16(1, 1, 48, seed=6)}
    draft = import_draft(
        write(tmp_path / "theirs", envelope("peagle", mask_token_id=63), tensors), tmp_path / "ours"
    )
    assert draft.config["mask_token_id"] == 63
    assert draft.config["norm_before_residual"] is False  # peagle's own default
    assert draft.tensors["mask_hidden"].shape == (1, 1, 48)
    with pytest.raises(DraftError, match="'mask_token_id' is missing"):
        import_draft(write(tmp_path / "b", envelope("peagle"), tensors), tmp_path / "no")
    assert not (tmp_path / "no").exists()


def dflash_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    rules = build_contract("dflash", config).tensors
    return {
        name: encode_d2t([0] * rule.shape[0]) if name == "d2t" else random_bf16(*rule.shape, seed=s)
        for s, (name, rule) in enumerate(rules.items())
        if rule.required
    }


def test_a_published_dflash_folder(tmp_path: Path) -> None:
    config = {
        **LAYER,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "dflash_config": {"mask_token_id": 62, "target_layer_ids": [0, 1, 2]},
        "num_target_layers": 4,
        "max_window_layers": 1,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"],
    }
    source = write(tmp_path / "theirs", config, dflash_tensors(config))
    (source / "dflash.py").write_text("raise SystemExit('never imported')")
    draft = import_draft(source, tmp_path / "ours")
    assert (draft.family, draft.num_speculative_tokens) == ("dflash", 15)
    assert raw(tmp_path / "ours") == raw(source)
    assert draft.metadata["trained"]["imported"]["dropped_keys"] == ["auto_map"]
    assert sorted(p.name for p in (tmp_path / "ours").iterdir()) == [
        "config.json",
        "metadata.json",
        "model.safetensors",
        "spec.json",
    ]


def test_speculators_dflash_counts_layers_from_one_more(tmp_path: Path) -> None:
    config = envelope(
        "dflash",
        mask_token_id=62,
        aux_hidden_state_layer_ids=[1, 2, 3],
        draft_vocab_size=None,
        block_size=8,
        transformer_layer_config={**LAYER, "model_type": "qwen3"},
    )
    plain = {
        **LAYER,
        "model_type": "qwen3",
        "dflash_config": {"target_layer_ids": [0, 1, 2], "mask_token_id": 62},
    }
    draft = import_draft(write(tmp_path / "a", config, dflash_tensors(plain)), tmp_path / "ours")
    assert draft.config["dflash_config"]["target_layer_ids"] == [0, 1, 2]
    assert draft.config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


def test_a_plain_eagle3_folder_in_shards(tmp_path: Path) -> None:
    tensors = build_tensors(build_config())
    source = tmp_path / "theirs"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({**build_config(), "_name_or_path": "x"}))
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:5], names[5:]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        write_safetensors(source / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    draft = import_draft(source, tmp_path / "ours", name="theirs, imported")
    assert draft.name == "theirs, imported"
    assert raw(tmp_path / "ours") == {name: tensor[2] for name, tensor in tensors.items()}
    assert read_draft(tmp_path / "ours").sha256 == draft.sha256


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (envelope("hydra"), "speculators' type hydra"),
        (envelope("eagle3", transformer_layer_config=[]), "holds no layer"),
        ({**build_config(), "architectures": ["MistralForCausalLM"]}, "MistralForCausalLM is no"),
        ({**build_config(), "hidden_size": 32}, "columns 16|config implies"),
        ({**build_config(), "architectures": []}, "null is no draft"),
    ],
)
def test_what_cannot_be_imported_leaves_nothing(
    config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "theirs", config, build_tensors(build_config()))
    with pytest.raises(DraftError, match=reason):
        import_draft(source, tmp_path / "ours")
    assert [item.name for item in tmp_path.iterdir()] == ["theirs"]


def test_a_folder_with_a_hostile_file_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "theirs", envelope("eagle3"), build_tensors(build_config()))
    (source / "config.json").write_text('{"a": 1, "a": 2}')
    with pytest.raises(DraftError, match="a"):
        import_draft(source, tmp_path / "ours")
    with pytest.raises(DraftError, match="no such folder"):
        import_draft(tmp_path / "none", tmp_path / "ours")


# and back


@pytest.mark.parametrize("name", ["Llama layer", "two layers", "Qwen3 layer", "parallel", "dflash"])
def test_out_and_in_again(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if name in case.name)
    write_folder(case, tmp_path / "ours", build_tensors_of(case))
    draft = read_draft(tmp_path / "ours")
    theirs = export_draft(draft, tmp_path / "theirs", verifier="org/target")
    again = import_draft(theirs, tmp_path / "again")
    assert again.family == draft.family
    assert again.num_speculative_tokens == draft.num_speculative_tokens
    named = {
        n.replace("midlayer.", "layers.0."): raw_ for n, raw_ in raw(tmp_path / "ours").items()
    }
    assert raw(tmp_path / "theirs") == raw(tmp_path / "again") == named
    before, after = (build_contract(d.family, d.config) for d in (draft, again))
    assert before.sizes == after.sizes  # every size and flag
    for key in ("norm_before_residual", "rms_norm_eps", "rope_parameters", "mask_token_id"):
        assert again.config.get(key) == draft.config.get(key), key
    assert read_dflash_layer_ids(again.config) == read_dflash_layer_ids(draft.config)


def test_what_the_envelope_cannot_say_is_refused(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.family == "medusa")
    write_folder(case, tmp_path / "m", build_tensors_of(case))
    with pytest.raises(DraftError, match="family medusa has no speculators form"):
        export_draft(read_draft(tmp_path / "m"), tmp_path / "x", verifier="t")
    case = next(case for case in CASES if case.family == "dflash")
    config = {**case.config, "dflash_config": {**case.config["dflash_config"], "use_swa": True}}
    case = dataclasses.replace(case, config={**config, "sliding_window": 8})
    write_folder(case, tmp_path / "d", build_tensors_of(case))
    with pytest.raises(DraftError, match="'use_swa' cannot be said"):
        export_draft(read_draft(tmp_path / "d"), tmp_path / "x", verifier="t")
    assert not (tmp_path / "x").exists()
