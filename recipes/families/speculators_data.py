"""One pass of the target over answered rows, written both for Paceline and for speculators 0.9.0.

WORK/states                          ours (`paceline data states`)
WORK/speculators                     arrow rows, d2t-N.npy and t2d-N.npy of our vocabulary
WORK/speculators/hidden_states/      hs_N.safetensors a row
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.data import Row, read_rows
from paceline.target import TargetFacts
from paceline.train import special_tokens
from paceline.train.batches import plan_batches
from paceline.train.features import load_frozen_target
from paceline.train.stored import StatesRun, store_states
from paceline.train.vocabulary import choose_draft_tokens

__all__ = ["num_validated", "store_for_both"]


def store_for_both(
    work: Path,
    target: TargetFacts,
    *,
    layers: Sequence[int],
    vocab: int,
    max_length: int,
    device: str,
) -> dict[str, Any]:
    """WORK/data to WORK/states and WORK/speculators; goes on where it was stopped."""
    rows, home = read_rows(work / "data"), work / "speculators"
    began = time.monotonic()
    plan = store_states(
        work / "data",
        target=target,
        out_dir=work / "states",
        aux_layer_ids=layers,
        dtype="bfloat16",
        max_length=max_length,
        device=device,
        run=run_for_both(
            home / "hidden_states",
            target,
            {row.row_id: number for number, row in enumerate(rows)},
            layers=layers,
            max_length=max_length,
            device=device,
        ),
    )
    describe_rows(home, target, rows, vocab=vocab, max_length=max_length)
    seconds = time.monotonic() - began
    return {"gigabytes": plan.num_bytes / 1e9, "tokens": sum(plan.lengths), "seconds": seconds}


def run_for_both(
    folder: Path,
    target: TargetFacts,
    numbers: Mapping[str, int],
    *,
    layers: Sequence[int],
    max_length: int,
    device: str,
) -> StatesRun:
    """Yields a row's taps and last state for us, having written them for speculators, too.

    For speculators the last state comes before the final norm, which it applies itself.
    """
    place, before_norm = torch.device(device), list[Tensor]()
    frozen = load_frozen_target(target, device=place, dtype=torch.bfloat16)
    frozen.backbone.norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0]))
    folder.mkdir(parents=True, exist_ok=True)

    def run(rows: Sequence[Row]) -> Iterator[Tensor]:
        texts = [torch.tensor(row.input_ids[:max_length]) for row in rows]
        ours: list[Any] = [None] * len(rows)
        for together in plan_batches([*map(len, texts)], tokens_per_batch=16_384, seed=0):
            tokens_BT = pad_sequence([texts[n] for n in together], batch_first=True).to(place)
            before_norm.clear()
            found = frozen.features(tokens_BT, layers)
            ours_BTF = torch.cat([found.taps_BTF, found.final_BTD], -1).cpu()
            theirs_BTF = torch.cat([found.taps_BTF, before_norm[0]], -1).cpu()
            for at, n in enumerate(together):
                length = len(texts[n])
                ours[n] = ours_BTF[at, :length].clone()
                states = theirs_BTF[at, :length].view(length, len(layers) + 1, -1)
                path = folder / f"hs_{numbers[rows[n].row_id]}.safetensors"
                save_file({"hidden_states": states.contiguous(), "token_ids": texts[n]}, path)
        yield from ours

    return run


def describe_rows(
    home: Path, target: TargetFacts, rows: Sequence[Row], *, vocab: int, max_length: int
) -> None:
    """For speculators: the rows as an arrow folder, and the maps of our own vocabulary.

    It wants a part to validate on: the first rows again, so that it trains on all of them, too.
    """
    from datasets import Dataset

    table: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    again = rows[: num_validated(len(rows))]
    for number, row in enumerate([*rows, *again]):
        ids = list(row.input_ids[:max_length])
        mask = [any(a <= place < b for a, b in row.loss_spans) for place in range(len(ids))]
        for key, value in (("input_ids", ids), ("loss_mask", mask), ("seq_len", len(ids))):
            table[key].append(value)
        if number >= len(rows):
            copy = home / "hidden_states" / f"hs_{number}.safetensors"
            copy.unlink(missing_ok=True)
            os.link(copy.with_name(f"hs_{number - len(rows)}.safetensors"), copy)
    Dataset.from_dict(table).with_format("torch").save_to_disk(str(home))
    tokens = choose_draft_tokens(
        rows,
        draft_vocab_size=vocab,
        vocab_size=target.vocab_size,
        always=special_tokens(target),
    )
    ids_of = np.array(tokens)
    np.save(home / f"d2t-{vocab}.npy", ids_of - np.arange(len(ids_of)))
    known = np.zeros(target.vocab_size, dtype=bool)
    known[ids_of] = True
    np.save(home / f"t2d-{vocab}.npy", known)


def num_validated(num_rows: int) -> int:
    return max(1, num_rows // 200)
