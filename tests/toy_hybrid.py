"""A Qwen3.5-style hybrid small enough to be trained inside a test: three Gated-DeltaNet layers and
one of full attention, taught a made-up language of words and habits.

Greedy text of it is clear-cut (gaps of nats, not hundredths), repeats itself in part, and needs its
recurrent state: a stale one shows.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from paceline.records import sha256_file
from paceline.target import TargetFacts

__all__ = ["make_prompts", "make_texts", "make_toy_hybrid", "write_rows"]

_VOCAB = 128
_LETTERS = range(3, 27)
_NUM_WORDS = 40
_ODDS = (8, 2, 1)  # of the three words that may follow a word


class _Language:
    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.words = [
            [self.rng.choice(_LETTERS) for _ in range(self.rng.randrange(3, 7))]
            for _ in range(_NUM_WORDS)
        ]
        self.next = [self.rng.sample(range(_NUM_WORDS), 3) for _ in range(_NUM_WORDS)]

    def write(self, num_tokens: int) -> list[int]:
        text: list[int] = []
        word = self.rng.randrange(_NUM_WORDS)
        while len(text) < num_tokens:
            text += self.words[word]
            word = self.rng.choices(self.next[word], _ODDS)[0]
        return text[:num_tokens]


def make_prompts(count: int) -> list[tuple[int, ...]]:
    """Beginnings of 12 to 39 tokens; every fourth shares its first half with the one before."""
    language = _Language()
    language.rng.seed(1)
    prompts: list[tuple[int, ...]] = []
    for number in range(count):
        text = tuple(language.write(language.rng.randrange(12, 40)))
        if number % 4 == 3:
            text = prompts[-1][: len(prompts[-1]) // 2] + text
        prompts.append(text)
    return prompts


def make_texts(count: int, num_tokens: int) -> list[tuple[int, ...]]:
    """Texts of that language, as long as asked for."""
    language = _Language()
    language.rng.seed(2)
    return [tuple(language.write(num_tokens)) for _ in range(count)]


def make_toy_hybrid(folder: Path, *, num_steps: int = 70) -> Path:
    """Trains for a few seconds on one thread and saves in bf16."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=_VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        mtp_num_hidden_layers=0,
        mamba_ssm_dtype="float32",  # as released targets say; without it vLLM decides by the CPU
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    return _teach(Qwen3_5ForCausalLM(config), folder, num_steps)


def _teach(model: Any, folder: Path, num_steps: int) -> Path:
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.0)
    language = _Language()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = 6e-3 * min(1.0, (step + 1) / 10) * (1 - step / num_steps)
        tokens = torch.tensor([language.write(64) for _ in range(16)])
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.set_num_threads(threads)
    model.bfloat16().save_pretrained(folder)
    return folder


def write_rows(folder: Path, target: TargetFacts, *, count: int = 64) -> Path:
    """A data folder of texts in the language, each supervised from its ninth token."""
    folder.mkdir(parents=True)
    rows = [
        {
            "id": f"row-{number}",
            "category": "chat",
            "input_ids": list(text),
            "loss_spans": [[8, 64]],
            "finish_reason": "length",
        }
        for number, text in enumerate(make_texts(count, 64))
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = {
        "format": "paceline-data/1",
        "complete": True,
        "target": {
            "tokenizer_sha256": target.tokenizer_sha256,
            "chat_template_sha256": target.chat_template_sha256,
            "weights_fingerprint": target.weights_fingerprint,
        },
        "sampling": {},
        "thinking": "none",
        "prompts": {"name": "made", "sha256": "0", "num_prompts": count},
        "counts": {"rows": count},
        "rejected": [],
        "rows_sha256": sha256_file(folder / "rows.jsonl"),
    }
    (folder / "data.json").write_text(json.dumps(record))
    return folder
