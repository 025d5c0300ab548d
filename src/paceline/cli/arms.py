"""Turns the words of the command line into plans and started engines, one an arm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.console import say
from paceline.cli.disk import told_when_full
from paceline.methods import METHODS

if TYPE_CHECKING:
    from paceline.draft import Draft
    from paceline.endpoint import Endpoint
    from paceline.serve import Plan
    from paceline.target import TargetFacts

__all__ = ["Arm", "build_arm_plan", "is_same", "open_arm", "open_arms", "start_targets"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to serve the target: its name in the result, its draft, its checked plan."""

    name: str
    draft: Draft | None
    plan: Plan


def build_arm_plan(
    target: TargetFacts,
    draft: str,
    *,
    num_speculative_tokens: int | None = None,
    max_model_len: int | None = None,
    num_tokens: int = 0,
    max_num_seqs: int = 8,
    prefix_caching: bool = False,
    enforce_eager: bool | None = None,
    device: str | None = None,
) -> Plan:
    """A plan for "none", "native", a model-free method by name, a bundled draft or a draft folder.

    max_model_len: None takes the plan's own choice, or num_tokens where that is more.
    """
    from paceline.draft import NATIVE, read_draft, read_native_draft, resolve_draft
    from paceline.serve import build_plan

    by_name = draft in METHODS and not METHODS[draft].has_weights and not Path(draft).exists()
    read: Draft | None
    if draft == NATIVE:
        read = read_native_draft(target, num_speculative_tokens=num_speculative_tokens or 3)
    else:
        read = None if by_name else read_draft(resolve_draft(draft))

    def plan_for(length: int | None) -> Plan:
        return build_plan(
            target,
            read,
            method=draft if by_name else None,
            num_speculative_tokens=num_speculative_tokens,
            max_model_len=length,
            max_num_seqs=max_num_seqs,
            prefix_caching=prefix_caching,
            enforce_eager=enforce_eager,
            device=device,
        )

    plan = plan_for(max_model_len)
    if max_model_len is None and plan.max_model_len < num_tokens:
        plan = plan_for(num_tokens)
    return plan


def is_same(one: Arm, other: Arm) -> bool:
    """Whether two arms are the same draft, served alike."""
    shas = [arm.draft.sha256 if arm.draft is not None else None for arm in (one, other)]
    return shas[0] == shas[1] and one.plan.engine_args == other.plan.engine_args


@contextlib.contextmanager
def start_targets(
    target: TargetFacts, out: Path, *, num: int, max_num_seqs: int, device: str | None
) -> Iterator[list[Endpoint]]:
    """The target alone, `num` times, for answering; the engines' logs lie beside `out`.

    max_num_seqs: of each. The first starts alone, so that what is wrong is said once and what vLLM
    builds for this machine is there for the others, which start at once.
    """
    from paceline.serve import check_plan, spread_plan, start

    plan = build_arm_plan(target, "none", max_num_seqs=max_num_seqs, device=device)
    check_plan(plan)
    plans = spread_plan(plan, num)

    def begin(number: int) -> Endpoint:
        name = out.name if num == 1 else f"{out.name}-{number}"
        return start(plans[number], log_path=out.with_name(f"{name}.engine.log"))

    with told_when_full(out), contextlib.ExitStack() as stack:
        times = "" if num == 1 else f", {num} engines"
        say(f"starting {target.name} on vLLM{times} ...")
        endpoints = [begin(0)]
        stack.callback(endpoints[0].close)
        if num > 1:
            with ThreadPoolExecutor(max_workers=num - 1) as pool:
                starts = [pool.submit(begin, number) for number in range(1, num)]
            for done in starts:  # what did start is closed, whatever another one says
                if done.exception() is None:
                    stack.callback(done.result().close)
            endpoints += [done.result() for done in starts]
        yield endpoints


@contextlib.contextmanager
def open_arm(arm: Arm, log_dir: Path) -> Iterator[Endpoint]:
    """Starts a fresh engine of one arm and closes it whatever happens."""
    with open_arms([arm], log_dir) as endpoints:
        yield endpoints[arm.name]


@contextlib.contextmanager
def open_arms(arms: list[Arm], log_dir: Path) -> Iterator[dict[str, Endpoint]]:
    """Starts one engine an arm, one after the other, and closes all of them whatever happens."""
    from paceline.serve import start

    with told_when_full(log_dir), contextlib.ExitStack() as stack:
        endpoints: dict[str, Endpoint] = {}
        for arm in arms:
            say(f"starting {arm.name} ({arm.plan.method}) on vLLM ...")
            endpoint = start(arm.plan, log_path=log_dir / f"engine-{arm.name}.log")
            stack.callback(endpoint.close)
            endpoints[arm.name] = endpoint
        yield endpoints
