"""Every command line of the README, the guides and the recipes names options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "recipes/**/*.toml", "recipes/**/*.py", "bench/*.py")
    for page in ROOT.glob(pattern)
    if page.name != "CHANGELOG.md"  # what was true of an earlier version
)
COMMAND = typer.main.get_command(app)
FENCED = re.compile(r"^(?:```|    |#   |\$ )?\s*(paceline [a-z].*)$")
INLINE = re.compile(r"`(paceline [a-z][^`]*)`")


def commands_of(text: str) -> list[str]:
    """One line each; a line that ends in a backslash goes on in the next."""
    joined = re.sub(r"\\\n[#\s]*", "", text)
    found = [match[1] for line in joined.splitlines() if (match := FENCED.match(line))]
    return found + INLINE.findall(joined)


def check(line: str) -> str | None:
    """What is wrong with a command line; None for a sound one."""
    line = re.split(r"\s{2,}#|\s#\s|\s{3,}|;|\s&&\s|\s\|\s|\s>\s", line)[0]
    try:
        words = shlex.split(line.replace("…", " ").replace("...", " "))[1:]
    except ValueError:
        return None  # prose with an apostrophe
    command: Any = COMMAND
    while words and (inner := getattr(command, "commands", None)):
        if words[0] not in inner:
            return f"there is no command {words[0]!r}"
        command = inner[words.pop(0)]
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    known |= {"--help", "--version"}
    for word in words:
        option = re.match(r"--[a-z][a-z0-9-]*", word)
        if option and option[0] not in known:
            return f"{command.name} has no {option[0]}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_there(page: Path) -> None:
    wrong = {
        line: problem
        for line in commands_of(page.read_text(encoding="utf-8"))
        if (problem := check(line))
    }
    assert not wrong


def test_a_page_with_a_wrong_word_fails() -> None:
    text = "```\npaceline train recipe.toml --targett smollm2\n```\nand `paceline forecst x`"
    problems = [check(line) for line in commands_of(text)]
    assert problems == ["train has no --targett", "there is no command 'forecst'"]


LINK = re.compile(r"\]\(([^)#\s]+)(?:#([^)\s]+))?\)|\]\(#([^)\s]+)\)")


def anchors_of(text: str) -> set[str]:
    """As a page on the web names its headings."""
    heads = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.suffix == ".md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_somewhere(page: Path) -> None:
    text, lost = page.read_text(encoding="utf-8"), []
    for path, anchor, own in LINK.findall(text):
        if path.startswith(("http:", "https:", "mailto:")):
            continue
        there = page.parent / path if path else page
        if not there.exists():
            lost.append(path)
        elif (anchor or own) and (anchor or own) not in anchors_of(there.read_text()):
            lost.append(f"{path}#{anchor or own}")
    assert not lost
