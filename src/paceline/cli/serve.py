"""paceline serve: run a target, with or without a draft, as an OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.console import print_facts, say

__all__ = ["serve"]


def serve(
    target: Annotated[str, typer.Argument(help="A folder or a bundled name.")],
    draft: Annotated[
        str | None,
        typer.Option("--draft", help="A draft folder, a bundled draft, native, ngram or suffix."),
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
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda; found by itself.")
    ] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Print the checked plan and its command; start nothing.")
    ] = False,
) -> None:
    """Serve a target on unmodified vLLM, with or without a draft."""
    from paceline.cli.arms import build_arm_plan
    from paceline.serve import check_plan, describe_plan, format_command, serve_http
    from paceline.target import read_target

    plan = build_arm_plan(
        read_target(target),
        draft or "none",
        num_speculative_tokens=num_speculative_tokens,
        max_model_len=max_model_len,
        device=device,
    )
    notes = check_plan(plan)
    if plan_only:
        print_facts("Plan", describe_plan(plan))
        for note in notes:
            say(f"note: {note}")
        say(format_command(plan, host=host, port=port))
        return
    serve_http(plan, host=host, port=port)
