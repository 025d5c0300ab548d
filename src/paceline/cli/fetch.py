"""paceline fetch: a draft or target from the Hub, at one commit, with its hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from paceline.cli.console import plural, progress, say

__all__ = ["fetch"]


def fetch(
    ref: Annotated[
        str | None, typer.Argument(help="owner/name@ and the 40 hex digits of a commit.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The folder to make.")] = None,
    kind: Annotated[
        str, typer.Option("--as", help="draft or target: which files are taken.")
    ] = "draft",
    max_bytes: Annotated[
        int | None, typer.Option("--max-bytes", min=1, help="Refuse a larger repository.")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option("--verify", help="Hash a fetched folder again; fetch nothing.")
    ] = None,
) -> None:
    """Fetch one commit of a repository on the Hub; run nothing.

    The folder appears whole or not at all. DIR.fetch.json beside it keeps every file's sha256.
    """
    from paceline.errors import HubError
    from paceline.hub import fetch_folder, manifest_path, parse_ref, verify_folder

    if verify is not None:
        if ref is not None or out is not None or max_bytes is not None:
            raise HubError("--verify takes a folder and nothing else", fix="Leave the rest out.")
        for difference in (differences := verify_folder(verify)):
            say(difference)
        if differences:
            raise typer.Exit(2)
        say(f"{verify}: every file is as it was fetched")
        return
    if ref is None or out is None:
        raise HubError("what to fetch and where to is not stated", expected="REF and --out DIR")
    if kind not in ("draft", "target"):
        raise HubError(f"--as {kind!r} is unknown", expected="draft or target")
    parsed = parse_ref(ref)
    with progress("fetching") as show:
        manifest = fetch_folder(
            parsed,
            out,
            kind=cast(Literal["draft", "target"], kind),
            max_bytes=max_bytes,
            on_progress=lambda done, total: show(-(-done // 10**6), -(-total // 10**6), "MB"),
        )
    files = manifest["files"]
    for name, item in files.items():
        say(f"{item['sha256']}  {item['bytes']:>13,}  {name}")
    if manifest["left_out"]:
        say(f"left out, not part of a {kind}: {', '.join(manifest['left_out'])}")
    say(f"{plural(len(files), 'file')} in {out}, hashes in {manifest_path(out).name}")
