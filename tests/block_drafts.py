"""Drafts that fill all their slots in one pass, trained on a handful of texts and served."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.draft import Draft
from paceline.endpoint import Answer, MemoryFacts, Request, Sampling
from paceline.records import sha256_file
from paceline.serve import Plan, start
from paceline.target import TargetFacts
from paceline.train import build_recipe, replay_draft, train_draft
from paceline.train.replay import Replay

__all__ = ["Served", "serve_and_replay", "train_on_texts"]

Text = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Served:
    """What an engine answered, what it held for the draft, and the replay of its steps."""

    answers: list[Answer]
    memory: MemoryFacts
    replay: Replay

    @property
    def trained_beyond_served(self) -> float:
        """How much more is accepted at the first position by the trainer's forward."""
        return self.replay.position_trained[0] - self.replay.position_served[0]


def train_on_texts(
    folder: Path,
    target: TargetFacts,
    texts: Sequence[Text],
    *,
    family: str,
    shape: dict[str, Any],
    num_steps: int,
    device: str = "cpu",
    **optim: Any,
) -> Draft:
    """A draft of a few float32 steps on (prompt ids, answer ids), beside its data."""
    data = folder / "data"
    data.mkdir(parents=True)
    rows = [
        {
            "id": f"row-{number}",
            "category": "toy",
            "input_ids": [*prompt, *answer],
            "loss_spans": [[len(prompt), len(prompt) + len(answer)]],
            "finish_reason": "length",
        }
        for number, (prompt, answer) in enumerate(texts)
    ]
    (data / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = {
        "format": "paceline-data/1",
        "complete": True,
        "target": {
            "tokenizer_sha256": target.tokenizer_sha256,
            "chat_template_sha256": target.chat_template_sha256,
            "weights_fingerprint": target.weights_fingerprint,
        },
        "sampling": {"temperature": 0.7},
        "thinking": "none",
        "prompts": {"name": "made", "sha256": "0", "num_prompts": len(rows)},
        "counts": {"rows": len(rows)},
        "rejected": [],
        "rows_sha256": sha256_file(data / "rows.jsonl"),
    }
    (data / "data.json").write_text(json.dumps(record))
    longest = max(len(row["input_ids"]) for row in rows)  # type: ignore[arg-type]
    recipe = build_recipe(
        {
            "family": family,
            "seed": 1,
            "dtype": "float32",
            "draft": {"aux_layer_ids": [1, 2, 3], **shape},
            "optim": {
                "lr": 3e-3,
                "warmup_steps": 5,
                "num_steps": num_steps,
                "tokens_per_batch": 2048,
                "max_length": longest,
                **optim,
            },
            "loss": {"soft": 1.0, "hard": 0.2},
        }
    )
    return train_draft(
        recipe, target=target, data_dir=data, out_dir=folder / "trained", device=device
    )


def serve_and_replay(
    plan: Plan,
    prompts: Sequence[Sequence[int]],
    *,
    log_path: Path,
    max_tokens: int = 64,
    context_tokens: int = 16384,
    device: str = "cpu",
) -> Served:
    """Greedy answers of a started engine, and the trainer's own forward over the steps it took."""
    assert plan.draft is not None
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    requests = [
        Request(request_id=str(number), prompt_ids=tuple(prompt), sampling=sampling)
        for number, prompt in enumerate(prompts)
    ]
    with start(plan, log_path=log_path) as endpoint:
        answers = endpoint.generate(requests, concurrency=4)
        memory = endpoint.memory(context_tokens=context_tokens)
    assert memory is not None
    texts = [(a.prompt_ids, a.output_ids, a.per_step_accepted or ()) for a in answers]
    return Served(
        answers=answers,
        memory=memory,
        replay=replay_draft(
            plan.draft, plan.target, texts, device=device, dtype=plan.engine_args["dtype"]
        ),
    )
