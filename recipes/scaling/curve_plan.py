"""What a curve is made of: trainings that differ along one axis, and the marks that are served."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.data import Row
from paceline.errors import DataError, PlanError
from paceline.train import Recipe, read_recipe
from paceline.train.batches import cut_rows, plan_batches

__all__ = ["BUDGETS", "Budget", "Training", "list_trainings", "require_fresh_rows"]

HERE = Path(__file__).resolve().parent
_WIDTHS = (64, 160, 400, 1000, 2500)  # of the MLP; none is a target's own, which would be copied
_LAYERS = (1, 2, 3, 4)
_FAMILY = {"tokens": "eagle3", "layers": "medusa", "parameters": "eagle3"}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """marks: steps whose checkpoints the tokens axis serves; the last is the run's length.
    equal_steps: length of every training of the other axes. num_eval: held-out prompts.
    """

    num_prompts: int
    answer_tokens: int
    answer_concurrency: int
    tokens_per_batch: int
    marks: tuple[int, ...]
    equal_steps: int
    num_eval: int
    eval_tokens: int
    eval_concurrency: int


BUDGETS = {
    "tiny": Budget(
        num_prompts=48,
        answer_tokens=24,
        answer_concurrency=32,
        tokens_per_batch=256,
        marks=(1, 2, 4, 8),
        equal_steps=4,
        num_eval=8,
        eval_tokens=16,
        eval_concurrency=8,
    ),
    "short": Budget(
        num_prompts=1_600,
        answer_tokens=96,
        answer_concurrency=64,
        tokens_per_batch=1_024,
        marks=(8, 16, 32, 64, 128, 224),
        equal_steps=64,
        num_eval=48,
        eval_tokens=96,
        eval_concurrency=16,
    ),
    "small": Budget(
        num_prompts=4_000,
        answer_tokens=128,
        answer_concurrency=128,
        tokens_per_batch=1_024,
        marks=(8, 16, 32, 64, 128, 256, 512),
        equal_steps=80,
        num_eval=96,
        eval_tokens=128,
        eval_concurrency=16,
    ),
    "full": Budget(
        num_prompts=40_000,
        answer_tokens=256,
        answer_concurrency=512,
        tokens_per_batch=4_096,
        marks=(24, 48, 96, 192, 384, 768, 1_536),
        equal_steps=768,
        num_eval=96,
        eval_tokens=128,
        eval_concurrency=32,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run; size: its layers or its MLP's width, None along tokens."""

    name: str
    recipe: Recipe
    marks: tuple[int, ...]
    size: int | None


def list_trainings(
    target_name: str, axis: str, budget: Budget, *, family: str | None = None
) -> list[Training]:
    """Equal in everything but the axis. Raises PlanError where no recipe fits."""
    family = family or _FAMILY[axis]
    path = HERE / f"{target_name}-{family}.toml"
    if not path.is_file():
        known = sorted(p.stem for p in HERE.glob("*.toml"))
        raise PlanError(f"there is no recipe {path.name}", expected=f"one of {known}")
    if axis == "parameters" and family not in ("eagle3", "dflash"):
        raise PlanError(f"the width of a {family} draft is not varied", expected="eagle3, dflash")
    if axis == "layers" and family not in ("medusa", "dflash"):
        raise PlanError(f"a {family} draft has one layer", expected="medusa or dflash")
    marks = budget.marks if axis == "tokens" else (budget.equal_steps,)
    recipe = read_recipe(path)
    optim = dataclasses.replace(
        recipe.optim,
        num_steps=marks[-1],
        checkpoint_steps=marks[0] if axis == "tokens" else max(1, marks[0] // 8),
        warmup_steps=min(recipe.optim.warmup_steps, budget.marks[0]),
        tokens_per_batch=budget.tokens_per_batch,
        max_length=min(recipe.optim.max_length, budget.tokens_per_batch),
    )
    recipe = dataclasses.replace(recipe, optim=optim)
    if axis == "tokens":
        return [Training(name=f"{family}-tokens", recipe=recipe, marks=marks, size=None)]
    sizes, key = (_LAYERS, "num_layers") if axis == "layers" else (_WIDTHS, "intermediate_size")
    return [
        Training(
            name=f"{family}-{axis}-{size}",
            recipe=dataclasses.replace(
                recipe, draft=dataclasses.replace(recipe.draft, **{key: size})
            ),
            marks=marks,
            size=size,
        )
        for size in sizes
    ]


def require_fresh_rows(training: Training, rows: Sequence[Row]) -> None:
    """No row twice: a repeated one is not a new token. Raises DataError."""
    optim = training.recipe.optim
    kept, _ = cut_rows(rows, max_length=optim.max_length)
    lengths = [len(row.input_ids) for row in kept]
    batches = plan_batches(
        lengths, tokens_per_batch=optim.tokens_per_batch, seed=training.recipe.seed
    )
    if len(batches) < training.marks[-1]:
        raise DataError(
            f"{len(rows)} rows make {len(batches)} batches",
            expected=f"{training.marks[-1]}, so that no row is seen twice",
            fix="Answer more prompts, or take a smaller budget.",
        )
