"""From rows to what one optimiser step needs: batches, features, labels, weights; cached.

The target is frozen and a batch always holds the same rows, so its features are computed in the
first epoch and kept, up to `optim.feature_cache_bytes`; batches beyond that are computed again.
Cached or not, the values are bit-equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.data import Row
from paceline.train.batches import Batch, build_batch, plan_batches
from paceline.train.features import FrozenTarget, likeliest
from paceline.train.recipe import Recipe

__all__ = ["BatchSource", "Prepared", "block_rows", "chunk_rows"]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One batch on the training device.

    labels_M: draft ids of the target's likeliest token (0 where outside the draft vocabulary).
    weights_KM: position weights, 0 where nothing is supervised, summing to 1.
    """

    row_ids: tuple[str, ...]
    num_tokens: int
    tokens_BT: Tensor
    bases_BN: Tensor
    source_KM: Tensor
    taps_BTF: Tensor
    final_MD: Tensor
    labels_M: Tensor
    weights_KM: Tensor
    coverage: float

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, Tensor))


def block_rows(vocab_size: int, num_steps: int, device: torch.device) -> int:
    """Tokens whose logits of all steps are one product: 128 MiB of bf16 on a CPU, 2 GiB on CUDA."""
    elements = 2**30 if device.type == "cuda" else 2**26
    return max(64, elements // (vocab_size * num_steps))


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """Rows of float32 logits at a time: 2 MiB on a CPU (its cache), 1 GiB on a GPU."""
    elements = 2**28 if device.type == "cuda" else 2**19
    return max(8, elements // vocab_size)


class BatchSource:
    """Prepared batches by number. State: the feature cache."""

    def __init__(
        self,
        rows: Sequence[Row],
        frozen: FrozenTarget,
        recipe: Recipe,
        *,
        aux_layer_ids: Sequence[int],
        draft_tokens: Sequence[int] | None,
        greedy_rows: bool,
        device: torch.device,
    ) -> None:
        """greedy_rows: the assistant's tokens are the target's likeliest ones already."""
        self._frozen, self._recipe, self._device = frozen, recipe, device
        self._greedy_rows = greedy_rows
        self._aux_layer_ids = tuple(aux_layer_ids)
        plan = plan_batches(
            [len(row.input_ids) for row in rows],
            tokens_per_batch=recipe.optim.tokens_per_batch,
            seed=recipe.seed,
        )
        self._rows = [[rows[number] for number in members] for members in plan]
        self._cache: dict[int, Prepared] = {}
        self._free_bytes = recipe.optim.feature_cache_bytes
        vocab_size = len(frozen.head_VD)
        self._draft_of_target: Tensor | None = None
        self.teacher_head_VD = frozen.head_VD
        if draft_tokens is not None:
            tokens = torch.tensor(draft_tokens, device=device)
            table = torch.full((vocab_size,), -1, dtype=torch.int64, device=device)
            table[tokens] = torch.arange(len(draft_tokens), device=device)
            self._draft_of_target = table
            self.teacher_head_VD = frozen.head_VD[tokens]

    def __len__(self) -> int:
        return len(self._rows)

    def row_ids(self, number: int) -> tuple[str, ...]:
        return tuple(row.row_id for row in self._rows[number])

    def get(self, number: int) -> Prepared:
        """Batch `number`, from the cache or computed."""
        found = self._cache.get(number)
        if found is None:
            steps = self._recipe.num_unrolled
            found = self._prepare(build_batch(self._rows[number], num_speculative_tokens=steps))
            if found.num_bytes <= self._free_bytes:
                self._free_bytes -= found.num_bytes
                self._cache[number] = found
        return found

    @torch.no_grad()
    def _prepare(self, batch: Batch) -> Prepared:
        device = self._device
        tokens_BT = batch.tokens_BT.to(device)
        features = self._frozen.features(tokens_BT, self._aux_layer_ids)
        rows_M, places_M = batch.row_M.to(device), batch.place_M.to(device)
        final_MD = features.final_BTD[rows_M, places_M - 1]
        head = self._frozen.head_VD
        if self._greedy_rows:
            labels_M = tokens_BT[rows_M, places_M]
        else:
            labels_M = likeliest(final_MD, head, chunk=block_rows(len(head), 1, device))
        valid_KM = batch.valid_KM.to(device)
        coverage = 1.0
        if self._draft_of_target is not None:
            labels_M = self._draft_of_target[labels_M]
            inside_M = labels_M >= 0
            coverage = float(inside_M.float().mean())
            valid_KM = valid_KM & inside_M
            # a base that had to pass through a token outside the vocabulary is never reached
            known_BT = self._draft_of_target[tokens_BT] >= 0
            passed_M = torch.ones_like(inside_M)
            for step in range(1, len(valid_KM)):
                passed_M &= known_BT[rows_M, (places_M - step).clamp(min=0)]
                valid_KM[step] &= passed_M
            labels_M = labels_M.clamp(min=0)
        position = torch.tensor(self._recipe.loss.position_weights, device=device)
        weights_KM = valid_KM * position[:, None]
        weights_KM = weights_KM / weights_KM.sum().clamp(min=1e-9)
        return Prepared(
            row_ids=batch.row_ids,
            num_tokens=batch.num_tokens,
            tokens_BT=tokens_BT,
            bases_BN=batch.bases_BN.to(device),
            source_KM=batch.source_KM.to(device),
            taps_BTF=features.taps_BTF,
            final_MD=final_MD,
            labels_M=labels_M,
            weights_KM=weights_KM,
            coverage=coverage,
        )
