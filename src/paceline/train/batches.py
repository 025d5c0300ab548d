"""Which rows train together, and which positions of them are supervised.

The shift (U24; pinned by a test). A row is a text x with assistant spans [start, end). The target
samples x[start] itself, so a draft is first asked for x[start+1]. A token p is supervised when
start + 1 <= p < end. Step j predicts it from base t = p - 2 - j, and counts only if the token the
draft begins with, x[t+1], is in the same span: step j then supervises p >= start + 1 + j.

Batches are padded on the right (causal attention never looks there) and made once: the same rows
sit together in every epoch, only the order of batches changes, as a pure function of seed and
epoch. So cached features and a resumed run see bit-equal inputs.

A batch is slots: each holds one row, or with `optim.packing` several, one after the other
(packing.py). Positions of a batch are places in its slots; places_BT says where in its own row.

Shapes: B slots, T tokens, N bases, K steps, M supervised tokens, R rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from paceline.data import Row
from paceline.errors import DataError

__all__ = ["Batch", "batch_order", "build_batch", "cut_rows", "plan_batches", "split_rows"]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch, on the CPU.

    lengths_R, corners_R: of each row its tokens, and (slot, place) of its first. bases_BN: every
    base any step starts from (padded with 0); first_base_R: where a row's begin in the flattened
    [B*N]. places_BT: of each token in its row, 0 in padding; None where a slot is a row.
    slot_M, place_M: where supervised token m stands. source_KM: index of (slot, base of step k) in
    the flattened [B*N]; valid_KM: step k supervises token m.
    """

    row_ids: tuple[str, ...]
    tokens_BT: Tensor
    lengths_R: tuple[int, ...]
    corners_R: tuple[tuple[int, int], ...]
    bases_BN: Tensor
    first_base_R: tuple[int, ...]
    places_BT: Tensor | None
    slot_M: Tensor
    place_M: Tensor
    source_KM: Tensor
    valid_KM: Tensor

    @property
    def num_tokens(self) -> int:
        """Real tokens, padding left out."""
        return sum(self.lengths_R)


def cut_rows(rows: Sequence[Row], *, max_length: int) -> tuple[list[Row], int]:
    """Rows cut to max_length, those left without a supervised token dropped; how many were cut.

    Raises DataError when nothing is left.
    """
    kept, num_cut = [], 0
    for row in rows:
        ids = row.input_ids[:max_length]
        spans = tuple((a, min(b, len(ids))) for a, b in row.loss_spans if a < len(ids))
        num_cut += len(ids) < len(row.input_ids)
        if any(end - start >= 2 and end > 2 for start, end in spans):
            kept.append(
                Row(
                    row_id=row.row_id,
                    category=row.category,
                    input_ids=ids,
                    loss_spans=spans,
                    finish_reason=row.finish_reason,
                )
            )
    if not kept:
        raise DataError(
            f"none of {len(rows)} rows has a supervised token",
            expected=f"assistant tokens within the first {max_length} tokens",
            fix="Answer more prompts, or raise optim.max_length.",
        )
    return kept, num_cut


def plan_batches(
    lengths: Sequence[int], *, tokens_per_batch: int, seed: int
) -> list[tuple[int, ...]]:
    """Row numbers that train together: rows of like length, padded size <= tokens_per_batch."""
    order = list(range(len(lengths)))
    random.Random(f"rows {seed}").shuffle(order)
    order.sort(key=lambda number: -(-lengths[number] // 16))
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    longest = 0
    for number in order:
        longest = max(longest, lengths[number])
        if current and longest * (len(current) + 1) > tokens_per_batch:
            batches.append(tuple(current))
            current, longest = [], lengths[number]
        current.append(number)
    batches.append(tuple(current))
    return batches


def batch_order(num_batches: int, *, seed: int, epoch: int) -> list[int]:
    """The order of one epoch; every batch once."""
    order = list(range(num_batches))
    random.Random(f"epoch {seed} {epoch}").shuffle(order)
    return order


def split_rows(
    lengths: Sequence[int], *, tokens_per_part: int, num_ranks: int
) -> list[tuple[int, ...]]:
    """Slots of one batch that are computed together: at least one part a process if there are
    slots enough, and as many more as keep each part's padded size within tokens_per_part.

    Slots of like length stand side by side, so parts are runs of even number.
    """
    for num_parts in range(min(num_ranks, len(lengths)), len(lengths) + 1):
        if num_parts > num_ranks and num_parts % num_ranks and num_parts < len(lengths):
            continue  # as many passes as the next full round
        ends = [round(len(lengths) * part / num_parts) for part in range(num_parts + 1)]
        parts = [tuple(range(a, b)) for a, b in pairwise(ends)]
        if all(max(lengths[i] for i in p) * len(p) <= tokens_per_part for p in parts):
            break
    return parts


def build_batch(slots: Sequence[Sequence[Row]], *, num_speculative_tokens: int) -> Batch:
    """Tensors of one batch; see Batch."""
    rows = [(number, row) for number, slot in enumerate(slots) for row in slot]
    length = max(sum(len(row.input_ids) for row in slot) for slot in slots)
    tokens, own_place = torch.zeros(2, len(slots), length, dtype=torch.int64)
    corners, ends = [], [0] * len(slots)
    bases: list[list[Tensor]] = [[] for _ in slots]
    columns, places, numbers, starts = [], [], [], []
    for number, row in rows:
        first, size = ends[number], len(row.input_ids)
        corners.append((number, first))
        ends[number] += size
        tokens[number, first : first + size] = torch.tensor(row.input_ids)
        own_place[number, first : first + size] = torch.arange(size)
        columns.append(sum(map(len, bases[number])))
        for start, end in row.loss_spans:
            bases[number].append(
                first + torch.arange(max(start - 1, 0), max(end - 2, start - 1, 0))
            )
            place = first + torch.arange(min(max(start + 1, 2), end), end)
            places.append(place)
            numbers.append(torch.full_like(place, number))
            starts.append(torch.full_like(place, first + start))
    width = max(sum(map(len, own)) for own in bases)
    bases_BN = torch.zeros(len(slots), width, dtype=torch.int64)
    at = torch.full((len(slots), length), -1, dtype=torch.int64)
    for number, own in enumerate(bases):
        here = torch.cat(own)
        bases_BN[number, : len(here)] = here
        at[number, here] = number * width + torch.arange(len(here))
    slot_M, place_M, start_M = torch.cat(numbers), torch.cat(places), torch.cat(starts)
    sources, valid = [], []
    for step in range(num_speculative_tokens):
        base = place_M - 2 - step
        holds = (base + 1 >= start_M) & (base >= 0)  # a row's last place is no base
        source = at[slot_M, base.clamp(min=0)]
        sources.append(source.clamp(min=0))
        valid.append(holds & (source >= 0))
    return Batch(
        row_ids=tuple(row.row_id for _, row in rows),
        tokens_BT=tokens,
        lengths_R=tuple(len(row.input_ids) for _, row in rows),
        corners_R=tuple(corners),
        bases_BN=bases_BN,
        first_base_R=tuple(
            number * width + column for (number, _), column in zip(corners, columns, strict=True)
        ),
        places_BT=own_place if len(rows) > len(slots) else None,
        slot_M=slot_M,
        place_M=place_M,
        source_KM=torch.stack(sources),
        valid_KM=torch.stack(valid),
    )
