"""What may be named: a repository at one commit, and the files that are taken from it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from paceline.errors import HubError
from paceline.problems import show_value

__all__ = [
    "HUB_OWN_FILES",
    "HubRef",
    "Kind",
    "is_allowed",
    "is_hub_spec",
    "parse_ref",
    "parse_repo_id",
]

Kind = Literal["draft", "target"]

HUB_OWN_FILES = frozenset({".gitattributes"})  # the Hub makes it; never sent, never taken
_INDEX = r"model\.safetensors\.index\.json"
_DRAFT_FILE = re.compile(
    r"(config|spec|metadata)\.json|README\.md|LICENSE(\.(md|txt))?"
    rf"|model\.safetensors|model-\d{{5}}-of-\d{{5}}\.safetensors|{_INDEX}",
    re.ASCII,
)
_TARGET_FILE = re.compile(
    r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}\.(json|safetensors)|README\.md|LICENSE(\.(md|txt))?"
    r"|merges\.txt|vocab\.txt|tokenizer\.model|chat_template\.jinja",
    re.ASCII,
)
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class HubRef:
    """One state of one model repository. `str` gives it back as `owner/name@commit`."""

    repo_id: str
    commit: str

    def __str__(self) -> str:
        return f"{self.repo_id}@{self.commit}"


def is_hub_spec(spec: str) -> bool:
    """Whether a word of the command line is meant as `owner/name@...`, right or wrong."""
    return re.fullmatch(r"[^/@\s]+/[^/@\s]+@[^/\s]*", spec) is not None


def parse_repo_id(text: str) -> str:
    """Checks `owner/name`. Raises HubError."""
    parts = text.split("/")
    if len(parts) != 2 or not all(_NAME.fullmatch(part) and ".." not in part for part in parts):
        raise HubError(
            f"'{show_value(text)}' is not the name of a repository",
            expected="owner/name of letters, digits, '.', '_' and '-'",
            rule="repo.id",
        )
    return text


def parse_ref(text: str) -> HubRef:
    """`owner/name@<40 hex digits>`. A branch, a tag or a short commit is refused: it can move."""
    repo_id, separator, revision = text.partition("@")
    parse_repo_id(repo_id)
    if not separator:
        raise HubError(
            f"'{show_value(text)}' names no commit",
            expected=f"{repo_id}@ and the 40 hex digits of a commit",
            fix="Copy the commit from the repository's history; `paceline submit` prints it.",
            rule="rev.sha",
        )
    return HubRef(repo_id=repo_id, commit=_parse_commit(revision, where=text))


def _parse_commit(revision: str, *, where: str) -> str:
    commit = revision.lower()
    if _COMMIT.fullmatch(commit):
        return commit
    if re.fullmatch(r"[0-9a-f]{4,39}", commit):
        what = f"'{commit}' is a shortened commit, and another commit may begin alike"
    else:
        what = (
            f"'{show_value(revision)}' is a branch or a tag, not a commit: it can name other"
            " files tomorrow"
        )
    raise HubError(
        what,
        where=show_value(where),
        expected="the 40 hex digits of a commit",
        fix="Copy the full commit from the repository's history.",
        rule="rev.sha",
    )


def is_allowed(name: str, kind: Kind) -> bool:
    """Whether a file of a repository is one that a draft, or a target, is made of."""
    return (_DRAFT_FILE if kind == "draft" else _TARGET_FILE).fullmatch(name) is not None
