"""A draft in the speculators format is replayed like the same draft as a plain folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import REMOVE, build_draft
from envelopes import build_envelope
from safetensors.torch import load_file, save_file
from tiny import make_recipe

from paceline.draft import Draft, read_draft
from paceline.errors import RecipeError
from paceline.target import TargetFacts
from paceline.train import train_draft
from paceline.train.entry import simulate_draft
from paceline.train.families.eagle3 import Eagle3
from paceline.train.features import load_frozen_target
from paceline.train.replay import load_draft_module
from paceline.validate import validate_draft


def test_the_same_module(tmp_path: Path) -> None:
    plain = Eagle3(read_draft(build_draft(tmp_path / "plain")).config)
    envelope = Eagle3(read_draft(build_envelope(tmp_path / "envelope")).config)
    shapes = {name: tensor.shape for name, tensor in plain.state_dict().items()}
    assert {name: tensor.shape for name, tensor in envelope.state_dict().items()} == shapes


def test_a_plain_folder_that_leaves_counts_to_vllm(tmp_path: Path) -> None:
    """Three taps and the whole vocabulary, where config.json does not say so."""
    config = {"num_aux_hidden_states": REMOVE, "draft_vocab_size": REMOVE}
    draft = Eagle3(read_draft(build_draft(tmp_path / "d", config=config)).config)
    assert draft.fc.weight.shape[1] == 3 * 16
    assert draft.lm_head is None


def test_norms_of_a_draft_are_trained_written_and_walked(
    target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    """Written, they validate; read back, the same numbers; gone on from, only under the same."""
    norms = {"draft__norm_before_fc": True, "draft__fc_norm": True, "draft__norm_output": True}
    recipe = make_recipe(**norms, optim__num_steps=6, optim__lr=3e-2)
    draft = train_draft(
        recipe, target=target, data_dir=data_dir, out_dir=tmp_path / "a", device="cpu"
    )
    report = validate_draft(draft.path, target=target)
    assert not [f for f in report.findings if f.severity == "error"], report.findings
    module = load_draft_module(draft)
    assert isinstance(module, Eagle3)
    assert module.norm_output
    assert not torch.equal(module.input_norm.weight, torch.ones(96))  # type: ignore[union-attr]
    assert simulate_draft(draft, target, [([5, 6], [7, 8, 9, 10, 11, 12])])
    for changes, words in (
        ({}, "norm_output = true"),
        ({"draft__norm_output": True}, "has a tensor"),
    ):
        again = make_recipe(**changes, init__from=str(draft.path), optim__num_steps=1)
        with pytest.raises(RecipeError, match=words):
            train_draft(
                again, target=target, data_dir=data_dir, out_dir=tmp_path / "b", device="cpu"
            )


@pytest.mark.parametrize("shared", [True, False])
def test_going_on_from_a_draft_that_holds_the_targets_ends(
    shared: bool, target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    first = train_draft(
        make_recipe(optim__num_steps=1),
        target=target,
        data_dir=data_dir,
        out_dir=tmp_path / "a",
        device="cpu",
    )
    frozen = load_frozen_target(target, device="cpu", dtype=torch.bfloat16)
    path = Path(first.path) / "model.safetensors"
    rows = frozen.embedding_VD if shared else frozen.embedding_VD + 1
    save_file({**load_file(path), "embed_tokens.weight": rows.contiguous()}, path)
    again = make_recipe(init__from=str(first.path), optim__num_steps=1)

    def go_on() -> Draft:
        return train_draft(
            again, target=target, data_dir=data_dir, out_dir=tmp_path / "b", device="cpu"
        )

    if shared:
        assert "embed_tokens.weight" not in load_file(Path(go_on().path) / "model.safetensors")
        return
    with pytest.raises(RecipeError, match="embed_tokens"):
        go_on()
