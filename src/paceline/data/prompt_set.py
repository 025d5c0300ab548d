"""Prompts: a JSONL file or a bundled set -> conversations, with every rejected line named.

    {"messages": [{"role": "user", "content": "..."}], "category": "chat", "id": "a1"}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"prompt": "..."}

`category` and `id` are optional in each form.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data.grammar import CATEGORIES, TRAIN_NUM, expand_prompts
from paceline.data.prompt import Prompt
from paceline.errors import DataError
from paceline.problems import show_value
from paceline.records import parse_json, sha256_bytes

__all__ = ["BUNDLED_PROMPTS", "PromptSet", "read_prompts", "require_few_rejected"]

BUNDLED_PROMPTS = ("train", "held-out", "demo-train", "demo-eval")
_FOLDER = Path(__file__).parent / "prompts"
_DEMO_TRAIN_NUM = 96
_DEMO_EVAL_PER_CATEGORY = 3
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """rejected: (line, reason) of each line left out. sha256 covers ids, categories and texts."""

    name: str
    prompts: tuple[Prompt, ...]
    rejected: tuple[tuple[int, str], ...]
    sha256: str


class _Refused(ValueError):
    """Why one line is left out."""


def read_prompts(path_or_name: str | Path) -> PromptSet:
    """Reads a JSONL file or a bundled set: train, train:N, held-out, demo-train, demo-eval.

    train:N has N prompts; a smaller N is always the beginning of a larger one. Lines that cannot
    be used are listed in `rejected`. Raises DataError when the file cannot be read or no prompt
    is left.
    """
    name = str(path_or_name)
    if name == "train" or name.startswith("train:"):
        return _build_set(name, expand_prompts(_train_num(name)))
    if name == "demo-train":
        return _build_set(name, expand_prompts(_DEMO_TRAIN_NUM))
    if name in ("held-out", "demo-eval"):
        held_out = _read_file(_FOLDER / "held-out.jsonl", "held-out")
        if name == "held-out":
            return held_out
        chosen = [
            prompt
            for category in CATEGORIES
            for prompt in [p for p in held_out.prompts if p.category == category][
                :_DEMO_EVAL_PER_CATEGORY
            ]
        ]
        return _build_set(name, chosen)
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(
            "there is no such prompt file" if not path.exists() else "is not a file",
            where=name,
            expected=f"a JSONL file or one of {', '.join(BUNDLED_PROMPTS)}, train:N",
        )
    return _read_file(path, path.name)


def require_few_rejected(
    prompt_set: PromptSet, *, num_more: int = 0, max_rejected_share: float = 0.5
) -> None:
    """Raises DataError when more than `max_rejected_share` of the lines were rejected.

    num_more: kept lines that a later stage rejected.
    """
    num_rejected = len(prompt_set.rejected) + num_more
    num_lines = len(prompt_set.rejected) + len(prompt_set.prompts)
    if num_rejected > max_rejected_share * num_lines:
        line, reason = prompt_set.rejected[0] if prompt_set.rejected else (0, "see the list")
        raise DataError(
            f"{num_rejected} of {num_lines} prompts were rejected (first: line {line}, {reason})",
            where=prompt_set.name,
            expected=f"at most {max_rejected_share:.0%}",
            fix="Correct the named lines.",
        )


def _train_num(name: str) -> int:
    if name == "train":
        return TRAIN_NUM
    number = name.removeprefix("train:")
    if not number.isascii() or not number.isdigit() or int(number) < 1:
        raise DataError(
            f"{name!r} does not name a number of prompts", expected="train:N, such as train:2000"
        )
    return int(number)


def _build_set(
    name: str, prompts: list[Prompt], rejected: list[tuple[int, str]] | None = None
) -> PromptSet:
    content = [[p.prompt_id, p.category, list(p.messages)] for p in prompts]
    text = json.dumps(content, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return PromptSet(
        name=name,
        prompts=tuple(prompts),
        rejected=tuple(rejected or ()),
        sha256=sha256_bytes(text.encode("ascii")),
    )


def _read_file(path: Path, name: str) -> PromptSet:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as problem:
        raise DataError(f"cannot be read: {problem.strerror}", where=str(path)) from None
    prompts: list[Prompt] = []
    rejected: list[tuple[int, str]] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = _parse_line(
                line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, number
            )
            if prompt.prompt_id in seen:
                raise _Refused(f"id {show_value(prompt.prompt_id)} is used by an earlier line")
        except _Refused as problem:
            rejected.append((number, str(problem)))
            continue
        seen.add(prompt.prompt_id)
        prompts.append(prompt)
    if not prompts:
        first = f" (line {rejected[0][0]}: {rejected[0][1]})" if rejected else ""
        raise DataError(
            f"holds no usable prompt{first}",
            where=str(path),
            expected='one object a line with "messages", "conversations" or "prompt"',
        )
    return _build_set(name, prompts, rejected)


def _parse_line(line: bytes, number: int) -> Prompt:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise _Refused(f"not UTF-8 (byte {problem.start})") from None
    try:
        row = parse_json(text, error=DataError)
    except DataError as problem:
        raise _Refused(problem.what.replace("line 1 column", "column")) from None
    if not isinstance(row, dict):
        raise _Refused("not a JSON object")
    forms = [key for key in ("messages", "conversations", "prompt") if key in row]
    if len(forms) != 1:
        found = "several of" if forms else "none of"
        raise _Refused(f'{found} "messages", "conversations" and "prompt"')
    if forms == ["prompt"]:
        turns: Any = [{"role": "user", "content": row["prompt"]}]
    else:
        turns = row[forms[0]]
    category, prompt_id = row.get("category", "other"), row.get("id", f"line-{number}")
    if type(prompt_id) is int:
        prompt_id = str(prompt_id)
    for key, value in (("category", category), ("id", prompt_id)):
        if not isinstance(value, str) or not value:
            raise _Refused(f'"{key}" is not text')
    names = ("from", "value") if forms == ["conversations"] else ("role", "content")
    return Prompt(
        prompt_id=prompt_id, category=category, messages=_parse_turns(turns, names), line=number
    )


def _parse_turns(turns: Any, names: tuple[str, str]) -> tuple[dict[str, str], ...]:
    """One optional system turn, then user and assistant in turn, beginning with the user."""
    if not isinstance(turns, list) or not turns:
        raise _Refused("no turns")
    messages: list[dict[str, str]] = []
    for place, turn in enumerate(turns, 1):
        speaker = turn.get(names[0]) if isinstance(turn, dict) else None
        content = turn.get(names[1]) if isinstance(turn, dict) else None
        role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            shown = show_value(speaker, limit=40)
            raise _Refused(f'turn {place}: "{names[0]}" is {shown}, not a known speaker')
        if not isinstance(content, str) or not content.strip():
            raise _Refused(f"turn {place}: the {role} says nothing")
        messages.append({"role": role, "content": content})
    talk = messages[1:] if messages[0]["role"] == "system" else messages
    first = len(messages) - len(talk) + 1
    if not talk:
        raise _Refused("no user turn")
    for offset, message in enumerate(talk):
        wanted = "assistant" if offset % 2 else "user"
        if message["role"] != wanted:
            raise _Refused(
                f"turn {first + offset}: the {message['role']} speaks where the {wanted} should"
            )
    return tuple(messages)
