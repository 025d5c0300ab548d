"""The shard index against the shards themselves: names and sizes, header by header."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.problems import Problem, show_value
from paceline.safetensors_header import Header

__all__ = ["INDEX_NAME", "check_index"]

INDEX_NAME = "model.safetensors.index.json"
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_MAX_PROBLEMS = 40
_RESAVE = "Save the draft again, or copy the folder again: the last copy did not finish."


def _problem(rule: str, message: str, *, where: str = "", **more: str) -> Problem:
    return Problem(
        rule=rule,
        file=INDEX_NAME,
        where=where,
        message=message,
        fix=more.get("fix", _RESAVE),
        found=more.get("found", ""),
        expected=more.get("expected", ""),
    )


def check_index(
    index: Mapping[str, Any] | None,
    is_there: bool,
    headers: Mapping[str, Header],
    names: Sequence[str],
) -> list[Problem]:
    """Index and headers must agree one to one. `names`: all file names of the folder.

    vLLM drops a shard that the index does not name, and any tensor the index promises but no
    shard holds, without a word.
    """
    problems = _check_naming(names)
    if not is_there:
        shards = [name for name in names if name.endswith(".safetensors")]
        if len(shards) > 1:
            problems.append(
                _problem(
                    "idx.complete",
                    f"there are {len(shards)} weight files but no index",
                    found=", ".join(shards[:4]),
                    expected=f"one model.safetensors, or shards with {INDEX_NAME}",
                )
            )
        return problems
    if index is None:
        return problems  # its JSON problems are reported already
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        return [
            *problems,
            _problem(
                "idx.complete",
                "'weight_map' is not an object of file names",
                where="weight_map",
                found=show_value(weight_map),
                expected='{"tensor name": "file name"}',
            ),
        ]
    problems += _check_files(weight_map, headers, names)
    if not problems:
        problems += _check_entries(weight_map, headers)
        problems += _check_total(index, headers)
    return problems[:_MAX_PROBLEMS]


def _check_naming(names: Sequence[str]) -> list[Problem]:
    found = [match for name in names if (match := _SHARD.fullmatch(name))]
    if not found:
        return []
    totals = {int(match[2]) for match in found}
    numbers = {int(match[1]) for match in found}
    total = max(totals)
    missing = [number for number in range(1, min(total, 10_000) + 1) if number not in numbers]
    if len(totals) == 1 and not missing and max(numbers) <= total:
        return []
    return [
        _problem(
            "idx.naming",
            "the numbered shards are not complete",
            found=", ".join(sorted(match[0] for match in found)[:4]),
            expected=f"numbers 1 to {total} of one total",
        )
    ]


def _check_files(
    weight_map: Mapping[str, str], headers: Mapping[str, Header], names: Sequence[str]
) -> list[Problem]:
    problems = []
    present = set(names)
    promised: dict[str, list[str]] = {}
    for tensor, file in weight_map.items():
        promised.setdefault(file, []).append(tensor)
    for file, tensors in promised.items():
        shown = show_value(file)
        if "/" in file or "\\" in file or file in {"", ".", ".."} or "\0" in file:
            problems.append(
                _problem(
                    "idx.base",
                    f"the index points outside the folder: '{shown}'",
                    where=show_value(tensors[0]),
                    found=shown,
                    expected="a plain file name",
                    fix="Use file names without any path.",
                )
            )
        elif file not in present:
            problems.append(
                _problem(
                    "idx.base",
                    f"shard '{shown}' is not in the folder; it should hold {len(tensors)} tensors,"
                    f" '{show_value(tensors[0])}' among them",
                    where=show_value(tensors[0]),
                    found="no such file",
                    expected=shown,
                )
            )
    for name in names:
        if name.endswith(".safetensors") and name not in promised:
            problems.append(
                _problem(
                    "idx.complete",
                    f"'{show_value(name)}' is not named in the index; vLLM would skip it",
                    where=show_value(name),
                    found="a weight file that no entry names",
                    expected="every weight file in the index",
                )
            )
    return problems


def _check_entries(weight_map: Mapping[str, str], headers: Mapping[str, Header]) -> list[Problem]:
    problems = []
    homes: dict[str, list[str]] = {}
    for file, header in headers.items():
        for tensor in header.tensors:
            homes.setdefault(tensor, []).append(file)
    for tensor, file in weight_map.items():
        where = show_value(tensor)
        found_in = homes.get(tensor, [])
        if file in found_in or file not in headers:
            continue
        if found_in:
            message = f"tensor '{where}' lives in '{found_in[0]}', but the index says '{file}'"
        else:
            message = f"the index promises tensor '{where}' in '{file}', whose header lacks it"
        problems.append(
            _problem(
                "idx.complete",
                message,
                where=where,
                found=found_in[0] if found_in else "in no shard",
                expected=file,
            )
        )
    for tensor, files in homes.items():
        if tensor not in weight_map:
            message = f"tensor '{tensor}' of '{files[0]}' is not in the index"
        elif len(files) > 1:
            message = f"tensor '{tensor}' is in two shards: {', '.join(files[:2])}"
        else:
            continue
        problems.append(
            _problem(
                "idx.complete",
                message,
                where=tensor,
                found=files[0],
                expected="one entry for each tensor of each shard",
            )
        )
    return problems


def _check_total(index: Mapping[str, Any], headers: Mapping[str, Header]) -> list[Problem]:
    metadata = index.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    true = sum(t.num_bytes for header in headers.values() for t in header.tensors.values())
    if stated is None or stated == true:
        return []
    return [
        _problem(
            "idx.complete",
            "'total_size' is not the size of the tensors",
            where="metadata.total_size",
            found=show_value(stated),
            expected=str(true),
        )
    ]
