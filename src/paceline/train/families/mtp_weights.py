"""MTP weights: the target's own head to start from, a folder read back, and what is written."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import TargetError
from paceline.target import TargetFacts
from paceline.train.families.mtp import Mtp

__all__ = ["read_native_head", "start_from_native", "start_mtp_random"]


def read_native_head(target: TargetFacts) -> dict[str, Tensor]:
    """`mtp.*` of a target folder, on the CPU. Raises TargetError when it holds none."""
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    for file in sorted(Path(target.path).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                if name.startswith("mtp."):
                    tensors[name] = opened.get_tensor(name)
    if not tensors:
        raise TargetError(
            "the target holds no tensor named mtp.*",
            where=str(target.path),
            fix='Start with [init] from = "random", or use the target\'s full checkpoint.',
        )
    return tensors


def start_from_native(module: Mtp, target: TargetFacts) -> list[str]:
    """Copies the target's own head; the names taken. Raises TargetError for one that differs."""
    found = read_native_head(target)
    state = module.state_dict()
    for name in sorted({*state, *found}):
        wanted, given = state.get(name), found.get(name)
        if wanted is None or given is None or wanted.shape != given.shape:
            what = "is missing" if given is None else f"has shape {list(given.shape)}"
            raise TargetError(
                f"the target's own MTP head is another one: tensor '{name}' {what}",
                where=str(target.path),
                expected="no such tensor" if wanted is None else f"shape {list(wanted.shape)}",
            )
    module.load_state_dict({name: tensor.float() for name, tensor in found.items()})
    return sorted(found)


def start_mtp_random(module: Mtp, seed: int) -> None:
    """Matrices from a normal of deviation 0.02, norms at 0, which stands for 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.zero_()
