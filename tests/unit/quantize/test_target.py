"""Targets: which matrix gets which scheme, what is carried over, and that AWQ changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from random_hybrid import TYPES, build_rows, save_hybrid  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from paceline.draft import dequantize_tensors  # noqa: E402
from paceline.errors import DataError, PlanError, StorageError, TargetError  # noqa: E402
from paceline.quantize import choose_scheme, plan_target, quantize_target  # noqa: E402
from paceline.quantize.target_plan import build_target_settings  # noqa: E402
from paceline.target import TargetFacts, read_target  # noqa: E402

ROWS = build_rows(6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp("target") / "hybrid")


@pytest.fixture
def target(folder: Path) -> TargetFacts:
    return read_target(str(folder))


def logits(folder: Path, tensors: dict[str, Any] | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    if tensors is not None:
        state = {n: t.float() for n, t in tensors.items() if not n.startswith("mtp.")}
        missing = model.load_state_dict(state, strict=False)
        assert not missing.unexpected_keys
    with torch.no_grad():
        return torch.cat([model(torch.tensor([list(row.input_ids)])).logits[0] for row in ROWS])


def distance(one: Any, other: Any) -> float:
    return float((one - other).norm() / one.norm())


def test_layer_types_are_read_and_what_must_stay_stays(target: TargetFacts) -> None:
    plan = plan_target(
        target, choose_scheme("w4a16"), recurrent=choose_scheme("w8a8"), num_edge_layers=0
    )
    assert plan.schemes["model.layers.0.linear_attn.in_proj_qkv"] == choose_scheme("w8a8")
    assert plan.schemes["model.layers.0.linear_attn.in_proj_z"] == choose_scheme("w8a8")
    assert plan.schemes["model.layers.2.self_attn.q_proj"] == choose_scheme("w4a16")
    gates = {f"model.layers.{n}.linear_attn.in_proj_{x}" for n in (0, 3) for x in "ab"}
    assert set(plan.kept) == gates
    settings = build_target_settings(plan)
    groups = list(settings["config_groups"].values())
    assert [group["format"] for group in groups] == ["pack-quantized", "int-quantized"]
    assert settings["format"] == "mixed-precision"
    assert groups[1]["targets"] == [
        f"re:.*linear_attn\\.{leaf}$" for leaf in ("in_proj_qkv", "in_proj_z", "out_proj")
    ]
    assert {*gates, "re:^mtp.*", "lm_head"} == set(settings["ignore"])


def test_edges_are_kept_and_named_for_vllm(target: TargetFacts) -> None:
    plan = plan_target(target, choose_scheme("w4a16"))
    assert {name.split(".")[2] for name in plan.schemes} == {"1", "2"}
    ignored = build_target_settings(plan)["ignore"]
    assert {"model.layers.0.mlp.up_proj", "model.layers.3.linear_attn.out_proj"} <= set(ignored)
    with pytest.raises(PlanError, match="2 layers kept at each end of 4; expected 0 to 1"):
        plan_target(target, choose_scheme("w4a16"), num_edge_layers=2)


@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
def test_every_tensor_is_there_again(method: str, target: TargetFacts, tmp_path: Path) -> None:
    plan = plan_target(
        target,
        choose_scheme("w4a16"),
        method=method,
        recurrent=choose_scheme("w8a8"),
        head=choose_scheme("w8a8"),
    )
    done = quantize_target(plan, tmp_path / "out", rows=ROWS, where="rows")
    before = load_file(target.path / "model.safetensors")
    stored = load_file(done.path / "model.safetensors")
    plain = dequantize_tensors(stored)
    assert set(plain) == {*before, "lm_head.weight"}
    record = json.loads((done.path / "quantized.json").read_text())
    assert bool(record["rescaled"]) == (method == "awq")
    quantised = {f"{name}.weight" for name in plan.schemes}
    for name, tensor in before.items():
        if name not in quantised and name not in record["rescaled"]:
            assert torch.equal(plain[name], tensor), name
    assert {"model.layers.1.self_attn.k_proj.weight_packed", "lm_head.weight_scale"} <= set(stored)
    config = json.loads((done.path / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["layer_types"] == TYPES
    assert (done.path / "notes.txt").read_text() == "carried over"
    assert done.weights_fingerprint != target.weights_fingerprint
    with pytest.raises(TargetError, match="quantised already"):
        plan_target(done, choose_scheme("w4a16"))


def test_gptq_is_nearer_than_rounding(target: TargetFacts, tmp_path: Path) -> None:
    exact = logits(target.path)
    found = {}
    for method in ("gptq", "awq", "rtn"):
        plan = plan_target(
            target,
            choose_scheme("w4a16"),
            method=method,
            recurrent=choose_scheme("w4a16"),
            num_edge_layers=0,
        )
        done = quantize_target(plan, tmp_path / method, rows=ROWS, where="rows")
        tensors = dequantize_tensors(load_file(done.path / "model.safetensors"))
        found[method] = distance(exact, logits(target.path, tensors))
    assert found["gptq"] < 0.8 * found["rtn"], found
    assert found["awq"] < found["rtn"], found


def test_awq_alone_changes_nothing(target: TargetFacts, monkeypatch: Any) -> None:
    """Scales are folded into norms, gates and up_proj: with no rounding the model is the same."""
    from paceline.quantize import target_layer, target_run
    from paceline.quantize.grid import QuantizedWeight

    def leave(wide: Any, hessian: Any, plan: Any, name: str) -> Any:
        one = torch.ones(len(wide), 1)
        return QuantizedWeight(scheme=plan.schemes[name], codes_RC=wide.clone(), scale_RG=one)

    monkeypatch.setattr(target_layer, "round_matrix", leave)
    plan = plan_target(
        target,
        choose_scheme("w4a16"),
        method="awq",
        recurrent=choose_scheme("w4a16"),
        num_edge_layers=0,
    )
    done = target_run.run_target(plan, ROWS, where="rows", dtype="float32")
    assert len(done.changed) == 4 * 2 + 2 * 2  # two norms a layer, two gates a recurrent one
    before = load_file(target.path / "model.safetensors")
    moved = [n for n in done.changed if not torch.equal(done.changed[n], before[n].float())]
    assert len(moved) >= 6
    tensors = {
        **before,
        **done.changed,
        **{f"{name}.weight": weight.plain_RC for name, weight in done.weights.items()},
    }
    assert distance(logits(target.path), logits(target.path, tensors)) < 1e-4


def test_a_tied_head_comes_from_the_embeddings(target: TargetFacts, tmp_path: Path) -> None:
    plan = plan_target(target, choose_scheme("w8a16"), method="rtn", head=choose_scheme("w4a16", 0))
    done = quantize_target(plan, tmp_path / "out")
    plain = dequantize_tensors(load_file(done.path / "model.safetensors"))
    embedding = plain["model.embed_tokens.weight"].float()
    assert 0 < distance(embedding, plain["lm_head.weight"].float()) < 0.15
    assert done.tie_word_embeddings is False


def test_states_that_are_not_numbers_name_their_row(tmp_path: Path) -> None:
    folder = save_hybrid(tmp_path / "nan")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][int(ROWS[3].input_ids[0])] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plan = plan_target(read_target(str(folder)), choose_scheme("w4a16"))
    with pytest.raises(DataError, match=r"rows: row 'r\d': the target's states after"):
        quantize_target(plan, tmp_path / "out", rows=ROWS, where="rows")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_told_before_any_work(
    target: TargetFacts, tmp_path: Path, monkeypatch: Any
) -> None:
    plan = plan_target(target, choose_scheme("w4a16"))
    monkeypatch.setattr(
        "paceline.quantize.target.shutil.disk_usage", lambda path: SimpleNamespace(free=1000)
    )
    monkeypatch.setattr("paceline.quantize.target_run.run_target", None)
    with pytest.raises(StorageError, match=r"1,000 bytes are free; expected \d"):
        quantize_target(plan, tmp_path / "out", rows=ROWS, where="rows")


def test_what_does_not_fit_is_refused(target: TargetFacts, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="gptq needs the target's own inputs"):
        quantize_target(plan_target(target, choose_scheme("w4a16")), tmp_path / "out")
    with pytest.raises(PlanError, match="128 does not divide the 64 inputs of"):
        plan_target(target, choose_scheme("w4a16", 128))
    with pytest.raises(PlanError, match="method 'qad' is unknown"):
        plan_target(target, choose_scheme("w4a16"), method="qad")
    experts = tmp_path / "experts"
    save_hybrid(experts)
    tensors = load_file(experts / "model.safetensors")
    tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, experts / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match="mixture of experts"):
        plan_target(read_target(str(experts)), choose_scheme("w4a16"))


def test_a_quantised_target_is_trained_on_as_it_is_served(
    target: TargetFacts, tmp_path: Path
) -> None:
    from paceline.train.features import load_frozen_target

    plan = plan_target(target, choose_scheme("w4a16"), method="rtn", head=choose_scheme("w8a16"))
    done = quantize_target(plan, tmp_path / "out")
    plain = dequantize_tensors(load_file(done.path / "model.safetensors"))
    frozen = load_frozen_target(done, device="cpu", dtype=torch.float32)
    assert torch.equal(frozen.head_VD, plain["lm_head.weight"].float())
    assert torch.equal(frozen.embedding_VD, plain["model.embed_tokens.weight"].float())
    found = frozen.backbone.layers[1].mlp.down_proj.weight
    assert torch.equal(found, plain["model.layers.1.mlp.down_proj.weight"].float())
    stored = load_file(done.path / "model.safetensors")
    del stored["model.layers.2.mlp.up_proj.weight_packed"]
    del stored["model.layers.2.mlp.up_proj.weight_scale"]
    del stored["model.layers.2.mlp.up_proj.weight_shape"]
    save_file(stored, done.path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"layers\.2\.mlp\.up_proj\.weight' is missing"):
        load_frozen_target(done, device="cpu", dtype=torch.float32)
