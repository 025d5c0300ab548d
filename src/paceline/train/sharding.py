"""A draft spread over several processes (FSDP2), and a target that is, if it does not fit on each.

Parameters, gradients and moments of a draft are split along their first dimension; the whole draft
is gathered once a forward, since it is one layer. A sharded target is gathered layer by layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.train.features import FrozenTarget
from paceline.train.ranks import Ranks

__all__ = [
    "clip_gradients",
    "gather_state",
    "shard_module",
    "shard_target",
    "spread",
    "square_gradients",
    "whole",
]


def shard_module(module: nn.Module, ranks: Ranks) -> Any:
    """Splits a module's parameters over the processes, in place; every process holds the same."""
    from torch.distributed.fsdp import fully_shard

    sharded: Any = fully_shard(module, mesh=_mesh(ranks))
    # losses are shares of one sum; gloo has sums alone
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    return sharded


class _Spread(nn.Module):
    """Around the backbone, since fully_shard changes the class and transformers looks at it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def shard_target(frozen: FrozenTarget, ranks: Ranks) -> FrozenTarget:
    """The target with its layers split; embedding and output matrix stay whole, as losses read
    them. `frozen` lies on the CPU and goes to the device in parts."""
    from torch.distributed.fsdp import fully_shard

    backbone, mesh = frozen.backbone, _mesh(ranks)
    embedding = backbone.get_input_embeddings().weight
    for layer in backbone.layers:
        fully_shard(layer, mesh=mesh)
    outer = _Spread(backbone)
    fully_shard(outer, mesh=mesh, ignored_params={embedding})
    embedding.data = embedding.data.to(ranks.device)
    outer.to(ranks.device)
    tied = frozen.head_VD.data_ptr() == frozen.embedding_VD.data_ptr()
    embedding_VD = embedding.detach()
    head_VD = embedding_VD if tied else frozen.head_VD.to(ranks.device)
    return dataclasses.replace(
        frozen, backbone=outer, embedding_VD=embedding_VD, head_VD=head_VD, is_spread=True
    )


def _mesh(ranks: Ranks) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(ranks.device.type, (ranks.world,))


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be split; a collective when it is."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def spread(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, whole on every process, split as `like` is."""
    mesh = getattr(like, "device_mesh", None)
    if mesh is None:
        return tensor.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), mesh, like.placements)  # type: ignore[attr-defined]


def gather_state(module: nn.Module) -> dict[str, Tensor]:
    """Whole tensors by name; every process calls it, one after the other name by name."""
    return {name: whole(tensor.detach()) for name, tensor in module.state_dict().items()}


def square_gradients(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Sum of squares of what this process holds of all gradients.

    In float64, so that the same gradients give the same norm however many processes hold them.
    """
    grads = [_local(p.grad) for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads if g.numel()]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)


def clip_gradients(parameters: Iterable[nn.Parameter], *, norm: float, limit: float) -> None:
    """Scales all gradients, whose norm is `norm`, to at most `limit`."""
    grads = [_local(p.grad) for p in parameters if p.grad is not None]
    torch._foreach_mul_(grads, min(1.0, limit / (norm + 1e-6)))


def _local(grad: Tensor) -> Tensor:
    inner = getattr(grad, "to_local", None)
    return grad if inner is None else inner()
