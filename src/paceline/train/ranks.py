"""The processes that train together: who this one is, sums over all, and one error that ends all.

Started by `paceline train --nproc-per-node` (or any torchrun): RANK, WORLD_SIZE and LOCAL_RANK say
who is who. Without them a process trains alone, and nothing here touches torch.distributed.

When one process fails it says so in the store that all share. A thread in every other process looks
there twice a second and ends its own, whatever collective the main thread waits in: so the message
of the one that failed is the only one, and nobody hangs.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from paceline.errors import PacelineError, RecipeError
from paceline.train.launch import current_rank, world_size

__all__ = ["Ranks", "find_device", "open_ranks", "stop_requests"]

_FAILED, _CODE = "failed", "code"
_OPENED = itertools.count()
_LOOK_S = 0.5
_PATIENCE = datetime.timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process (rank) among `world`; `writing` is held while files are being written."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    writing: Any = field(default_factory=threading.Lock)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> list[float]:
        """Sums over all processes, the same bits on each; float64 in, at most a few numbers."""
        if self.world > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return [float(value) for value in values.tolist()]

    def require_same(self, what: Mapping[str, Any]) -> None:
        """Raises RecipeError, on every process, when one has another value under a key."""
        if self.world == 1:
            return
        texts = {key: json.dumps(value, sort_keys=True) for key, value in what.items()}
        digests = {k: hashlib.sha256(t.encode()).hexdigest() for k, t in texts.items()}
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, digests)
        for key in digests:
            other = next((r for r, d in enumerate(found) if d.get(key) != found[0].get(key)), None)
            if other is not None:
                raise RecipeError(
                    f"process {other} has another {key} than process 0",
                    expected="the same files on every machine",
                    fix="Give every machine the same recipe, target, data folder and --out.",
                )

    def share(self, value: Any) -> Any:
        """What the first process holds, on every process."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()


def find_device(device: str | None) -> torch.device:
    """The device of this process: one GPU each where there are several processes."""
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name != "cuda" or world_size() == 1:
        return torch.device(name)
    local, num = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= num:
        raise RecipeError(
            f"this machine has {num} GPUs for {os.environ.get('LOCAL_WORLD_SIZE')} processes",
            expected="a GPU for each process",
            fix=f"Use --nproc-per-node {num}.",
        )
    return torch.device("cuda", local)


@contextlib.contextmanager
def stop_requests(ranks: Ranks) -> Iterator[Callable[[], bool]]:
    """Yields a question: did Ctrl-C ask for a stop? Several processes then stop after one step,
    all after the same; alone, a process is interrupted at once and the answer is always no."""
    if ranks.world == 1:
        yield lambda: False
        return
    asked = threading.Event()
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.set())
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def open_ranks(device: torch.device) -> Iterator[Ranks]:
    """Joins the others for the length of the block; alone, it only says so.

    An exception that leaves the block ends every process: one prints it, the others leave with its
    exit code and without a word.
    """
    world = world_size()
    if world == 1:
        yield Ranks(device=device)
        return
    rank = current_rank()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    everybodys, _, _ = next(iter(rendezvous("env://", rank, world, timeout=_PATIENCE)))
    # one run's own keys: a process may train again and again
    store: Any = PrefixStore(f"paceline-{next(_OPENED)}", everybodys)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    ranks = Ranks(rank=rank, world=world, device=device)
    done = threading.Event()
    watch = threading.Thread(
        target=_watch, args=(store.clone(), ranks, done), name="paceline-ranks", daemon=True
    )
    watch.start()
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world,
            timeout=_PATIENCE,
        )
        yield ranks
        ranks.wait()
    except BaseException as problem:
        _leave(problem, store, ranks, done)
    done.set()
    dist.destroy_process_group()


def _leave(problem: BaseException, store: Any, ranks: Ranks, done: threading.Event) -> None:
    """Ends this process by the first failure of all: its own, or another's in silence."""
    lost = isinstance(problem, RuntimeError) and _is_lost_contact(problem)
    if ranks.rank or lost:
        time.sleep(4 * _LOOK_S if lost else _LOOK_S)  # what all know is told by the first process
    code = getattr(problem, "exit_code", 130 if isinstance(problem, KeyboardInterrupt) else 3)
    try:
        first = store.add(_FAILED, 1) == 1
        if first:
            store.set(_CODE, str(code))
    except RuntimeError:  # the store's own process is gone: so is everybody
        first = False
    done.set()
    if not first:
        raise SystemExit(code) from None
    if lost:
        raise PacelineError(
            f"process {ranks.rank} of {ranks.world} lost contact with another one, which was "
            "killed or whose machine is gone",
            fix="Its own output says more. Go on with the same command and --resume.",
            exit_code=4,
        ) from None
    if isinstance(problem, PacelineError) and ranks.rank:
        problem.what = f"process {ranks.rank} of {ranks.world}: {problem.what}"
    raise problem


def _is_lost_contact(problem: RuntimeError) -> bool:
    text = str(problem)
    return isinstance(problem, dist.DistError) or "gloo" in text or "NCCL" in text


def _watch(store: Any, ranks: Ranks, done: threading.Event) -> None:
    while not done.wait(_LOOK_S):
        try:
            if not store.check([_FAILED]):
                continue
            time.sleep(_LOOK_S)  # the one that failed tells its code next
            code = int(store.get(_CODE)) if store.check([_CODE]) else 3
        except RuntimeError:
            return  # the store's own process is gone; the launcher ends this one
        if done.is_set():
            return
        with ranks.writing:
            sys.stdout.flush()
            os._exit(code)
