"""The pocket model: a Qwen3.5-style hybrid with its MTP head, trained together, and its export.

The layers are transformers' own (`Qwen3_5TextModel`, `Qwen3_5DecoderLayer`), so the export needs no
translation: `model.*` and `mtp.*` are the names that vLLM 0.31.0 reads. The gated delta rule and
its convolution are delta.py's while training.

Shapes: B rows, T tokens, D hidden, V vocabulary, M weighted tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Pocket", "build_config", "export_weights", "joint_loss", "use_training_kernels"]


def build_config(*, vocab_size: int, tiny: bool = False) -> Any:
    """8.1 M parameters and 0.9 M of MTP head; tiny: for trying the recipe."""
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        architectures=["Qwen3_5ForCausalLM"],
        vocab_size=vocab_size,
        hidden_size=64 if tiny else 256,
        intermediate_size=128 if tiny else 640,
        num_hidden_layers=4 if tiny else 8,
        num_attention_heads=2 if tiny else 4,
        num_key_value_heads=1 if tiny else 2,
        head_dim=64,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=1 if tiny else 2,
        linear_num_value_heads=2 if tiny else 4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (1 if tiny else 2),
        full_attention_interval=4,
        max_position_embeddings=16448,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        tie_word_embeddings=True,
        attention_bias=False,
        attn_output_gate=True,
        mamba_ssm_dtype="float32",
        mtp_num_hidden_layers=1,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100_000.0,
            "partial_rotary_factor": 0.25,
        },
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
        dtype="bfloat16",
    )


def use_training_kernels() -> None:
    """Puts delta.py's forms in the place of transformers' own, for this process.

    The rule runs in float32 also under autocast: its running state is a long sum.
    """
    from delta import causal_convolution, delta_rule
    from transformers.models.qwen3_5 import modeling_qwen3_5 as source

    source.torch_chunk_gated_delta_rule = delta_rule
    source.causal_conv1d_fn = causal_convolution


class Mtp(nn.Module):
    """`mtp.*`: one gated full-attention layer on concat(norm(embedding), norm(state))."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.qwen3_5.modeling_qwen3_5 import (
            Qwen3_5DecoderLayer,
            Qwen3_5RMSNorm,
        )

        width, eps = config.hidden_size, config.rms_norm_eps
        full = config.layer_types.index("full_attention")
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, full)])
        self.norm = Qwen3_5RMSNorm(width, eps=eps)

    def forward(self, embeds_BTD: Tensor, hidden_BTD: Tensor, rotary: Any) -> Tensor:
        joined = torch.cat(
            (self.pre_fc_norm_embedding(embeds_BTD), self.pre_fc_norm_hidden(hidden_BTD)), dim=-1
        )
        out = self.layers[0](self.fc(joined), position_embeddings=rotary, attention_mask=None)
        return self.norm(out)  # type: ignore[no-any-return]


class Pocket(nn.Module):
    """Trunk and head; the embedding is the output matrix too."""

    def __init__(self, config: Any, *, seed: int) -> None:
        super().__init__()
        from transformers import Qwen3_5TextModel

        torch.manual_seed(seed)
        self.config = config
        self.model = Qwen3_5TextModel(config)
        self.mtp = Mtp(config)
        with torch.no_grad():
            for name, parameter in self.mtp.named_parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, 0.02)
                assert "norm" in name or parameter.ndim == 2

    def forward(self, tokens_BT: Tensor, *, num_steps: int) -> list[Tensor]:
        """[state of each position that predicts the next token, then one list entry a MTP step].

        Entry j >= 1 at t predicts x[t+1+j]; it reads x[t+j] and entry j-1 at t.
        """
        hidden = self.model(input_ids=tokens_BT, use_cache=False).last_hidden_state
        states = [hidden]
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
        rotary = self.model.rotary_emb(hidden, places[None].expand(3, -1, -1))
        for step in range(1, num_steps + 1):
            shifted = F.pad(tokens_BT[:, step:], (0, step))
            embeds = self.model.embed_tokens(shifted)
            states.append(self.mtp(embeds, states[-1], rotary))
        return states


def joint_loss(
    pocket: Pocket, tokens_BT: Tensor, counts_BT: Tensor, *, step_weights: tuple[float, ...]
) -> tuple[Tensor, list[float | Tensor], list[Tensor]]:
    """Cross-entropy of the next token plus step_weights[j] times that of each MTP step.

    counts_BT: which tokens are learnt (bool). Answers (loss, cross-entropies, accuracies).
    """
    states = pocket(tokens_BT, num_steps=len(step_weights))
    head = pocket.model.embed_tokens.weight
    total: Any = 0.0
    losses, right = [], []
    for step, (state, weight) in enumerate(zip(states, (1.0, *step_weights), strict=True)):
        ahead = step + 1
        counted = counts_BT[:, ahead:]
        logits = F.linear(state[:, :-ahead][counted], head)
        labels = tokens_BT[:, ahead:][counted]
        loss = F.cross_entropy(logits.float(), labels)
        total = total + weight * loss
        losses.append(loss.detach())
        right.append((logits.argmax(-1) == labels).float().mean())
    return total, losses, right


def export_weights(pocket: Pocket, folder: Path) -> None:
    """config.json and two shards in bfloat16: the trunk, and the head in a file of its own."""
    import json

    from safetensors.torch import save_file

    files = {"model.safetensors": {}, "mtp.safetensors": {}}  # type: dict[str, dict[str, Tensor]]
    for name, tensor in pocket.state_dict().items():
        file = "mtp.safetensors" if name.startswith("mtp.") else "model.safetensors"
        files[file][name] = tensor.detach().cpu().to(torch.bfloat16).contiguous()
    names, total = {}, 0
    for file, tensors in files.items():
        save_file(tensors, str(folder / file), metadata={"format": "pt"})
        names.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    pocket.config.save_pretrained(folder)
