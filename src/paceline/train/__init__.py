"""Training: a recipe and the target's own answers in, a draft folder out; and the replay."""

from paceline.train.entry import replay_draft, store_states, train_draft
from paceline.train.launch import current_rank, launch_training, world_size
from paceline.train.observe import DraftRun, open_draft_run
from paceline.train.places import require_free
from paceline.train.recipe import (
    DraftShape,
    Init,
    LossMix,
    Optim,
    Recipe,
    build_recipe,
    learning_rate,
    read_recipe,
    recipe_sha256,
)
from paceline.train.vocabulary import (
    Coverage,
    count_supervised,
    measure_coverage,
    special_tokens,
)

__all__ = [
    "Coverage",
    "DraftRun",
    "DraftShape",
    "Init",
    "LossMix",
    "Optim",
    "Recipe",
    "build_recipe",
    "count_supervised",
    "current_rank",
    "launch_training",
    "learning_rate",
    "measure_coverage",
    "open_draft_run",
    "read_recipe",
    "recipe_sha256",
    "replay_draft",
    "require_free",
    "special_tokens",
    "store_states",
    "train_draft",
    "world_size",
]
