"""paceline forecast --measure: joins the plan and its statistics with engines that run by shape."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from paceline.cli.console import print_facts, say
from paceline.endpoint import Endpoint
from paceline.errors import EngineError, PlanError

__all__ = ["measure_shape"]

_POOL_FLOOR_BYTES = 64 * 2**20


def measure_shape(
    designs: list[Path],
    target: str,
    rules: str,
    *,
    plan_path: Path | None,
    lengths: str | None,
    num_repeats: int | None,
    max_tokens: int | None,
    minutes: float | None,
    at_once: int,
    device: str | None,
    out: Path,
) -> None:
    """Measures what --out does not hold yet and prints everything that it holds of the plan."""
    from paceline.forecast import (
        CachePlan,
        Configuration,
        build_draft_config,
        build_measure_plan,
        describe_measured,
        list_own_tensors,
        measure_cache_of,
        measure_steps,
        native_baseline,
        read_design_or_draft,
        read_measure_plan,
        read_shape,
    )
    from paceline.records import storage_errors
    from paceline.rules import read_rules
    from paceline.serve import ShapeDraft, find_machine, open_shape
    from paceline.serve.install import find_device, require_vllm

    shape = read_shape(target)
    if plan_path is not None:
        for value, name in ((lengths, "--lengths"), (num_repeats, "--repeats")):
            if value is not None:
                raise PlanError(f"{name} has no effect with --plan", fix="The plan states it.")
        if designs or max_tokens is not None:
            raise PlanError(
                "a design or --max-tokens has no effect with --plan", fix="The plan states it."
            )
        plan = read_measure_plan(plan_path, shape)
    else:
        k = read_rules(rules).speculation.baseline_num_speculative_tokens
        plan = build_measure_plan(
            [(path.stem, read_design_or_draft(path, shape)) for path in designs],
            native_baseline(shape, k),
            lengths=_read_lengths(lengths or "64,2048,8192"),
            num_repeats=6 if num_repeats is None else num_repeats,
            max_tokens=128 if max_tokens is None else max_tokens,
        )
    limit = shape.facts.max_position_embeddings
    if plan.max_model_len > limit:
        raise PlanError(
            f"{plan.max_model_len:,} tokens are asked for", expected=f"at most {limit:,} positions"
        )
    device = device or find_device()
    if device == "cpu":
        plan = plan.without_decree()
        say(
            "vLLM's CPU build has no synthetic acceptance: its steps accept what random weights"
            " accept, next to nothing; times a step count, times a token do not"
        )
    engine = f"vllm {require_vllm(device)}"
    machine = find_machine(device)
    with storage_errors(out):
        out.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def open_endpoint(one: Configuration) -> Iterator[Endpoint]:
        design = one.design
        draft = None
        if design is not None:
            draft = ShapeDraft(
                family=design.family,
                num_speculative_tokens=design.num_speculative_tokens,
                config=build_draft_config(design, shape),
                own=list_own_tensors(design),
                kv_dtype="auto" if design.kv_dtype == "bfloat16" else design.kv_dtype,
            )
        pool = measure_cache_of(
            design, shape, context_tokens=plan.max_model_len, plan=CachePlan(device=device)
        )
        with open_shape(
            shape.facts,
            draft,
            acceptance_length=one.acceptance_length,
            device=device,
            max_model_len=plan.max_model_len,
            kv_cache_bytes=2 * pool.total_bytes + _POOL_FLOOR_BYTES,
            log_path=out / "logs" / f"{one.name}.log",
        ) as endpoint:
            yield endpoint

    found = measure_steps(
        plan,
        shape,
        open_endpoint,
        path=out / "steps.jsonl",
        machine=machine,
        engine=engine,
        minutes=minutes,
        at_once=at_once,
        settings={"device": device, "dtype": "bfloat16"},
    )
    for title, lines in describe_measured(found, shape):
        print_facts(title, lines)
    say(f"runs: {out / 'steps.jsonl'}")
    if found.failed:
        raise EngineError(
            f"{len(found.failed)} of {len(plan.configurations)} configurations gave no figure",
            where=", ".join(found.failed),
            fix=f"Logs: {out / 'logs'}. The rest is kept; the same command tries these again.",
        )


def _read_lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise PlanError(
            f"--lengths is {text!r}", expected="prompt lengths in tokens, such as 64,2048,8192"
        ) from None
