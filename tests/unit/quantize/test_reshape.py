"""Windows, smaller vocabularies and shared heads: what is written, against what it was made of."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from builders import (  # noqa: E402
    HIDDEN,
    KEPT_IDS,
    VOCAB,
    build_draft,
    build_target_facts,
    random_bf16,
    write_safetensors,
)

from paceline.draft import Draft, read_draft, read_tensors  # noqa: E402
from paceline.errors import PlanError  # noqa: E402
from paceline.quantize import Reshape, choose_tokens, read_vocabulary, reshape_draft  # noqa: E402
from paceline.target import TargetFacts  # noqa: E402
from paceline.validate import validate_draft  # noqa: E402


@pytest.fixture
def target(tmp_path: Path) -> TargetFacts:
    folder = tmp_path / "target"
    folder.mkdir()
    matrix = random_bf16(VOCAB, HIDDEN, seed=5)
    write_safetensors(folder / "model.safetensors", {"model.embed_tokens.weight": matrix})
    return dataclasses.replace(
        build_target_facts(), path=folder, tie_word_embeddings=True, eos_token_ids=(63,)
    )


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    return read_draft(build_draft(tmp_path / "draft"))


def read_head(target: TargetFacts) -> object:
    from safetensors.torch import load_file

    return load_file(target.path / "model.safetensors")["model.embed_tokens.weight"]


def test_most_frequent_tokens_and_their_coverage(target: TargetFacts) -> None:
    counts = {"code": Counter({5: 6, 9: 2}), "chat": Counter({5: 1, 20: 11})}
    tokens, coverage = choose_tokens(counts, 4, target=target)
    assert tokens == (5, 9, 20, 63)
    assert coverage == {"all": 1.0, "code": 1.0, "chat": 1.0}
    tokens, coverage = choose_tokens(counts, 2, target=target)
    assert tokens == (20, 63)
    assert coverage == {"all": 11 / 20, "code": 0.0, "chat": 11 / 12}
    tokens, _ = choose_tokens(counts, 5, target=target)
    assert tokens == (0, 5, 9, 20, 63)  # the lowest ids fill up what is left
    tokens, coverage = choose_tokens(counts, 3, target=target, allowed=(1, 5, 20, 63))
    assert tokens == (5, 20, 63)
    assert coverage["code"] == 6 / 8
    for size in (0, 64):
        with pytest.raises(PlanError, match="a vocabulary of"):
            choose_tokens(counts, size, target=target)


def test_a_cut_keeps_the_rows_of_its_tokens(
    draft: Draft, target: TargetFacts, tmp_path: Path
) -> None:
    assert read_vocabulary(draft) == KEPT_IDS
    kept = (0, 5, 31, 63)
    done = reshape_draft(draft, target, Reshape(tokens=kept), tmp_path / "out")
    before, after = read_tensors(draft), read_tensors(done)
    places = [KEPT_IDS.index(token) for token in kept]
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"][places])
    assert read_vocabulary(done) == kept
    assert done.config["draft_vocab_size"] == 4
    assert validate_draft(done.path, target=target).verdict != "fail"


def test_a_full_draft_takes_the_targets_rows(
    draft: Draft, target: TargetFacts, tmp_path: Path
) -> None:
    full = reshape_draft(draft, target, Reshape(shares_head=True), tmp_path / "full")
    assert {"lm_head.weight", "d2t"}.isdisjoint(full.tensors)
    assert full.config["draft_vocab_size"] == VOCAB
    assert read_vocabulary(full) is None
    told = full.metadata["reshaped"]["shared"]
    own = read_tensors(draft)["lm_head.weight"].float()
    theirs = read_head(target)[list(KEPT_IDS)].float()  # type: ignore[index]
    assert told["lm_head.weight"] == pytest.approx(float((own - theirs).norm() / theirs.norm()))
    cut = reshape_draft(full, target, Reshape(tokens=(1, 2, 40)), tmp_path / "cut")
    rows = read_head(target)[[1, 2, 40]]  # type: ignore[index]
    assert torch.equal(read_tensors(cut)["lm_head.weight"], rows)
    with pytest.raises(PlanError, match="shares the target's ends already"):
        reshape_draft(full, target, Reshape(shares_head=True), tmp_path / "again")


def test_a_window(draft: Draft, target: TargetFacts, tmp_path: Path) -> None:
    done = reshape_draft(draft, target, Reshape(window=32), tmp_path / "out")
    assert done.config["sliding_window"] == 32
    assert done.config["layer_types"] == ["sliding_attention"]
    assert validate_draft(done.path, target=target).verdict != "fail"
    before, after = read_tensors(draft), read_tensors(done)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for size in (1, target.max_position_embeddings):
        with pytest.raises(PlanError, match="a window of"):
            reshape_draft(draft, target, Reshape(window=size), tmp_path / "bad")


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        ("mtp", Reshape(window=32), "reads no window"),
        ("medusa", Reshape(window=32), "no attention of its own"),
        ("mtp", Reshape(tokens=(1,)), "whole vocabulary"),
        ("medusa", Reshape(tokens=(1,)), "token_map"),
        ("draft_model", Reshape(tokens=(1,)), "the target's vocabulary size"),
        ("draft_model", Reshape(shares_head=True), "shares no output layer"),
        ("mtp", Reshape(shares_head=True), "always"),
        ("eagle3", Reshape(tokens=(1,), shares_head=True), "one of the two"),
    ],
)
def test_what_vllm_cannot_do_is_refused_with_its_reason(
    family: str, change: Reshape, told: str, draft: Draft, target: TargetFacts, tmp_path: Path
) -> None:
    other = dataclasses.replace(draft, family=family)
    with pytest.raises(PlanError, match=told):
        reshape_draft(other, target, change, tmp_path / "out")
