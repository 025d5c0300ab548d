"""Trained acceptance equals served acceptance: walking the very steps that a server took.

A server answers a prompt of P tokens. The first output token comes from prefill, so the first step
drafts from base t = P - 1; a step that accepted a tokens moves the base on by a + 1. At each base
visited the trainer's own forward drafts K tokens greedily, from the target's features of the text
as delivered, and the tokens that equal the delivered ones are counted.

Averages over all positions say something else: visited bases are a biased sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.acceptance import accept_greedy
from paceline.draft import Draft
from paceline.errors import DraftError, ResultError
from paceline.target import TargetFacts
from paceline.train.families.eagle3_weights import load_draft_tensors
from paceline.train.families.module import DraftModule, TappedDraft
from paceline.train.families.table import FAMILIES
from paceline.train.features import FrozenTarget, load_frozen_target

__all__ = [
    "Replay",
    "ReplayText",
    "load_draft_module",
    "propose",
    "replay_draft",
    "simulate_draft",
    "walk_bases",
    "walk_greedy",
]

ReplayText = tuple[Sequence[int], Sequence[int], Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Served beside trained, over the steps whose drafted tokens the text can judge.

    num_steps: such steps (a step that delivered nothing past its own token is left out).
    num_agree: both accepted the same number, counting only tokens that were delivered, so the last
    step, cut by a stop or the limit, is compared as far as it goes. gaps: for each step that
    differs, how far apart the draft's own logits hold the two tokens at the first difference
    (float32; infinite for a token outside its vocabulary). Rounding alone flips small gaps: bf16
    logits between 16 and 32 lie 0.125 apart. position_served[i] and position_trained[i]: share of
    steps with the first i+1 tokens accepted. proposed: per text, per step, the K target ids that
    the trained draft proposes.
    """

    num_steps: int
    num_agree: int
    gaps: tuple[float, ...]
    position_served: tuple[float, ...]
    position_trained: tuple[float, ...]
    proposed: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def share(self) -> float | None:
        return self.num_agree / self.num_steps if self.num_steps else None

    @property
    def position_1_served(self) -> float | None:
        return self.position_served[0] if self.position_served else None

    @property
    def position_1_trained(self) -> float | None:
        return self.position_trained[0] if self.position_trained else None


def walk_bases(num_prompt: int, num_output: int, accepted: Sequence[int]) -> list[int]:
    """Base position of each step. Raises ResultError when the steps outrun the text."""
    bases, base = [], num_prompt - 1
    for number, took in enumerate(accepted):
        if base + 1 >= num_prompt + num_output:
            raise ResultError(
                f"step {number} of {len(accepted)} starts after the last delivered token",
                expected="accepted counts of this very answer",
            )
        bases.append(base)
        base += took + 1
    return bases


def load_draft_module(draft: Draft) -> DraftModule:
    """The module of a draft folder, weights as stored. Raises DraftError for another family."""
    if draft.family not in FAMILIES:
        raise DraftError(
            f"a draft of family '{draft.family}' cannot be replayed",
            where=str(draft.path),
            expected=f"one of {list(FAMILIES)}",
        )
    module = FAMILIES[draft.family].build_module(draft.config)
    tensors = load_draft_tensors(draft)
    if isinstance(module, TappedDraft):
        module.adopt_ends(tensors)
    odd = sorted(set(tensors) ^ set(module.state_dict()))
    if odd:
        what = "has no place for" if odd[0] in tensors else "needs"
        raise DraftError(
            f"the draft cannot be replayed: Paceline's own forward {what} tensor '{odd[0]}'",
            where=str(draft.path),
            expected="a draft of a shape that Paceline trains",
        )
    module.load_state_dict(tensors)
    return module.eval().requires_grad_(False)


def _tapped_layers(draft: Draft) -> tuple[int, ...]:
    """Empty for a family that reads the target's final state."""
    return FAMILIES[draft.family].tapped_layers(draft.config)


@torch.no_grad()
def propose(
    module: DraftModule,
    frozen: FrozenTarget,
    *,
    ids: Sequence[int],
    bases: Sequence[int],
    aux_layer_ids: Sequence[int],
    num_speculative_tokens: int,
) -> tuple[list[tuple[int, ...]], Tensor]:
    """K greedy draft tokens from each base of one text, each base on its own proposals.

    With them the states [N, K, D] that the head read them from.
    """
    device = frozen.embedding_VD.device
    tokens_BT = torch.tensor([list(ids)], device=device)
    taps_BTF = frozen.features(tokens_BT, aux_layer_ids).taps_BTF
    states, proposed = module.unroll(
        tokens_BT,
        taps_BTF,
        torch.tensor([list(bases)], device=device),
        frozen.embedding_VD,
        num_steps=num_speculative_tokens,
        head_VD=_head(module, frozen, 0),
    )
    rows = torch.stack([step[0] for step in proposed], dim=-1).tolist()
    return [tuple(row) for row in rows], torch.stack([step[0] for step in states], dim=1)


def _head(module: DraftModule, frozen: FrozenTarget, step: int) -> Tensor:
    heads = module.output_heads(frozen.head_VD)
    return heads[step if len(heads) > 1 else 0]


def measure_gap(
    module: DraftModule,
    frozen: FrozenTarget,
    state_D: Tensor,
    *,
    proposed: int,
    other: int | None,
    step: int = 0,
) -> float:
    """Logits between the token that a step proposed and another; None: its second choice."""
    logits_V = F.linear(state_D.float(), _head(module, frozen, step).float())
    ids_V = torch.arange(len(logits_V), device=logits_V.device)
    ids_V = module.to_target_ids(ids_V)
    mine, rest = logits_V[ids_V == proposed], logits_V[ids_V != proposed]
    theirs = rest.max()[None] if other is None else logits_V[ids_V == other]
    return float(mine[0] - theirs[0]) if len(theirs) else math.inf


def replay_draft(
    draft: Draft,
    target: TargetFacts,
    texts: Sequence[ReplayText],
    *,
    num_speculative_tokens: int | None = None,
    device: str = "cpu",
    dtype: str = "bfloat16",
) -> Replay:
    """Replays served answers: (prompt_ids, output_ids, per_step_accepted) each.

    num_speculative_tokens: drafted on every step; None is the draft's own K. dtype: arithmetic of
    target and draft.
    Raises DraftError, TargetError, ResultError.
    """
    module = load_draft_module(draft).to(device)
    frozen = load_frozen_target(
        target, device=device, dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32
    )
    width = num_speculative_tokens or draft.num_speculative_tokens
    aux_layer_ids = _tapped_layers(draft)
    served_at, trained_at = [0] * width, [0] * width
    num_steps = num_agree = 0
    gaps: list[float] = []
    proposed: list[tuple[tuple[int, ...], ...]] = []
    for prompt_ids, output_ids, accepted in texts:
        if any(not 0 <= took <= width for took in accepted):
            raise ResultError(f"a step accepted more than the draft's {width} tokens")
        bases = walk_bases(len(prompt_ids), len(output_ids), accepted)
        ids = [*prompt_ids, *output_ids]
        if not bases:
            proposed.append(())
            continue
        rows, states_NKD = propose(
            module,
            frozen,
            ids=ids,
            bases=bases,
            aux_layer_ids=aux_layer_ids,
            num_speculative_tokens=width,
        )
        proposed.append(tuple(rows))
        for base, took, row, states_KD in zip(bases, accepted, rows, states_NKD, strict=True):
            delivered = ids[base + 2 : base + 2 + width]
            if not delivered:
                continue
            served = min(took, len(delivered))
            trained = accept_greedy(row, delivered)
            num_steps += 1
            num_agree += served == trained
            if served != trained:
                at = min(served, trained)
                other = delivered[at] if served > trained else None
                gap = measure_gap(
                    module, frozen, states_KD[at], proposed=row[at], other=other, step=at
                )
                gaps.append(abs(gap))
            for position in range(width):
                served_at[position] += served > position
                trained_at[position] += trained > position
    return Replay(
        num_steps=num_steps,
        num_agree=num_agree,
        gaps=tuple(gaps),
        position_served=tuple(n / num_steps for n in served_at) if num_steps else (),
        position_trained=tuple(n / num_steps for n in trained_at) if num_steps else (),
        proposed=tuple(proposed),
    )


def simulate_draft(
    draft: Draft,
    target: TargetFacts,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    device: str = "cpu",
    dtype: str = "bfloat16",
) -> list[tuple[int, ...]]:
    """Accepted tokens of each step a server would take along greedy answers, without a server.

    texts: (prompt_ids, output_ids), greedy by this target. Tokens past the text's end cannot be
    judged and count as rejected; the last step of a text is thus understated.
    """
    frozen = load_frozen_target(
        target, device=device, dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32
    )
    return walk_greedy(load_draft_module(draft).to(device), frozen, draft, texts)


def walk_greedy(
    module: DraftModule,
    frozen: FrozenTarget,
    draft: Draft,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> list[tuple[int, ...]]:
    """`simulate_draft` with a target that is loaded already; module: the draft's."""
    width = draft.num_speculative_tokens
    result: list[tuple[int, ...]] = []
    for prompt_ids, output_ids in texts:
        ids = [*prompt_ids, *output_ids]
        first, last = len(prompt_ids) - 1, len(ids) - 2
        bases = range(first, last)
        if not bases:
            result.append(())
            continue
        rows, _ = propose(
            module,
            frozen,
            ids=ids,
            bases=bases,
            aux_layer_ids=_tapped_layers(draft),
            num_speculative_tokens=width,
        )
        accepted: list[int] = []
        base = first
        while base < last:
            took = accept_greedy(rows[base - first], ids[base + 2 : base + 2 + width])
            accepted.append(took)
            base += took + 1
        result.append(tuple(accepted))
    return result
