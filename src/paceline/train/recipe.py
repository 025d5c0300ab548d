"""A recipe: everything a training run does that the data and the target do not fix.

    family = "eagle3"
    seed = 0
    dtype = "bfloat16"              # arithmetic; parameters and optimiser stay float32

    [init]
    from = "target"                 # "target", "random", or a draft folder

    [draft]
    draft_vocab_size = 8192         # left out: the target's whole vocabulary, its own head shared
    intermediate_size = 1536        # left out: the target's; so are the three below
    num_attention_heads = 9
    num_key_value_heads = 3         # fewer or narrower ones: a smaller cache
    head_dim = 64
    aux_layer_ids = [2, 15, 27]     # i = the residual stream after i target layers
    num_speculative_tokens = 3

    [optim]
    lr = 1e-3
    warmup_steps = 20
    schedule = "cosine"             # "cosine", "linear", "constant"; counted in steps
    num_epochs = 4                  # or num_steps, not both
    tokens_per_batch = 2048         # of one step, over all processes
    tokens_per_part = 1024          # left out: a step is computed in one part a process
    anchors_per_row = 64            # left out: every step starts from every place of a row
    packing = false                 # true: short rows share slots of max_length tokens
    max_length = 512

    [loss]
    soft = 1.0                      # KL to the target's distribution
    hard = 0.1                      # cross-entropy to the target's likeliest token
    variation = 0.0                 # total variation: what sampled serving rejects
    reverse = 0.0                   # KL the other way round
    overlap = 0.0                   # minus the logarithm of what sampled serving accepts
    hybrid = 0.0                    # KL that turns into total variation as the two come nearer
    hybrid_eta = 3.0                # how soon
    position_weights = [1.0, 0.8, 0.64]     # or pace_alpha = 0.5: they follow the draft (D-PACE)

A key this file does not know is an error: it would have had no effect.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import RecipeError
from paceline.train.recipe_checks import EAGLE3_NORMS, INIT_WORDS, check_recipe, wrong_key
from paceline.train.schedule import learning_rate

__all__ = [
    "INIT_WORDS",
    "DraftShape",
    "Init",
    "LossMix",
    "Optim",
    "Recipe",
    "build_recipe",
    "learning_rate",
    "read_recipe",
    "recipe_sha256",
]


@dataclass(frozen=True, kw_only=True)
class Init:
    """Where the first weights come from.

    from_: "target" (norms and the last layer's attention and MLP of the target, fresh `fc`),
    "random", or the path of a draft folder of the same shape; for a draft model "target" takes
    embeddings, output matrix and final norm, "target-layers" some layers too. layers: which ones;
    spread evenly, the first and the last among them, if left out.
    """

    from_: str = "target"
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """The draft's own sizes; None takes the target's.

    num_layers: Medusa's residual layers a head, a draft model's or DFlash's layers; 1. one_head:
    Medusa's heads end in one output matrix. trains_head: that matrix is trained too, not kept as
    the target's. own_head: a draft model has an output matrix beside its embeddings. parallel: an
    EAGLE-3 draft fills all K slots in one pass (P-EAGLE). norm_before_fc, fc_norm: its taps are
    normed together, or each. norm_output: its later steps read its normed output. mask_token_id:
    the token in slots still to come. causal: a slot of a DFlash block does not see later ones.
    sliding_window: places that a DFlash layer sees.
    """

    num_speculative_tokens: int
    draft_vocab_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    num_layers: int | None = None
    one_head: bool = True
    trains_head: bool = True
    hidden_size: int | None = None
    own_head: bool | None = None
    parallel: bool = False
    mask_token_id: int | None = None
    causal: bool = False
    sliding_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Optim:
    """AdamW and the length of the run. Tokens are padded tokens of whole rows.

    tokens_per_batch: of one step, however many processes share it. tokens_per_part: what one
    process computes at a time, so what bounds its memory. anchors_per_row: bases of each row that a
    step runs, others each epoch (anchors.py); None runs all. packing: several rows share a slot of
    max_length tokens (packing.py).
    """

    lr: float
    tokens_per_batch: int
    max_length: int
    num_epochs: int | None = None
    num_steps: int | None = None
    tokens_per_part: int | None = None
    warmup_steps: int = 0
    schedule: str = "cosine"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    anchors_per_row: int | None = None
    packing: bool = False
    checkpoint_steps: int = 100
    feature_cache_bytes: int = 2 * 1024**3


@dataclass(frozen=True, kw_only=True)
class LossMix:
    """Weights of the terms (losses.py), and of the unroll's steps.

    position_weights: one a step. pace_alpha: the steps' weights follow the draft instead (D-PACE,
    pacing.py), smoothed by this much.
    """

    soft: float = 1.0
    hard: float = 0.1
    variation: float = 0.0
    reverse: float = 0.0
    overlap: float = 0.0
    hybrid: float = 0.0
    hybrid_eta: float = 3.0
    pace_alpha: float | None = None
    position_weights: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training recipe, complete. `path` is where it was read, for messages only."""

    family: str
    draft: DraftShape
    optim: Optim
    init: Init = field(default_factory=Init)
    loss: LossMix = field(default_factory=LossMix)
    seed: int = 0
    dtype: str = "bfloat16"
    path: str = ""

    @property
    def num_unrolled(self) -> int:
        """Steps of training from one base: K; 1 for a draft model, whose steps are all alike."""
        return 1 if self.family == "draft_model" else self.draft.num_speculative_tokens

    def as_dict(self) -> dict[str, Any]:
        """The settings alone, as JSON types; equal for equal runs wherever the file lay."""
        value = dataclasses.asdict(self)
        del value["path"]
        value["init"]["from"] = value["init"].pop("from_")
        later = [("optim", "packing"), *(("draft", name) for name in EAGLE3_NORMS)]
        for table, key in (("init", "layers"), ("loss", "pace_alpha"), *later):
            if value[table][key] in (None, False):  # only where they are set
                del value[table][key]
        result: dict[str, Any] = json.loads(json.dumps(value))
        return result


_TABLES: dict[str, type] = {"init": Init, "draft": DraftShape, "optim": Optim, "loss": LossMix}
_TOP = ("family", "seed", "dtype")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "from_": str,
    "schedule": str,
    "lr": (int, float),
    "weight_decay": (int, float),
    "grad_clip": (int, float),
    "soft": (int, float),
    "hard": (int, float),
    "variation": (int, float),
    "reverse": (int, float),
    "overlap": (int, float),
    "hybrid": (int, float),
    "hybrid_eta": (int, float),
    "pace_alpha": (int, float),
    "betas": list,
    "position_weights": list,
    "aux_layer_ids": list,
    "norm_before_residual": bool,
    "norm_before_fc": bool,
    "fc_norm": bool,
    "norm_output": bool,
    "one_head": bool,
    "trains_head": bool,
    "own_head": bool,
    "parallel": bool,
    "packing": bool,
    "causal": bool,
    "layers": list,
}


def read_recipe(path: str | Path) -> Recipe:
    """Reads a recipe file. Raises RecipeError naming the key and the file."""
    path = Path(path)
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError("the recipe does not exist", where=str(path)) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise RecipeError(f"cannot be read: {problem}", where=str(path)) from None
    return build_recipe(value, where=str(path))


def build_recipe(value: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
    """Builds a Recipe from parsed TOML and checks it. Raises RecipeError."""
    for key in value:
        if key not in _TOP and key not in _TABLES:
            raise wrong_key(where, key, "is not a recipe key", f"one of {[*_TOP, *_TABLES]}")
    tables = {name: _table(value, name, where) for name in _TABLES}
    top = {key: value[key] for key in _TOP if key in value}
    if not isinstance(top.get("family"), str):
        raise wrong_key(where, "family", "is missing", 'a family, such as "eagle3"')
    if type(top.get("seed", 0)) is not int:
        raise wrong_key(where, "seed", f"is {top['seed']!r}", "a whole number")
    recipe = Recipe(**top, **tables, path=where)
    check_recipe(recipe, where)
    if not recipe.loss.position_weights:
        decay = 0.8 if recipe.loss.pace_alpha is None else 1.0
        weights = tuple(decay**i for i in range(recipe.num_unrolled))
        mix = dataclasses.replace(recipe.loss, position_weights=weights)
        recipe = dataclasses.replace(recipe, loss=mix)
    return recipe


def _table(value: Mapping[str, Any], name: str, where: str) -> Any:
    given = value.get(name, {})
    if not isinstance(given, Mapping):
        raise wrong_key(where, name, f"is {given!r}", f"a table [{name}]")
    kind = _TABLES[name]
    known = {f.name.rstrip("_"): f for f in dataclasses.fields(kind)}
    settings: dict[str, Any] = {}
    for key, setting in given.items():
        if key not in known:
            raise wrong_key(
                where, f"{name}.{key}", "is not a recipe key", f"one of {sorted(known)}"
            )
        wanted = _TYPES.get(known[key].name, int)
        if isinstance(setting, bool) != (wanted is bool) or not isinstance(setting, wanted):
            raise wrong_key(where, f"{name}.{key}", f"is {setting!r}", _describe(wanted))
        settings[known[key].name] = tuple(setting) if isinstance(setting, list) else setting
    for key, entry in known.items():
        required = (
            entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        )
        if required and entry.name not in settings:
            raise wrong_key(where, f"{name}.{key}", "is missing", "a value")
    return kind(**settings)


def _describe(wanted: type | tuple[type, ...]) -> str:
    names = {int: "a whole number", str: "a string", list: "a list", bool: "true or false"}
    return "a number" if isinstance(wanted, tuple) else names[wanted]


def recipe_sha256(recipe: Recipe) -> str:
    """Hash of the settings, not of the file's spacing."""
    text = json.dumps(recipe.as_dict(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
