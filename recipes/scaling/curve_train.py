"""Trains one run of a curve and makes a draft folder of every mark; goes on after a kill."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from curve_plan import Training

from paceline.draft import read_draft, write_draft
from paceline.records import atomic_folder, read_json
from paceline.target import TargetFacts
from paceline.train import train_draft

__all__ = ["train_marks"]


def train_marks(
    training: Training, target: TargetFacts, data_dir: Path, work: Path, *, device: str
) -> dict[int, Path]:
    """Draft folder of each mark, in steps. work: holds the run's checkpoint and the drafts."""
    drafts = {mark: work / f"{training.name}-at-{mark}" for mark in training.marks}
    last = drafts[training.marks[-1]]
    kept = {mark: path.with_name(path.name + ".state") for mark, path in drafts.items()}
    state = last.with_name(last.name + ".checkpoint")

    def keep(step: int) -> None:
        if step in kept and step != training.marks[-1] and not kept[step].exists():
            with atomic_folder(kept[step]) as folder:
                shutil.copytree(state, folder, dirs_exist_ok=True)

    def note(progress: Any) -> None:
        keep(progress.step)
        if progress.step % max(1, progress.num_steps // 16) == 0:
            first = progress.position_accuracy[0] or 0.0
            print(
                f"{training.name}: step {progress.step} of {progress.num_steps}, loss"
                f" {progress.loss:.3f}, first position {first:.3f}, {progress.tokens_per_s:,.0f}"
                " tokens/s",
                flush=True,
            )

    if not last.exists():
        if state.exists():  # killed between a checkpoint and its copy
            keep(int(read_json(state / "meta.json")["step"]))
        train_draft(
            training.recipe,
            target=target,
            data_dir=data_dir,
            out_dir=last,
            device=device,
            resume=state.exists(),
            on_progress=note,
        )
    for mark, path in drafts.items():
        if not path.exists():
            _export(training, target, data_dir, kept[mark], path)
    return drafts


def _export(
    training: Training, target: TargetFacts, data_dir: Path, state: Path, out: Path
) -> None:
    """A checkpoint as the draft folder that training would have written there."""
    import torch

    from paceline.train.checkpoint import read_checkpoint, restore_weights
    from paceline.train.families.eagle3_weights import export_tensors
    from paceline.train.features import load_frozen_target
    from paceline.train.setup import build_setup

    recipe = training.recipe
    setup = build_setup(recipe, target=target, data_dir=data_dir)
    checkpoint = read_checkpoint(state, run=setup.run)
    dtype = torch.bfloat16 if recipe.dtype == "bfloat16" else torch.float32
    module, taken = setup.build_module(load_frozen_target(target, device="cpu", dtype=dtype))
    restore_weights(checkpoint, module)
    write_draft(
        out,
        family=recipe.family,
        config=setup.config,
        tensors=export_tensors(module, torch.bfloat16),
        num_speculative_tokens=recipe.draft.num_speculative_tokens,
        metadata=setup.metadata(
            out, totals=checkpoint.totals, num_steps=checkpoint.step, taken=taken
        ),
    )
    read_draft(out)
