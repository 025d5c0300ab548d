"""paceline serve: run a target, with or without a draft, as an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli.console import print_facts, say
from paceline.errors import PlanError

__all__ = ["serve"]

_MIN_ACCEPTANCE = 1.2


def serve(
    target: Annotated[str, typer.Argument(help="A folder or a bundled name.")],
    draft: Annotated[
        str | None,
        typer.Option("--draft", help="A draft folder, a bundled draft, native, ngram or suffix."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings that `paceline tune` wrote.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--k", min=1, help="Drafted tokens a step; else from the draft.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.")] = 8000,
    max_model_len: Annotated[
        int | None,
        typer.Option("--max-model-len", min=1, help="Longest prompt and answer together."),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", min=1, help="Requests in one batch of the engine.")
    ] = 8,
    min_acceptance: Annotated[
        float | None,
        typer.Option(
            "--min-acceptance", min=1.0, help="Acceptance length that a draft must keep; else 1.2."
        ),
    ] = None,
    window_steps: Annotated[
        int, typer.Option("--window", min=1, help="Drafting steps over which it is judged.")
    ] = 1000,
    weak_draft: Annotated[
        Literal["switch", "tell"],
        typer.Option("--weak-draft", help="What then: go on without it, or only say so."),
    ] = "switch",
    beside: Annotated[
        bool,
        typer.Option("--beside", help="Keep the target alone ready beside it: memory for both."),
    ] = False,
    max_held: Annotated[
        int, typer.Option("--max-held", min=1, help="Requests held at once; more get a 503.")
    ] = 1024,
    drain_s: Annotated[
        float, typer.Option("--drain", min=0.0, help="Seconds that the end waits for answers.")
    ] = 30.0,
    silence_s: Annotated[
        float,
        typer.Option("--silence", min=1.0, help="Seconds without a token after which it hangs."),
    ] = 120.0,
    log: Annotated[
        Path | None, typer.Option("--log", help="vLLM's output; else kept only on a failure.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda; found by itself.")
    ] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Print the checked plan and its command; start nothing.")
    ] = False,
) -> None:
    """Serve a target on unmodified vLLM, with or without a draft.

    One OpenAI-compatible address with /health and /metrics. A server that dies, or a draft that
    stops helping, is replaced by the target alone without losing a request. SIGTERM answers what is
    held, SIGUSR1 and SIGUSR2 switch the draft off and on.
    """
    from paceline.cli.arms import build_arm_plan
    from paceline.serve import (
        Operation,
        ServeConfig,
        apply_engine_settings,
        check_plan,
        describe_plan,
        format_command,
        read_serve_config,
        serve_http,
    )
    from paceline.target import read_target

    found = read_serve_config(config) if config is not None else ServeConfig()
    compiled = found.engine.get("compiled")
    plan = build_arm_plan(
        read_target(target),
        draft or found.draft or "none",
        num_speculative_tokens=num_speculative_tokens or (None if draft else found.k),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        prefix_caching=found.engine.get("prefix_caching", False),
        enforce_eager=None if compiled is None else not compiled,
        device=device,
    )
    plan = apply_engine_settings(plan, found.engine)
    if min_acceptance is not None and plan.method == "none":
        raise PlanError("--min-acceptance has no effect without a draft", fix="Leave it out.")
    notes = check_plan(plan)
    if plan_only:
        print_facts("Plan", describe_plan(plan))
        for note in notes:
            say(f"note: {note}")
        say(format_command(plan, host=host, port=port))
        return
    operation = Operation(
        min_acceptance=min_acceptance or (not draft and found.min_acceptance) or _MIN_ACCEPTANCE,
        window_steps=window_steps,
        switches_off=weak_draft == "switch",
        beside=beside,
        max_held=max_held,
        drain_s=drain_s,
        silence_s=silence_s,
    )
    for note in notes:
        say(f"note: {note}")
    say(f"starting {plan.target.name} ({plan.method}) on vLLM ...")
    serve_http(
        plan,
        host=host,
        port=port,
        operation=operation,
        log_path=log,
        on_ready=_tell,
        tell=_tell,
    )


def _tell(text: str) -> None:
    """A line with its time. Nobody reading it any more must not end the server."""
    with contextlib.suppress(OSError):
        print(time.strftime("%Y-%m-%d %H:%M:%S"), text, flush=True)
