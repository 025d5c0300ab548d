"""What a run is before it starts: rows, sizes, vocabulary, config; and its record afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data import Row, check_states, read_data_record, read_rows
from paceline.draft import read_draft, resolve_draft
from paceline.errors import RecipeError
from paceline.records import build_provenance, sha256_file
from paceline.target import TargetFacts
from paceline.train.batches import cut_rows
from paceline.train.families.eagle3_weights import load_draft_tensors, start_from_draft
from paceline.train.families.module import DraftModule
from paceline.train.families.table import Start, get_family, start_module
from paceline.train.features import FrozenTarget
from paceline.train.packing import plan_slots
from paceline.train.recipe import INIT_WORDS, Recipe, recipe_sha256
from paceline.train.stored import StoredStates
from paceline.train.vetting import (
    require_covered,
    require_described,
    require_ended,
    require_known_tokens,
    require_one_template,
    require_same_target,
)
from paceline.train.vocabulary import choose_draft_tokens, special_tokens

__all__ = ["Setup", "build_setup", "special_tokens", "with_num_steps"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything fixed before the first step.

    run: what a checkpoint must share to be gone on from. draft_tokens: target ids of a reduced
    vocabulary, ascending, or None. num_cut: rows longer than max_length. states: read in place of
    running the target; None runs it.
    """

    recipe: Recipe
    target: TargetFacts
    rows: tuple[Row, ...]
    num_cut: int
    data_record: dict[str, Any]
    data_sha256: str
    aux_layer_ids: tuple[int, ...]
    draft_tokens: tuple[int, ...] | None
    config: dict[str, Any]
    started_from: dict[str, Any]
    states: StoredStates | None = None

    @property
    def greedy_rows(self) -> bool:
        """The record says that every answer was taken greedily."""
        sampling = self.data_record.get("sampling")
        return isinstance(sampling, Mapping) and sampling.get("temperature") == 0

    @property
    def run(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.as_dict(),
            "data": {"sha256": self.data_sha256, "num_rows": len(self.rows)},
            "target": _fingerprints(self.target),
            "started_from": self.started_from,
            **({"states": self.states.plan.as_dict()} if self.states else {}),
        }

    def build_module(self, frozen: FrozenTarget) -> tuple[DraftModule, list[str]]:
        """The module with its first weights, and the names of those taken from elsewhere."""
        source, family = self.recipe.init.from_, get_family(self.recipe.family)
        module = family.build_module(self.config)
        start = Start(
            recipe=self.recipe,
            target=self.target,
            frozen=frozen,
            draft_tokens=self.draft_tokens,
        )
        taken = start_module(family, module, start)
        if source in INIT_WORDS:
            return module, taken
        start_from_draft(module, read_draft(resolve_draft(source)), frozen, self.config)
        return module, sorted(module.state_dict())

    def metadata(
        self, out_dir: Path, *, totals: Mapping[str, Any], num_steps: int, taken: list[str]
    ) -> dict[str, Any]:
        """metadata.json: how this draft came to be."""
        recipe = self.recipe
        coverage = totals["coverage"] / totals["batches"] if totals["batches"] else None
        return {
            "name": out_dir.name,
            "trained": {
                "target": self.target.name,
                **_fingerprints(self.target),
                "thinking": self.data_record.get("thinking"),
                "data": {
                    "sha256": self.data_sha256,
                    "num_rows": len(self.rows),
                    "num_rows_cut": self.num_cut,
                    "prompt_set": self.data_record.get("prompts"),
                    "sampling": self.data_record.get("sampling"),
                },
                "trained_length": max(len(row.input_ids) for row in self.rows),
                **_rotary_dim(self.config),
                "recipe": recipe.as_dict(),
                "recipe_sha256": recipe_sha256(recipe),
                "seed": recipe.seed,
                "started_from": {**self.started_from, "tensors": taken},
                "num_steps": num_steps,
                "tokens_seen": totals["tokens"],
                "minutes": round(totals["seconds"] / 60.0, 2),
                "draft_vocab_coverage": coverage,
                "provenance": build_provenance(seed=recipe.seed, inputs={"data": self.data_sha256}),
            },
        }


def build_setup(
    recipe: Recipe,
    *,
    target: TargetFacts,
    data_dir: str | Path,
    states_dir: str | Path | None = None,
) -> Setup:
    """Reads the data, checks that it is this target's, fixes sizes and vocabulary."""
    data_dir = Path(data_dir)
    record = read_data_record(data_dir)
    require_same_target(record, target, data_dir)
    given = read_rows(data_dir)
    require_described(given, record, data_dir)
    require_ended(given, target, data_dir)
    rows, num_cut = cut_rows(given, max_length=recipe.optim.max_length)
    require_known_tokens(rows, target, data_dir)
    require_one_template(given, record, target, data_dir)
    _require_unused(recipe, rows)
    if recipe.optim.packing:
        plan_slots([len(row.input_ids) for row in rows], recipe)  # raises where it has no effect
    fixed: dict[str, Any] = {
        "recipe": recipe,
        "target": target,
        "rows": tuple(rows),
        "num_cut": num_cut,
        "data_record": record,
        "data_sha256": sha256_file(data_dir / "rows.jsonl"),
        "started_from": _started_from(recipe, target),
    }
    family = get_family(recipe.family)
    config = family.build_config(recipe, target)
    draft_tokens = None
    size = config.get("draft_vocab_size", target.vocab_size)
    if size != target.vocab_size:
        draft_tokens = _inherit_tokens(recipe, size, target, rows) or tuple(
            choose_draft_tokens(
                rows,
                draft_vocab_size=size,
                vocab_size=target.vocab_size,
                always=special_tokens(target),
            )
        )
    aux_layer_ids = family.tapped_layers(config)
    states = None
    if states_dir is not None:
        plan = check_states(
            states_dir,
            given,
            target,
            rows_sha256=fixed["data_sha256"],
            aux_layer_ids=aux_layer_ids,
            max_length=recipe.optim.max_length,
        )
        if plan.dtype != recipe.dtype:
            raise RecipeError(
                f"key 'dtype' is {recipe.dtype} and the states are {plan.dtype}",
                where=recipe.path,
                expected="the same",
            )
        states = StoredStates(states_dir, plan, given, aux_layer_ids=aux_layer_ids)
    return Setup(
        **fixed,
        states=states,
        aux_layer_ids=aux_layer_ids,
        draft_tokens=draft_tokens,
        config=config,
    )


def _inherit_tokens(
    recipe: Recipe, size: int, target: TargetFacts, rows: list[Row]
) -> tuple[int, ...] | None:
    """The vocabulary of the draft to start from: its output matrix stands in that order."""
    if recipe.init.from_ in INIT_WORDS:
        return None
    d2t = load_draft_tensors(read_draft(resolve_draft(recipe.init.from_))).get("d2t")
    if d2t is None or len(d2t) != size:  # another size is refused when its weights are copied
        return None
    tokens = tuple(number + offset for number, offset in enumerate(d2t.tolist()))
    if list(tokens) != sorted({t for t in tokens if 0 <= t < target.vocab_size}):
        raise RecipeError(
            "tensor 'd2t' of the draft to start from is no map into this target's vocabulary",
            where=recipe.init.from_,
            expected=f"ascending target ids from 0 to {target.vocab_size - 1}",
            fix="Start from a draft of this target, or from the target.",
        )
    require_covered(tokens, rows, recipe.init.from_)
    return tokens


def _rotary_dim(config: Mapping[str, Any]) -> dict[str, int]:
    """Nothing for a family without attention."""
    if "head_dim" not in config:
        return {}
    share = float(config["rope_parameters"].get("partial_rotary_factor", 1.0))
    return {"trained_rotary_dim": int(config["head_dim"] * share)}


def _fingerprints(target: TargetFacts) -> dict[str, Any]:
    names = ("weights_fingerprint", "tokenizer_sha256", "chat_template_sha256")
    return {name: getattr(target, name) for name in names}


def _started_from(recipe: Recipe, target: TargetFacts) -> dict[str, Any]:
    source = recipe.init.from_
    if source == "random":
        return {"from": "random", "sha256": None}
    if source in INIT_WORDS:
        return {"from": source, "sha256": target.weights_fingerprint}
    draft = read_draft(resolve_draft(source))
    if draft.family != recipe.family:
        raise RecipeError(
            f"key 'init.from' names a draft of family {draft.family}",
            where=recipe.path,
            expected=f"family {recipe.family}",
        )
    return {"from": source, "sha256": draft.sha256}


def _require_unused(recipe: Recipe, rows: list[Row]) -> None:
    """The mask token must not be read for a word, nor a word for a slot still to come."""
    token = recipe.draft.mask_token_id
    holding = [row.row_id for row in rows if token is not None and token in row.input_ids]
    if holding:
        raise RecipeError(
            f"key 'draft.mask_token_id' is {token}, which stands in {len(holding)} rows, such as "
            f"'{holding[0]}'",
            where=recipe.path,
            expected="a token that no text holds",
            fix="Take a reserved token of the tokenizer that is not in use.",
        )


def with_num_steps(recipe: Recipe, num_steps: int) -> Recipe:
    """The same recipe with a length in steps in place of epochs."""
    optim = dataclasses.replace(recipe.optim, num_steps=num_steps, num_epochs=None)
    return dataclasses.replace(recipe, optim=optim)
