"""Runs `speculators train` in its own environment, and writes one line a step: time and tokens.

    PYTHON speculators_run.py STEPS.jsonl [--on-cpu] OPTION …

Its own metrics give the tokens of a step; --max-steps is made to end the run at that step.
--on-cpu lets it run where there is no accelerator, which it asks for in five places: for trials.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any


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
    torch.cpu.empty_cache = lambda: None
    trainer.get_local_rank = lambda: place


def main() -> None:
    path, *words = sys.argv[1:]
    if words[0] == "--on-cpu":
        words = words[1:]
        run_on_cpu()
    from speculators.train import cli, trainer
    from speculators.train.config import TrainConfig

    set_up, run_training = cli.setup_metric_logger, trainer.Trainer.run_training

    def set_up_and_listen(**settings: Any) -> None:  # setting up removes what listens before
        set_up(**settings)
        logger = logging.getLogger("speculators.metrics")
        logger.setLevel(logging.INFO)
        logger.addHandler(Steps(path))

    def run_to_the_step(self: Any) -> Any:
        """--max-steps ends an epoch, and each later one after a step: so no more than it takes."""
        num_epochs = -(-self.config.max_steps // len(self.train_loader))
        self.config = self.config._replace(num_epochs=num_epochs)
        return run_training(self)

    cli.setup_metric_logger = set_up_and_listen
    trainer.Trainer.run_training = run_to_the_step
    cli.main(TrainConfig.resolve(words))


if __name__ == "__main__":
    main()
