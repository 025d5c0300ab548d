"""A draft in the speculators format is replayed like the same draft as a plain folder."""

from __future__ import annotations

from pathlib import Path

from builders import REMOVE, build_draft
from envelopes import build_envelope

from paceline.draft import read_draft
from paceline.train.families.eagle3 import Eagle3


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
