"""paceline draft: drafts of other tools made ours, and ours written for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import plural, say

if TYPE_CHECKING:
    from paceline.draft import Draft

__all__ = ["app"]

app = typer.Typer(help="Drafts of speculators and z-lab, read and written.", no_args_is_help=True)


@app.command("import")
def bring(
    source: Annotated[Path, typer.Argument(help="A folder by speculators, z-lab or by hand.")],
    out: Annotated[Path, typer.Option("--out", help="The draft folder to make.")],
    k: Annotated[
        int | None, typer.Option("--k", min=1, help="Drafted tokens a step; else the folder's own.")
    ] = None,
) -> None:
    """Make a draft folder of somebody else's, tensors as they are.

    Reads the speculators format (eagle3, peagle, dflash), z-lab's DFlash folders and plain EAGLE-3
    folders. What vLLM would not read is left out and named.
    """
    from paceline.draft import import_draft

    draft = import_draft(source, out, num_speculative_tokens=k)
    _describe(draft, out)
    imported = draft.metadata["trained"]["imported"]
    left_out = [*imported["dropped_keys"], *imported["dropped_tensors"]]
    if left_out:
        say(f"left out, vLLM reads none of it: {', '.join(left_out)}")


@app.command("export")
def send(
    draft: Annotated[str, typer.Argument(help="A draft folder or a bundled draft.")],
    verifier: Annotated[
        str, typer.Option("--verifier", help="Name or path of the target, for vLLM to serve.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The folder to make.")],
) -> None:
    """Write an eagle3 or dflash draft in the speculators format.

    `vllm serve FOLDER` then serves the verifier with this draft.
    """
    from paceline.draft import export_draft, read_draft, resolve_draft

    found = read_draft(resolve_draft(draft))
    export_draft(found, out, verifier=verifier)
    _describe(found, out)


def _describe(draft: Draft, out: Path) -> None:
    tensors = plural(len(draft.tensors), "tensor")
    say(f"draft: {out} ({draft.family}, K = {draft.num_speculative_tokens}, {tensors})")
