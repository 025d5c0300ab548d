"""Medusa's first weights: heads that begin as the target's own next-token guess, or at random."""

from __future__ import annotations

import torch

from paceline.train.families.medusa import Medusa
from paceline.train.features import FrozenTarget

__all__ = ["start_medusa_from_target", "start_medusa_random"]


def start_medusa_random(module: Medusa, seed: int) -> None:
    """Matrices from a normal of deviation 0.02, biases 0; a function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.ndim == 2:
                tensor.normal_(0.0, 0.02, generator=generator)
            else:
                tensor.zero_()


def start_medusa_from_target(module: Medusa, frozen: FrozenTarget) -> list[str]:
    """Output matrices from the target's, residual layers at 0: each head says the next token.

    Answers the names of the tensors taken from the target.
    """
    taken = []
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if name.startswith("lm_head"):
                tensor.copy_(frozen.head_VD)
                taken.append(name)
            else:
                tensor.zero_()
    return taken
