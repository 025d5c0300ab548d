"""Recipes: strict reading, and a learning rate that is a function of the step (U29)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tiny import make_recipe

from paceline.errors import RecipeError
from paceline.train import learning_rate, read_recipe, recipe_sha256

TEXT = """
family = "eagle3"
seed = 3
[draft]
num_speculative_tokens = 2
[optim]
lr = 1e-3
tokens_per_batch = 512
max_length = 256
num_epochs = 2
"""


def test_reads_with_defaults(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(TEXT)
    recipe = read_recipe(path)
    assert recipe.seed == 3
    assert recipe.draft.draft_vocab_size is None
    assert recipe.loss.position_weights == (1.0, 0.8)
    assert recipe.init.from_ == "target"
    assert recipe.as_dict()["init"] == {"from": "target"}


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("seed = 3", "sead = 3", "sead"),
        ("seed = 3", "seed = 3.5", "seed"),
        ("lr = 1e-3", "lr = 1e-3\nlearning_rate = 1", "optim.learning_rate"),
        ("lr = 1e-3", "lr = -1.0", "optim.lr"),
        ("lr = 1e-3", 'lr = "fast"', "optim.lr"),
        ("lr = 1e-3", "", "optim.lr"),
        ("num_epochs = 2", "num_epochs = 2\nnum_steps = 3", "optim.num_epochs"),
        ("num_epochs = 2", "", "optim.num_epochs"),
        ("num_epochs = 2", "num_epochs = 0", "optim.num_epochs"),
        ("num_epochs = 2", 'num_epochs = 2\nschedule = "step"', "optim.schedule"),
        ("max_length = 256", "max_length = 1024", "optim.tokens_per_batch"),
        ("[draft]", "[draft]\naux_layer_ids = [3, 1]", "draft.aux_layer_ids"),
        ("[draft]", "[draft]\nnorm_before_residual = 1", "draft.norm_before_residual"),
        ("num_speculative_tokens = 2", "", "draft.num_speculative_tokens"),
        ("num_speculative_tokens = 2", "num_speculative_tokens = true", "draft.num_speculative"),
        ("[draft]", "[loss]\nposition_weights = [1.0]\n[draft]", "loss.position_weights"),
        ("[draft]", "[loss]\npace_alpha = 0.0\n[draft]", "loss.pace_alpha"),
        (
            "[draft]",
            "[loss]\npace_alpha = 0.5\nposition_weights = [1.0, 0.8]\n[draft]",
            "loss.pace_alpha",
        ),
        (
            "num_speculative_tokens = 2",
            "num_speculative_tokens = 1\n[loss]\npace_alpha = 0.5",
            "pace",
        ),
        ("[draft]", "[loss]\nhybrid_eta = 2.0\n[draft]", "loss.hybrid_eta"),
        ("[draft]", "[loss]\noverlap = -1.0\n[draft]", "loss.soft"),
        ('family = "eagle3"', 'family = "ngram"', "family"),
        ('family = "eagle3"', "", "family"),
    ],
)
def test_what_is_wrong_names_key_and_file(tmp_path: Path, old: str, new: str, key: str) -> None:
    path = tmp_path / "r.toml"
    assert old in TEXT
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(RecipeError) as caught:
        read_recipe(path)
    assert key in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["= 3", "family = 'eagle3'\nfamily = 'eagle3'"])
def test_broken_toml(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=r"r\.toml"):
        read_recipe(path)
    with pytest.raises(RecipeError, match="does not exist"):
        read_recipe(tmp_path / "other.toml")


def test_learning_rate_counts_steps_u29() -> None:
    optim = make_recipe().optim
    rates = [learning_rate(optim, step, num_steps=20) for step in range(1, 21)]
    assert rates[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])
    assert rates[9] == pytest.approx(6.667e-4, abs=1e-7)
    assert rates[19] == 0.0
    cosine = dataclasses.replace(optim, schedule="cosine")
    assert learning_rate(cosine, 20, num_steps=35) == pytest.approx(5e-4)
    flat = dataclasses.replace(optim, schedule="constant", warmup_steps=0)
    assert learning_rate(flat, 1, num_steps=20) == 1e-3


def test_hash_is_of_the_settings() -> None:
    recipe = make_recipe()
    assert recipe_sha256(recipe) == recipe_sha256(dataclasses.replace(recipe, path="other"))
    assert recipe_sha256(recipe) != recipe_sha256(make_recipe(seed=6))


_RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*/*.toml"))
_OTHERS = ("forecast", "adaptfm")  # plans of runs by shape, settings of systems


@pytest.mark.parametrize(
    "path",
    [path for path in _RECIPES if path.parent.name not in _OTHERS],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_recipes_of_this_repository_are_recipes(path: Path) -> None:
    assert read_recipe(path).path == str(path)


def test_norms_of_eagle3_are_written_only_where_they_are_set() -> None:
    """So that checkpoints and records from before they were there stay what they are."""
    plain, normed = make_recipe(), make_recipe(draft__norm_before_fc=True, draft__norm_output=True)
    assert "norm_before_fc" not in plain.as_dict()["draft"]
    assert normed.as_dict()["draft"]["norm_output"] is True


@pytest.mark.parametrize(
    "changes",
    [
        {"draft__norm_output": True, "draft__num_speculative_tokens": 1},
        {"draft__norm_output": True, "draft__parallel": True, "draft__mask_token_id": 63},
        {"family": "mtp", "draft__aux_layer_ids": None, "draft__norm_before_fc": True},
    ],
)
def test_a_norm_without_effect_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="has no effect"):
        make_recipe(**changes)
