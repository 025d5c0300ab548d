"""Copies of target layers: every disguise the rule names is seen, independent layers never are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Tensor, build_draft, build_target_facts, write_safetensors

from paceline.rules import read_rules
from paceline.safetensors_header import read_header
from paceline.validate import validate_draft
from paceline.validate.copies import (
    NEARLY_IDENTICAL,
    STARTED_FROM,
    Copy,
    find_copies,
    list_places,
    list_target_matrices,
    list_wanted,
    measure_similarity,
)
from paceline.validate.scan import measure_tensor, open_plain

H, I = 96, 160  # noqa: E741
Array = np.ndarray[Any, np.dtype[np.float32]]
EMC2 = read_rules("emc2-2027")


def draw(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.03


def bf16(values: Array) -> Tensor:
    """Rounded to the nearest, ties to even, as every trainer saves it."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    return (
        "BF16",
        values.shape,
        ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes(),
    )


def f32(values: Array) -> Tensor:
    return "F32", values.shape, values.astype("<f4").tobytes()


def f16(values: Array) -> Tensor:
    return "F16", values.shape, values.astype("<f2").tobytes()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers in two shards, embeddings, and an MTP head."""
    folder = tmp_path_factory.mktemp("target")
    for shard in range(2):
        tensors = {}
        for layer in range(4 * shard, 4 * shard + 4):
            place = f"model.layers.{layer}"
            tensors[f"{place}.self_attn.q_proj.weight"] = bf16(draw(10 * layer, H, H))
            tensors[f"{place}.mlp.up_proj.weight"] = bf16(draw(10 * layer + 1, I, H))
            tensors[f"{place}.mlp.down_proj.weight"] = bf16(draw(10 * layer + 2, H, I))
            tensors[f"{place}.input_layernorm.weight"] = bf16(np.ones(H, np.float32))
        if shard:
            tensors["mtp.layers.0.mlp.up_proj.weight"] = bf16(draw(500, I, H))
        else:
            tensors["model.embed_tokens.weight"] = bf16(draw(501, 64, H))
        write_safetensors(folder / f"model-0000{shard + 1}-of-00002.safetensors", tensors)
    return folder


def search(folder: Path, target: Path, tensors: dict[str, Tensor]) -> dict[str, Copy]:
    path = folder / "draft.safetensors"
    write_safetensors(path, tensors)
    matrices = [m for m in list_target_matrices(target) if m.kind != "ends"]
    held = read_header(path).tensors
    shapes = {m.tensor.shape for m in matrices}
    handle = open_plain(path)
    picked = {
        name: measure_tensor(
            handle,
            tensor,
            {p: list_wanted(p, tensor.shape) for s in shapes for p in list_places(tensor.shape, s)},
        ).picked
        for name, tensor in held.items()
    }
    return find_copies(held, picked, matrices)


def rounded(seed: int, *shape: int) -> Array:
    """The target's own values, as its bfloat16 file holds them."""
    bits = np.frombuffer(bf16(draw(seed, *shape))[2], dtype="<u2").astype("<u4") << 16
    return bits.view("<f4").reshape(shape)


UP = rounded(31, I, H)  # model.layers.3.mlp.up_proj.weight
Q = rounded(50, H, H)  # model.layers.5.self_attn.q_proj.weight
DISGUISES: dict[str, tuple[Callable[[], Tensor], str]] = {
    "as it is": (lambda: bf16(UP), "identical"),
    "cast up": (lambda: f32(UP), "precision (BF16 to F32)"),
    "cast to half": (lambda: f16(UP), "precision"),
    "scaled": (lambda: bf16(UP * 3.7), "scaled by 3.7"),
    "turned round": (lambda: bf16(UP * -1.5), "scaled by -1.5"),
    "transposed": (lambda: bf16(UP.T.copy()), "transposed"),
    "square, transposed": (lambda: bf16(Q.T.copy()), "transposed"),
    "transposed, scaled, cast": (lambda: f16(UP.T * 0.5), "transposed"),
    "a little noise": (lambda: bf16(UP + 0.05 * draw(900, I, H)), "nearly identical"),
    "rows scaled": (lambda: bf16(UP * np.geomspace(0.02, 50, I)[:, None]), "nearly identical"),
    "columns scaled": (lambda: bf16(UP * np.geomspace(0.02, 50, H)), "nearly identical"),
    "signs of rows": (
        lambda: bf16(UP * np.where(np.arange(I) % 2, -1.0, 1.0)[:, None]),
        "nearly identical",
    ),
    "left of two inputs": (
        lambda: bf16(np.concatenate([UP, draw(901, I, H)], axis=1)),
        "in a part",
    ),
    "right of two inputs": (
        lambda: bf16(np.concatenate([draw(902, I, H), UP], axis=1)),
        "in a part",
    ),
    "the first rows": (lambda: bf16(UP[: I // 2].copy()), "in a part"),
    "the last columns, transposed": (lambda: bf16(UP.T[H // 2 :].copy()), "in a part"),
}


@pytest.mark.parametrize("name", DISGUISES)
def test_every_disguise_is_seen_and_named(name: str, target: Path, tmp_path: Path) -> None:
    build, how = DISGUISES[name]
    copy = search(tmp_path, target, {"x": build()})["x"]
    wanted = (
        "model.layers.5.self_attn.q_proj.weight"
        if name.startswith("square")
        else ("model.layers.3.mlp.up_proj.weight")
    )
    assert copy.matrix.tensor.name == wanted
    assert copy.similarity >= NEARLY_IDENTICAL, copy
    assert how in copy.how, copy.how


def test_layers_of_their_own_are_not_near(target: Path, tmp_path: Path) -> None:
    """Random, low-rank, sparse, with a common mean, smooth: none comes close."""
    low_rank = draw(910, I, 2) @ draw(911, 2, H) * 30
    sparse = np.where(draw(912, I, H) > 0.06, 1.0, 0.0).astype(np.float32)
    smooth = np.outer(np.linspace(-1, 1, I), np.linspace(1, 2, H)).astype(np.float32)
    drafts = {
        "random": bf16(draw(913, I, H)),
        "low_rank": bf16(low_rank),
        "sparse": bf16(sparse),
        "mean": bf16(draw(914, I, H) + 0.5),
        "smooth": bf16(smooth),
        "eye": bf16(np.eye(H, dtype=np.float32)),
        "constant": bf16(np.full((I, H), 0.25, np.float32)),
        "zero": bf16(np.zeros((I, H), np.float32)),
    }
    assert search(tmp_path, target, drafts) == {}


def test_similarity_is_the_correlation_that_was_put_in() -> None:
    base = draw(1, 16, 256)
    for size in (0.1, 0.5, 1.0, 2.0):
        noisy = base + size * draw(2, 16, 256)
        wanted = 1 / np.sqrt(1 + size**2)
        assert measure_similarity(noisy, base) == pytest.approx(wanted, abs=0.04)
    assert measure_similarity(draw(3, 16, 256), base) < 0.1
    assert measure_similarity(np.full((16, 256), np.nan, np.float32), base) == 0.0


# the rule, with a contest that forbids copies, one that does not, and the native MTP head


def folder_with(tmp_path: Path, target: Path, up: Tensor, **metadata: Any) -> tuple[Path, Any]:
    sizes = {"hidden_size": H, "intermediate_size": I, "head_dim": 24, "num_attention_heads": 4}
    folder = build_draft(
        tmp_path / "draft",
        config=sizes,
        tensors={"midlayer.mlp.up_proj.weight": up},
        metadata=metadata,
    )
    return folder, build_target_facts(target, hidden_size=H)


def told(folder: Path, facts: Any, rules: Any) -> dict[str, str]:
    report = validate_draft(folder, target=facts, rules=rules, deep=True)
    return {f.rule: f.severity for f in report.findings if f.rule in ("ten.copy", "ten.start")}


def test_a_copy_is_an_error_where_the_rules_forbid_it(target: Path, tmp_path: Path) -> None:
    folder, facts = folder_with(tmp_path, target, bf16(UP * 2.5))
    allowed = dataclasses.replace(
        EMC2, limits=dataclasses.replace(EMC2.limits, forbids_copied_layers=False)
    )
    assert told(folder, facts, EMC2) == {"ten.copy": "error"}
    assert told(folder, facts, allowed) == {"ten.copy": "note"}
    assert told(folder, facts, None) == {"ten.copy": "warning"}


def test_many_copies_are_one_finding(target: Path, tmp_path: Path) -> None:
    folder, facts = folder_with(tmp_path, target, bf16(UP))
    path = folder / "model.safetensors"
    held = read_header(path).tensors
    data = path.read_bytes()
    tensors = {n: (t.dtype, t.shape, data[t.start : t.end]) for n, t in held.items()}
    tensors["midlayer.mlp.gate_proj.weight"] = bf16(UP * 2)
    tensors["midlayer.mlp.down_proj.weight"] = bf16(rounded(32, H, I))
    write_safetensors(path, tensors)
    found = validate_draft(folder, target=facts, rules=EMC2, deep=True).findings
    copies = [item for item in found if item.rule == "ten.copy"]
    assert len(copies) == 1
    assert "; 2 other matrices likewise" in copies[0].message
    assert "bit-identical copy" in copies[0].message


def test_a_layer_trained_on_from_the_targets_is_no_copy(target: Path, tmp_path: Path) -> None:
    trained = bf16(UP + 0.3 * draw(920, I, H))  # correlation 0.96, as after a long run
    folder, facts = folder_with(tmp_path / "a", target, trained)
    assert told(folder, facts, EMC2) == {"ten.start": "warning"}
    assert told(folder, facts, None) == {"ten.start": "note"}
    declared = {"trained": {"thinking": "none", "started_from": {"from": "target"}}}
    folder, facts = folder_with(tmp_path / "b", target, trained, **declared)
    assert told(folder, facts, EMC2) == {"ten.start": "note"}


def test_the_native_mtp_head_is_not_a_target_layer(target: Path, tmp_path: Path) -> None:
    native = rounded(500, I, H)
    folder, facts = folder_with(tmp_path / "a", target, bf16(native))
    assert told(folder, facts, EMC2) == {"ten.copy": "note"}
    folder, facts = folder_with(tmp_path / "b", target, bf16(native + 0.1 * draw(930, I, H)))
    assert told(folder, facts, EMC2) == {}


def test_a_target_without_plain_matrices_is_said(tmp_path: Path) -> None:
    empty = tmp_path / "target"
    empty.mkdir()
    write_safetensors(empty / "model.safetensors", {"model.norm.weight": f32(draw(1, H))})
    folder, facts = folder_with(tmp_path, empty, bf16(UP))
    report = validate_draft(folder, target=facts, rules=EMC2, deep=True)
    messages = [f.message for f in report.findings if f.rule == "not.checked"]
    assert any("copies of the target's layers were not looked for" in m for m in messages)


def test_thresholds_stand_between_what_was_measured() -> None:
    """Figures of docs/decisions: 151,000 tokens, 45 million tokens, trained apart."""
    assert 0.985 < NEARLY_IDENTICAL < 0.998
    assert 0.15 < STARTED_FROM < 0.92
