"""Several short rows in one slot of a batch, so that little of it is padding.

A slot is as wide as `optim.max_length`, and the rows in it stand one after the other: each counts
its places from 0, attends to itself alone, and its steps end where it ends (families/layers.py), so
loss and gradients are those of the same rows side by side. Only what the draft computes is packed:
the target reads each row by itself, since recurrent layers carry a state from row to row.

Rows go best fit first, longest first: into the slot that they leave the least room in. The slots
are then shuffled into batches, which so hold rows of every length, where unpacked batches hold rows
of like length. All of it is a pure function of the lengths and the seed.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence

from paceline.errors import RecipeError
from paceline.train.batches import plan_batches
from paceline.train.recipe import Recipe

__all__ = ["Slot", "pack_rows", "padding_share", "plan_slots"]

Slot = tuple[int, ...]


def pack_rows(lengths: Sequence[int], *, width: int, seed: int) -> list[Slot]:
    """Row numbers that share a slot, at most `width` tokens each; every row once."""
    order = list(range(len(lengths)))
    random.Random(f"pack {seed}").shuffle(order)
    order.sort(key=lambda number: -lengths[number])
    slots: list[list[int]] = []
    rooms: list[int] = []  # tokens left, ascending, each once
    having: dict[int, list[int]] = {}  # the slots with so many left
    for number in order:
        found = bisect.bisect_left(rooms, lengths[number])
        if found == len(rooms):
            room, slot = width, len(slots)
            slots.append([])
        else:
            room = rooms[found]
            slot = having[room].pop()
            if not having[room]:
                del rooms[found]
        slots[slot].append(number)
        left = room - lengths[number]
        if not having.setdefault(left, []):
            bisect.insort(rooms, left)
        having[left].append(slot)
    return [tuple(slot) for slot in slots]


def plan_slots(lengths: Sequence[int], recipe: Recipe) -> list[list[Slot]]:
    """Row numbers by slot by batch, each batch of at most `optim.tokens_per_batch` padded tokens;
    without packing a row has a slot of its own (`plan_batches`).

    Raises RecipeError where no two rows fit one slot.
    """
    optim, seed = recipe.optim, recipe.seed
    if not optim.packing:
        plan = plan_batches(lengths, tokens_per_batch=optim.tokens_per_batch, seed=seed)
        return [[(number,) for number in members] for members in plan]
    slots = pack_rows(lengths, width=optim.max_length, seed=seed)
    if len(slots) == len(lengths):
        shortest = sum(sorted(lengths)[:2])
        raise RecipeError(
            "key 'optim.packing' has no effect: no two rows fit one slot",
            where=recipe.path,
            expected=f"slots (optim.max_length, here {optim.max_length}) of at least {shortest} "
            "tokens, the two shortest rows",
            fix="Raise optim.max_length, or leave packing out.",
        )
    random.Random(f"slots {seed}").shuffle(slots)
    size = optim.tokens_per_batch // optim.max_length
    return [slots[start : start + size] for start in range(0, len(slots), size)]


def padding_share(lengths: Sequence[int], plan: Sequence[Sequence[Slot]]) -> float:
    """Padded tokens of all tokens that the batches of a plan hold."""
    held = 0
    for batch in plan:
        held += len(batch) * max(sum(lengths[number] for number in slot) for slot in batch)
    return 1.0 - sum(lengths) / held
