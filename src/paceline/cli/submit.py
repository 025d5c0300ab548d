"""paceline submit: a validated draft to a gated repository on the Hub."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.console import say

__all__ = ["submit"]


def submit(
    draft: Annotated[str, typer.Argument(help="A draft folder or a bundled draft's name.")],
    repo: Annotated[str, typer.Argument(help="owner/name on the Hub; made if it is not there.")],
    target: Annotated[
        str | None, typer.Option("--target", help="The target the draft is for.")
    ] = None,
    rules: Annotated[
        str | None, typer.Option("--rules", help="Contest rules to check against, e.g. emc2-2027.")
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read every tensor's values too.")] = False,
    listed: Annotated[
        bool, typer.Option("--listed", help="Make the page visible; the files stay gated.")
    ] = False,
) -> None:
    """Validate a draft, upload it gated, fetch it back.

    The last line is owner/name@commit, which is what a contest asks for. A draft that does not
    validate is not uploaded. The token is HF_TOKEN, or that of `hf auth login`.
    """
    from paceline.cli.validate import print_findings
    from paceline.draft import resolve_draft
    from paceline.hub import parse_repo_id, submit_folder
    from paceline.rules import read_rules
    from paceline.target import read_target
    from paceline.validate import validate_draft

    parse_repo_id(repo)
    folder = resolve_draft(draft)
    facts = read_target(target) if target else None
    contest = read_rules(rules) if rules else None
    report = validate_draft(folder, target=facts, rules=contest, deep=deep)
    print_findings(report)
    if report.verdict == "fail":
        say("not uploaded: correct the errors first")
        raise typer.Exit(2)
    done = submit_folder(folder, repo, listed=listed, on_stage=say)
    for name, sha256 in done.files.items():
        say(f"{sha256}  {name}")
    for name in done.removed:
        say(f"removed there, not in the folder: {name}")
    say("fetched back: every sha256 is the same")
    if done.is_private:
        say(
            "the repository is private: before handing it in, make its page visible (--listed or"
            " its settings) and approve the organisers' account; the files stay gated"
        )
    say(str(done.ref))
