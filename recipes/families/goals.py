"""Both targets: the recipe of each family, and how its drafts are asked and scored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["FAMILIES", "GOALS", "NOT_QUANTISED", "RECIPES", "Goal"]

RECIPES = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A target and how its drafts are asked and scored. baseline: None takes the rules' own."""

    rules: str
    thinking: str
    baseline: str | None
    recipes: dict[str, str]


GOALS = {
    "smollm2": Goal(
        rules="demo",
        thinking="none",
        baseline="smollm2-eagle3",
        recipes={
            "eagle3": "smollm2-eagle3/recipe.toml",
            "p-eagle": "smollm2/eagle3-parallel.toml",
            "medusa": "smollm2/medusa.toml",
            "draft_model": "smollm2/draft_model.toml",
            "dflash": "smollm2/dflash.toml",
        },
    ),
    "pocket": Goal(
        rules="pocket",
        thinking="off",
        baseline=None,
        recipes={
            "eagle3": "pocket/eagle3-slim.toml",
            "p-eagle": "pocket/eagle3-parallel.toml",
            "mtp": "pocket/mtp.toml",
            "medusa": "pocket/medusa.toml",
            "draft_model": "pocket/draft_model.toml",
            "dflash": "pocket/dflash.toml",
        },
    ),
}
FAMILIES = sorted({family for goal in GOALS.values() for family in goal.recipes})
NOT_QUANTISED = {
    "mtp": "an MTP head takes its target's quantisation in vLLM 0.31.0",
    "medusa": "Medusa's blocks are plain layers in vLLM 0.31.0",
}
