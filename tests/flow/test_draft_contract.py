"""Our EAGLE-3 contract against vLLM's own module: same tensors, same shapes, same blind spots.

Builds vLLM's draft module on the CPU without starting an engine, in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from paceline.draft import Draft, build_contract, build_eagle3_config, write_draft
from paceline.target import TargetFacts

pytestmark = pytest.mark.engine

PROBE = textwrap.dedent(
    """
    import json, sys
    import torch
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    target, draft = sys.argv[1:]
    torch.set_default_dtype(torch.bfloat16)
    settings = {"model": draft, "method": "eagle3", "num_speculative_tokens": 3}
    config = EngineArgs(
        model=target, dtype="bfloat16", max_model_len=8192, enforce_eager=True,
        speculative_config=settings,
    ).create_engine_config()

    def build():
        config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(config):
            return Eagle3LlamaForCausalLM(vllm_config=config)

    def load(model, tensors):
        try:
            with set_current_vllm_config(config):
                model.load_weights(list(tensors.items()))
        except Exception as error:
            return type(error).__name__
        return "loaded"

    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "file://" + draft + ".rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
    sound = load_file(draft + "/model.safetensors")
    model = build()
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    model_config = config.speculative_config.draft_model_config
    print("ANSWER" + json.dumps({
        "shapes": shapes,
        "positions": model_config.hf_config.max_position_embeddings,
        "max_model_len": model_config.max_model_len,
        "architectures": list(model_config.architectures),
        "sound": load(model, sound),
        "offsets": model.draft_id_to_target_id[:4].tolist(),
        "without fc": load(build(), {k: v for k, v in sound.items() if k != "fc.weight"}),
        "without d2t": load(build(), {k: v for k, v in sound.items() if k != "d2t"}),
        "with a stranger": load(build(), {**sound, "stranger": torch.zeros(1)}),
    }))
    """
)


def build_random_draft(target: TargetFacts, out: Path) -> Draft:
    import torch

    config = build_eagle3_config(
        target,
        aux_layer_ids=(2, 15, 27),
        draft_vocab_size=4096,  # vLLM pads a head's rows to a multiple of 64
        intermediate_size=256,
        max_position_embeddings=4096,
    )
    tensors: dict[str, Any] = {
        name: torch.randn(rule.shape).to(torch.bfloat16)
        for name, rule in build_contract("eagle3", config).tensors.items()
        if rule.required
    }
    tensors["d2t"] = torch.arange(4096) * 2
    return write_draft(
        out,
        family="eagle3",
        config=config,
        tensors=tensors,
        num_speculative_tokens=3,
        metadata={"name": "random"},
    )


def fuse(shapes: dict[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """Our names and shapes as vLLM's module holds them: q, k, v and gate, up stacked by rows."""
    fused: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        for part, whole in (
            *((f".{letter}_proj.", ".qkv_proj.") for letter in "qkv"),
            (".gate_proj.", ".gate_up_proj."),
            (".up_proj.", ".gate_up_proj."),
            ("midlayer.", "layers.0."),
        ):
            name = name.replace(part, whole)
        if name == "d2t":
            name = "draft_id_to_target_id"
        elif name != "lm_head.weight":
            name = f"model.{name}"
        rows = fused[name][0] if name in fused else 0
        fused[name] = [rows + shape[0], *shape[1:]]
    return fused


def test_contract_equals_vllms_module(smollm2: TargetFacts, tmp_path: Path) -> None:
    draft = build_random_draft(smollm2, tmp_path / "draft")
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(smollm2.path), str(draft.path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    assert lines, done.stderr[-3000:]
    answer = json.loads(lines[0].removeprefix("ANSWER"))

    theirs = answer["shapes"]
    assert theirs.pop("model.embed_tokens.weight") == [49152, 576]  # shared later: optional to us
    assert fuse({name: tensor.shape for name, tensor in draft.tensors.items()}) == theirs
    assert answer["sound"] == "loaded"
    assert answer["offsets"] == [0, 2, 4, 6]

    # why the strict checks exist
    assert answer["without fc"] == "loaded"
    assert answer["without d2t"] == "loaded"
    assert answer["with a stranger"] == "ValueError"

    # the rotary table is stretched to the target's length, the drafting length is not
    assert answer["positions"] == 8192
    assert answer["max_model_len"] == 4096
    assert answer["architectures"] == ["LlamaForCausalLMEagle3"]
