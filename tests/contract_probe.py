"""Every single fault of the sound folders, by vLLM's own loader and by validate.

Used by the flow test and by scripts/write_contracts_doc.py.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builders import Tensor, write_safetensors
from contract_cases import Case, build_tensors_of, write_folder

from paceline.draft import export_draft, read_draft
from paceline.errors import DraftError
from paceline.target import TargetFacts, read_target
from paceline.validate import validate_draft

__all__ = ["Outcome", "Tried", "hold_against_vllm"]

CHILD = Path(__file__).with_name("contract_child.py")
_SIZES_OF = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2, "I8": 1, "F8_E4M3": 1, "BOOL": 1}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "num_aux_hidden_states",
    "num_heads",
)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One folder that was tried. fault: "" for the sound one.

    told: our worst new finding: "error", "warning", "note", or "" when nothing is said; message:
    its text. error: vLLM's; None when it loaded the same model without complaint, "another" when it
    built another one without complaint.
    """

    fault: str
    kind: str
    told: str
    message: str
    error: str | None

    @property
    def is_silent(self) -> bool:
        return self.error in (None, "another")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    case: Case
    tried: tuple[Tried, ...]

    @property
    def sound(self) -> Tried:
        return self.tried[0]

    @property
    def faults(self) -> tuple[Tried, ...]:
        return tuple(item for item in self.tried[1:] if item.kind != "envelope")

    @property
    def envelopes(self) -> tuple[Tried, ...]:
        """The same draft in another tool's form: no fault, and to be built as the same model."""
        return tuple(item for item in self.tried if item.kind == "envelope")


def _reshape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    dtype, _, data = tensor
    size = _SIZES_OF[dtype]
    return dtype, shape, (data * 3)[: size * math.prod(shape)]


def _build_faults(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, dict[str, Tensor]]]:
    """(what, kind, tensors) of every single deletion, renaming and reshaping."""
    for name, tensor in tensors.items():
        rest = {key: value for key, value in tensors.items() if key != name}
        if name == "t2d" or name == "layers.1.hidden_norm.weight":
            continue  # read by no engine: its absence is no fault
        yield f"without {name}", "deleted", rest
        stem, _, end = name.rpartition(".")
        wrong = f"{stem}x.{end}" if stem else f"{end}x"
        yield f"{name} called {wrong}", "renamed", {**rest, wrong: tensor}
        shape = tensor[1]
        for what, other in (
            ("one row more", (shape[0] + 1, *shape[1:])),
            ("half the rows", (max(1, shape[0] // 2), *shape[1:])),
            ("transposed", shape[::-1]),
        ):
            if other != shape:
                yield f"{name}, {what}", "reshaped", {**rest, name: _reshape(tensor, other)}


def _build_config_faults(case: Case) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(what, kind, config): each key left out or misspelled, each size doubled; one level in."""
    config = dict(case.config)
    for key, value in config.items():
        rest = {name: other for name, other in config.items() if name != key}
        yield f"config without {key}", "key deleted", rest
        yield f"config: {key} called {key}x", "key renamed", {**rest, f"{key}x": value}
        if key in _SIZES:
            yield f"config: {key} doubled", "size changed", {**config, key: 2 * value}
        if isinstance(value, dict):
            for name in value:
                inner = {other: item for other, item in value.items() if other != name}
                yield f"config without {key}.{name}", "key deleted", {**config, key: inner}


_OF_TENSORS = ("ten.missing", "ten.extra", "ten.shape", "ten.dtype", "cfg.arch", "cfg.missing")
_ORDER = ("", "note", "warning", "error")


def _look(
    folder: Path, facts: TargetFacts, known: frozenset[tuple[str, str]] = frozenset()
) -> tuple[str, str, frozenset[tuple[str, str]]]:
    """(worst new severity, its message, all findings) of validate, which the reader must back."""
    found = validate_draft(folder, target=facts).findings
    new = [item for item in found if (item.rule, item.message) not in known]
    worst = max(new, key=lambda item: _ORDER.index(item.severity), default=None)
    seen = frozenset((item.rule, item.message) for item in found)
    if not any(item.severity == "error" for item in found):
        # one table, two doors: what validate lets pass, the reader must read
        assert _refuse(folder) is None, _refuse(folder)
    elif all(item.rule in _OF_TENSORS for item in found if item.severity == "error"):
        assert _refuse(folder) is not None, [item.message for item in found]
    return (worst.severity, worst.message, seen) if worst else ("", "", seen)


def _refuse(folder: Path) -> str | None:
    try:
        read_draft(folder)
    except DraftError as problem:
        return str(problem)
    return None


def hold_against_vllm(
    cases: tuple[Case, ...], work: Path, *, stride: int = 1, timeout_s: float = 300
) -> list[Outcome]:
    """Every case and its faults, by vLLM's loader (one child process for all) and by validate.

    stride: try every stride-th fault only, another one of each case.
    """
    asked, ours = [], []
    for number, case in enumerate(cases):
        place = work / f"case-{number}"  # no word of a method: vLLM reads methods out of paths
        question, told = _prepare(case, place, number % stride, stride)
        asked.append(question)
        ours.append(told)
    answers = _ask_vllm(asked, work, timeout_s)
    return [
        Outcome(
            case=case,
            tried=tuple(
                Tried(fault=what, kind=kind, told=worst, message=message, error=error)
                for (what, kind, worst, message), error in zip(told, errors, strict=True)
            ),
        )
        for case, told, errors in zip(cases, ours, answers, strict=True)
    ]


def _prepare(
    case: Case, place: Path, first: int, stride: int
) -> tuple[dict[str, Any], list[tuple[str, str, str, str]]]:
    """Writes the sound folder and all changed files; asks validate about each."""
    target, folder = place / "target", place / "draft"
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(case.target))
    facts = read_target(target, require_weights=False)
    tensors = build_tensors_of(case)
    write_folder(case, folder, tensors)
    worst, message, known = _look(folder, facts)
    told = [("", "sound", *((worst, message) if worst == "error" else ("", "")))]
    files: dict[str, list[str]] = {"weights": [], "configs": [], "folders": []}
    for name, kind_of_file in (("model.safetensors", "weights"), ("config.json", "configs")):
        path = folder / name
        if not case.with_faults or not path.is_file():
            continue
        kept = path.read_bytes()
        faults: list[tuple[str, str, Any]] = [
            *(_build_faults(tensors) if kind_of_file == "weights" else _build_config_faults(case))
        ]
        for what, kind, changed in faults[first::stride]:
            if kind_of_file == "weights":
                write_safetensors(path, changed)
            else:
                path.write_text(json.dumps(changed))
            worst, message, _ = _look(folder, facts, known)
            told.append((what, kind, worst, message))
            files[kind_of_file].append(str(place / f"{len(told)}-{name}"))
            path.rename(files[kind_of_file][-1])
        path.write_bytes(kept)
    if case.with_faults and _has_envelope(case):
        envelope = export_draft(read_draft(folder), place / "envelope", verifier="org/target")
        told.append(("as a speculators folder", "envelope", "", ""))
        files["folders"].append(str(envelope))
    settings = {"method": case.family, "num_speculative_tokens": 3, **case.settings}
    return {"target": str(target), "draft": str(folder), "settings": settings, **files}, told


def _has_envelope(case: Case) -> bool:
    return case.family in ("eagle3", "dflash") and "quantization_config" not in case.config


def _ask_vllm(asked: list[dict[str, Any]], work: Path, timeout_s: float) -> list[list[str | None]]:
    (work / "asked.json").write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, str(CHILD), str(work / "asked.json"), str(work / "answers.json")],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"vLLM's loader could not be asked: {done.stderr[-3000:]}")
    answers = json.loads((work / "answers.json").read_text())
    return [[*answer["weights"], *answer["configs"], *answer["folders"]] for answer in answers]
