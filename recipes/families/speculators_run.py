"""Runs `speculators train` in its own environment, and writes one line a step: time and tokens.

    PYTHON speculators_run.py STEPS.jsonl [--on-cpu] OPTION …

On a GPU nothing of speculators 0.9.0 is changed; its own metrics give the tokens of a step.
--on-cpu lets it run where there is no accelerator, which it asks for in four places: for trials.
"""

from __future__ import annotations

import json
import logging
import sys
import time


class Steps(logging.Handler):
    """Lines of speculators.metrics that are about training steps."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        told = record.msg
        if not isinstance(told, dict) or not told.get("profile"):
            return
        profile = told["profile"]
        line = {
            "step": told["global_step"] + 1,
            "loss": told["train"].get("loss"),
            "tokens": round(profile["tokens_per_s"] * profile["step_ms"] / 1000.0),
            "ended": time.monotonic(),
        }
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def run_on_cpu() -> None:
    import torch
    from speculators.train import trainer

    place = torch.device("cpu")
    torch.accelerator.current_accelerator = lambda *args, **kwargs: place
    torch.accelerator.synchronize = lambda *args: None
    torch.accelerator.is_available = lambda: False
    trainer.get_local_rank = lambda: place


def main() -> None:
    path, *words = sys.argv[1:]
    if words[0] == "--on-cpu":
        words = words[1:]
        run_on_cpu()
    from speculators.train.cli import main as train
    from speculators.train.config import TrainConfig

    logger = logging.getLogger("speculators.metrics")
    logger.setLevel(logging.INFO)
    logger.addHandler(Steps(path))
    train(TrainConfig.resolve(words))


if __name__ == "__main__":
    main()
