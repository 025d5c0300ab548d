"""From rows to what one optimiser step needs: batches, features, labels, weights; cached.

The target is frozen and a batch always holds the same rows, so its features are computed in the
first epoch and kept, up to `optim.feature_cache_bytes` a process; batches beyond that are computed
again. Cached or not, the values are bit-equal.

A batch is computed in parts (`batches.split_rows`), dealt round robin to the processes that train
together. Every process makes the same number of passes, so that none waits for another forever: one
that is left without a part computes a row whose weights are all 0.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.data import Row
from paceline.errors import DataError
from paceline.train.anchors import sample_anchors
from paceline.train.batches import Batch, build_batch, plan_batches, split_rows
from paceline.train.features import FrozenTarget, TextFeatures, likeliest
from paceline.train.packing import plan_slots
from paceline.train.ranks import Ranks
from paceline.train.recipe import Recipe
from paceline.train.stored import StoredStates

__all__ = ["BatchSource", "Prepared", "block_rows", "chunk_rows"]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One part of a batch on the training device; shapes and places as in `batches.Batch`.

    labels_M: draft ids of the target's likeliest token (0 where outside the draft vocabulary).
    weights_KM: position weights, 0 where nothing is supervised, summing to 1 over the whole batch,
    whichever processes hold its parts. num_tokens, coverage: of the whole batch too; coverage is
    the share of supervised tokens inside the draft vocabulary.
    """

    row_ids: tuple[str, ...]
    num_tokens: int
    tokens_BT: Tensor
    places_BT: Tensor | None
    bases_BN: Tensor
    first_base_R: tuple[int, ...]
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


def _lengths(slots: Sequence[Sequence[Row]]) -> list[int]:
    return [sum(len(row.input_ids) for row in slot) for slot in slots]


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
        ranks: Ranks,
        stored: StoredStates | None = None,
    ) -> None:
        """greedy_rows: the assistant's tokens are the target's likeliest ones already. stored:
        read its states there; None runs the target."""
        device = ranks.device
        self._frozen, self._recipe, self._ranks, self._device = frozen, recipe, ranks, device
        self._greedy_rows, self._stored = greedy_rows, stored
        self._aux_layer_ids = tuple(aux_layer_ids)
        plan = plan_slots([len(row.input_ids) for row in rows], recipe)
        self._slots = [[[rows[n] for n in slot] for slot in members] for members in plan]
        self._cache: dict[int, tuple[Prepared, ...]] = {}
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
        return len(self._slots)

    def row_ids(self, number: int) -> tuple[str, ...]:
        return tuple(row.row_id for slot in self._slots[number] for row in slot)

    @property
    def largest_part(self) -> int:
        """Padded tokens of the largest part that a process computes."""
        lengths = [_lengths(slots) for slots in self._slots]
        return max(
            max(sizes[i] for i in part) * len(part)
            for sizes in lengths
            for part in self._split(sizes)
        )

    def num_tokens(self, number: int) -> int:
        """Real tokens of batch `number`, padding left out."""
        return sum(_lengths(self._slots[number]))

    def get(self, number: int, *, epoch: int = 0) -> tuple[Prepared, ...]:
        """This process's parts of batch `number`, with the anchors of an epoch where few are asked
        for."""
        parts, few = self._get(number), self._recipe.optim.anchors_per_row
        if few is None:
            return parts
        seed = self._recipe.seed
        return tuple(
            sample_anchors(part, anchors_per_row=few, seed=seed, epoch=epoch) for part in parts
        )

    def _get(self, number: int) -> tuple[Prepared, ...]:
        """From the cache or computed."""
        found = self._cache.get(number)
        if found is None:
            found, fits = self._share(number, [self._prepare(b) for b in self._own(number)])
            if fits:
                self._free_bytes -= sum(part.num_bytes for part in found)
                self._cache[number] = found
        return found

    def _own(self, number: int) -> list[Batch]:
        slots = self._slots[number]
        parts = self._split(_lengths(slots))
        mine = [[slots[i] for i in part] for part in parts[self._ranks.rank :: self._ranks.world]]
        steps = self._recipe.num_unrolled
        batches = [build_batch(part, num_speculative_tokens=steps) for part in mine]
        passes = -(-len(parts) // self._ranks.world)
        idle = [
            build_batch(slots[:1], num_speculative_tokens=steps)
            for _ in range(passes - len(batches))
        ]
        for batch in idle:
            batch.valid_KM.fill_(False)
        return batches + idle

    def _split(self, lengths: list[int]) -> list[tuple[int, ...]]:
        optim = self._recipe.optim
        return split_rows(
            lengths,
            tokens_per_part=optim.tokens_per_part or optim.tokens_per_batch,
            num_ranks=self._ranks.world,
        )

    def _share(self, number: int, parts: list[Prepared]) -> tuple[tuple[Prepared, ...], bool]:
        """Weights divided by their sum over the batch; whether every process can keep its parts.

        The same answer everywhere: a target spread over processes is asked by all or by none.
        """
        sums = torch.zeros(4, dtype=torch.float64, device=self._device)
        for part in parts:
            sums[0] += part.weights_KM.sum()
            if part.num_tokens:
                sums[1] += part.coverage * len(part.labels_M)
                sums[2] += len(part.labels_M)
        sums[3] = float(sum(part.num_bytes for part in parts) > self._free_bytes)
        total, inside, supervised, full = self._ranks.sum(sums)
        if total == 0.0:
            raise DataError(
                "a batch has nothing to learn from: none of its supervised tokens is in the "
                f"draft's vocabulary (rows {', '.join(self.row_ids(number)[:8])})",
                fix="Raise draft.draft_vocab_size, or optim.tokens_per_batch.",
            )
        scale = torch.tensor(max(total, 1e-9), dtype=torch.float32, device=self._device)
        shared = tuple(
            dataclasses.replace(
                part,
                weights_KM=part.weights_KM / scale,
                num_tokens=self.num_tokens(number),
                coverage=inside / supervised,
            )
            for part in parts
        )
        return shared, not full

    def _run_target(self, batch: Batch, tokens_BT: Tensor) -> TextFeatures:
        """The target's features where the batch has its tokens; every row is read by itself.

        Packed rows are of every length, so those of like length are read together; by a target
        spread over processes, which all ask equally often, all at once.
        """
        if batch.places_BT is None:
            return self._frozen.features(tokens_BT, self._aux_layer_ids)
        lengths, size = batch.lengths_R, tokens_BT.shape
        together = [tuple(range(len(lengths)))]
        if not self._frozen.is_spread:
            together = plan_batches(lengths, tokens_per_batch=tokens_BT.numel(), seed=0)
        taps_BTF, final_BTD = torch.empty(0), torch.empty(0)
        for numbers in together:
            corners = [batch.corners_R[n] for n in numbers]
            texts = [
                tokens_BT[slot, first : first + lengths[n]]
                for n, (slot, first) in zip(numbers, corners, strict=True)
            ]
            found = self._frozen.features(
                pad_sequence(texts, batch_first=True), self._aux_layer_ids
            )
            if not taps_BTF.numel():
                taps_BTF = found.taps_BTF.new_zeros(*size, found.taps_BTF.shape[-1])
                final_BTD = found.final_BTD.new_zeros(*size, found.final_BTD.shape[-1])
            for place, (n, (slot, first)) in enumerate(zip(numbers, corners, strict=True)):
                here = slice(first, first + lengths[n])
                taps_BTF[slot, here] = found.taps_BTF[place, : lengths[n]]
                final_BTD[slot, here] = found.final_BTD[place, : lengths[n]]
        return TextFeatures(taps_BTF=taps_BTF, final_BTD=final_BTD)

    def _require_finite(self, features: TextFeatures, batch: Batch) -> None:
        """Raises DataError for the row whose states would make every loss of its batch NaN."""
        for states in (features.taps_BTF, features.final_BTD):
            if not bool(states.isfinite().all()):
                odd = tuple((~states.isfinite()).any(-1).nonzero()[0].tolist())
                row = bisect.bisect_right(batch.corners_R, odd) - 1
                raise DataError(
                    f"the target's own states of row '{batch.row_ids[row]}' are not finite numbers",
                    fix="Look at the row with `paceline data show`; if there are more, check the "
                    'target\'s weights (`paceline target show`) or set dtype = "float32".',
                )

    @torch.no_grad()
    def _prepare(self, batch: Batch) -> Prepared:
        device = self._device
        tokens_BT = batch.tokens_BT.to(device)
        if self._stored is None:
            features = self._run_target(batch, tokens_BT)
        else:
            features = self._stored.features(batch, device=device)
        slots_M, places_M = batch.slot_M.to(device), batch.place_M.to(device)
        final_MD = features.final_BTD[slots_M, places_M - 1]
        self._require_finite(features, batch)
        head = self._frozen.head_VD
        if self._greedy_rows:
            labels_M = tokens_BT[slots_M, places_M]
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
                passed_M &= known_BT[slots_M, (places_M - step).clamp(min=0)]
                valid_KM[step] &= passed_M
            labels_M = labels_M.clamp(min=0)
        position = torch.tensor(self._recipe.loss.position_weights, device=device)
        weights_KM = valid_KM * position[:, None]
        return Prepared(
            row_ids=batch.row_ids,
            num_tokens=batch.num_tokens if bool(batch.valid_KM.any()) else 0,
            tokens_BT=tokens_BT,
            places_BT=None if batch.places_BT is None else batch.places_BT.to(device),
            bases_BN=batch.bases_BN.to(device),
            first_base_R=batch.first_base_R,
            source_KM=batch.source_KM.to(device),
            taps_BTF=features.taps_BTF,
            final_MD=final_MD,
            labels_M=labels_M,
            weights_KM=weights_KM,
            coverage=coverage,
        )
