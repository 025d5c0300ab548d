"""Odd folders that validate takes, on a real engine: they draft what the plain one drafts.

Both say by other means what the bundled draft says: more heads whose output is dropped, a second
layer that adds nothing, rows in another order, a map of nearly the whole vocabulary, an envelope.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from envelopes import wrap

from paceline.data import build_requests, read_prompts
from paceline.draft import Draft, read_draft, read_native_draft, resolve_draft
from paceline.endpoint import Answer, Request, Sampling
from paceline.serve import build_plan, start
from paceline.target import TargetFacts, read_target
from paceline.train.families.mtp_weights import read_native_head
from paceline.validate import validate_draft

pytestmark = pytest.mark.engine

QUESTIONS = (
    "Name three colours.",
    "Why is the sky blue?",
)
KEPT = 49088  # of 49,152 ids; the last ones hardly occur
HEAD_DIM, REAL, KV = 64, 9, 3


def read_parts(target: TargetFacts) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """(config, tensors as `layers.0.*`, the target's embedding) of the bundled draft."""
    from safetensors.torch import load_file

    folder = resolve_draft("smollm2-eagle3")
    config = json.loads((folder / "config.json").read_text())
    tensors = {
        name.replace("midlayer.", "layers.0."): value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    (shard,) = target.path.glob("*.safetensors")
    embedding = load_file(shard)["model.embed_tokens.weight"].bfloat16()
    return config, tensors, embedding


def build_plain(folder: Path, target: TargetFacts) -> Path:
    """18 heads of 64 on a width of 576, two layers, own embeddings, own head in reverse order, a
    mask of numbers, two shards, a million positions, and keys that nobody reads."""
    import torch
    from safetensors.torch import save_file

    config, tensors, embedding = read_parts(target)
    layer = "layers.0.self_attn."
    group = REAL // KV
    query = tensors[layer + "q_proj.weight"].view(KV, group, HEAD_DIM, -1)
    output = tensors[layer + "o_proj.weight"].view(-1, KV, group, HEAD_DIM)
    tensors[layer + "q_proj.weight"] = torch.cat([query, query], 1).reshape(2 * REAL * HEAD_DIM, -1)
    wide = torch.cat([output, torch.zeros_like(output)], 2)
    tensors[layer + "o_proj.weight"] = wide.reshape(output.shape[0], -1)
    for name, value in list(tensors.items()):
        if name.startswith("layers.0.") and "hidden_norm" not in name:
            second = value if value.ndim == 1 else value[:, :576]  # q, k, v read the state alone
            if "down_proj" in name or "o_proj" in name:
                second = torch.zeros_like(value)
            tensors[name.replace("layers.0.", "layers.1.")] = second.clone()
    own = embedding.clone()
    own[-1] += 1  # so that vLLM keeps it
    ids = torch.arange(KEPT - 1, -1, -1)
    tensors |= {
        "embed_tokens.weight": own,
        "lm_head.weight": embedding[ids],
        "d2t": (ids - torch.arange(KEPT)).int(),
        "t2d": torch.ones(7, dtype=torch.int64),
    }
    config |= {
        "num_attention_heads": 2 * REAL,
        "num_hidden_layers": 2,
        "draft_vocab_size": KEPT,
        "max_position_embeddings": 2**20,
        "made_by": "someone",
        "num_experts": 8,
        "use_sliding_window": False,
    }
    folder.mkdir()
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    weight_map = {}
    for number in (1, 2):
        file = f"model-{number:05}-of-00002.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[number - 1 :: 2]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "spec.json").write_text('{"family": "eagle3", "num_speculative_tokens": 3}')
    return folder


def build_wrapped(folder: Path, target: TargetFacts) -> Path:
    """As speculators saves it, config.json and weights alone; an identity map."""
    import torch
    from safetensors.torch import save_file

    config, tensors, embedding = read_parts(target)
    outside = ("architectures", "norm_before_residual", "num_aux_hidden_states", "dtype")
    layer = {key: value for key, value in config.items() if key not in outside}
    ids = layer.pop("eagle_aux_hidden_state_layer_ids")
    del layer["draft_vocab_size"]
    folder.mkdir()
    envelope = wrap(layer, draft_vocab_size=KEPT, eagle_aux_hidden_state_layer_ids=ids)
    (folder / "config.json").write_text(json.dumps(envelope))
    tensors |= {
        "embed_tokens.weight": embedding,
        "lm_head.weight": embedding[:KEPT].clone(),
        "d2t": torch.zeros(KEPT, dtype=torch.int64),
        "t2d": torch.arange(embedding.shape[0]) < KEPT,
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def serve(target: TargetFacts, draft: Draft, requests: list[Request], log: Path) -> list[Answer]:
    plan = build_plan(target, draft, device="cpu", max_model_len=512)
    with start(plan, log_path=log) as endpoint:
        assert endpoint.facts.method == "eagle3"
        return list(endpoint.generate(requests, concurrency=1))


def test_odd_folders_draft_like_the_plain_one(
    smollm2: TargetFacts, ask: Callable[..., Request], tmp_path: Path
) -> None:
    requests = [ask(question, max_tokens=32, ignore_eos=True) for question in QUESTIONS]
    places = {
        "bundled": resolve_draft("smollm2-eagle3"),
        "plain": build_plain(tmp_path / "plain", smollm2),
        "wrapped": build_wrapped(tmp_path / "wrapped", smollm2),
    }
    accepted, texts = {}, {}
    for name, folder in places.items():
        found = validate_draft(folder, target=smollm2).findings
        assert [item for item in found if item.severity == "error"] == [], name
        answers = serve(smollm2, read_draft(folder), requests, tmp_path / f"{name}.log")
        accepted[name] = [sum(answer.per_step_accepted or ()) for answer in answers]
        texts[name] = [answer.output_ids for answer in answers]
    assert texts["plain"] == texts["bundled"]
    assert texts["wrapped"] == texts["bundled"]
    assert sum(accepted["bundled"]) > 20  # of 64 tokens
    # the sum over more heads may be rounded in another order; as measured it is the same
    for name in ("plain", "wrapped"):
        for ours, theirs in zip(accepted[name], accepted["bundled"], strict=True):
            assert abs(ours - theirs) <= 1, accepted


def test_the_second_layer_of_an_mtp_head_never_runs(tmp_path: Path) -> None:
    """Not even beside a target that counts two: filled with NaN it costs memory and nothing else.

    So a head of two layers is served as it is meant at K = 1 alone.
    """
    import torch
    from safetensors.torch import save_file

    pocket = read_target("pocket")
    place = tmp_path / "target"
    shutil.copytree(pocket.path, place)
    config = json.loads((place / "config.json").read_text())
    inner = config.get("text_config", config)
    inner["mtp_num_hidden_layers"] = 2
    (place / "config.json").write_text(json.dumps(config))
    head = read_native_head(pocket)
    for name, value in list(head.items()):
        if name.startswith("mtp.layers.0."):
            head[name.replace("layers.0", "layers.1")] = torch.full_like(value, float("nan"))
    native = read_native_draft(pocket)
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**native.config, "mtp_num_hidden_layers": 2}))
    save_file(head, folder / "model.safetensors", metadata={"format": "pt"})
    draft = dataclasses.replace(native, path=folder, is_native=False)
    plan = build_plan(read_target(place), draft, device="cpu", num_speculative_tokens=2)
    prompts = read_prompts("held-out").prompts[::12]
    requests = build_requests(prompts, pocket, Sampling(max_tokens=24), thinking="off")
    with start(plan, log_path=tmp_path / "engine.log") as endpoint:
        answers = list(endpoint.generate(requests, concurrency=1))
        memory = endpoint.memory()
    both = [taken for answer in answers for taken in answer.per_step_accepted or ()]
    assert both.count(2) > 10, "the second token of a step is good, so no NaN made it"
    assert memory is not None
    one_layer = sum(t.num_bytes for name, t in native.tensors.items() if "layers.0" in name)
    assert memory.weights_bytes > native.files_bytes + 0.9 * one_layer, "loaded all the same"
