"""Recomputes a run's numbers from its files and refuses a file that does not add up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, ResultError
from paceline.eval.assemble import compare_with_plain, describe_protocol
from paceline.eval.conditions import describe_cache
from paceline.eval.entries import build_entries, sum_counters, summarise_arm
from paceline.eval.pairing import included_for_tpot
from paceline.eval.result import RESULT_FORMAT, RESULT_NAME, build_verdict, describe_counters
from paceline.eval.transcript import REQUESTS_NAME, read_transcript
from paceline.records import read_json, sha256_bytes
from paceline.rules import Rules, parse_rules

__all__ = ["score_run"]

_RELATIVE = 1e-9
_MEMORY_PARTS = ("weights_bytes", "buffers_bytes", "kv_bytes", "state_bytes")


def score_run(run_dir: str | Path) -> dict[str, Any]:
    """The result with its score recomputed from result.json alone; the rules are in that file.

    Each arm is recomputed from its requests, the ratios from the arms, the score from the ratios;
    where requests.jsonl is there, the requests of result.json are checked against it. Raises
    ResultError naming the first number that differs from what is written.
    """
    path = Path(run_dir) / RESULT_NAME
    result = read_json(path, expected="a run folder, as `paceline eval --out` writes it")
    if result.get("format") != RESULT_FORMAT:
        raise ResultError(
            f"format is {result.get('format')!r}", where=str(path), expected=repr(RESULT_FORMAT)
        )
    try:
        score = _recompute(result, path)
        requests = Path(run_dir) / REQUESTS_NAME
        if requests.exists():
            _check_requests(result, requests, _read_rules(result, path))
    except PacelineError:
        raise
    except (
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        ValueError,
        ArithmeticError,
    ) as problem:
        raise ResultError(
            f"a part is missing or of the wrong kind: {problem!r}",
            where=str(path),
            fix="Restore the file, or run paceline eval again.",
        ) from problem
    return {**result, "score": score}


def _recompute(result: dict[str, Any], path: Path) -> dict[str, Any] | None:
    rules = _read_rules(result, path)
    arms = result["arms"]
    entries = {name: arm["requests"] for name, arm in arms.items()}
    included, _ = included_for_tpot(entries, min_tokens=rules.protocol.min_tokens_for_tpot)
    for name, arm in arms.items():
        where = f"{path}: arms.{name}"
        k = arm["engine"]["num_speculative_tokens"]
        figures = summarise_arm(arm["requests"], rules, included=included, num_speculative_tokens=k)
        from_requests = figures.pop("from_requests")
        for key, value in figures.items():
            _require_same(f"{where}.{key}", arm[key], value)
        if arm["vllm"] is not None:
            _require_same(
                f"{where}.vllm.from_requests", arm["vllm"]["from_requests"], from_requests
            )
        if arm["memory"] is not None:
            total = sum(arm["memory"][part] for part in _MEMORY_PARTS)
            _require_same(f"{where}.memory.total_bytes", arm["memory"]["total_bytes"], total)
    _require_same(f"{path}: cache_state", result["cache_state"], describe_cache(arms, rules)[0])
    verdict = build_verdict(result, rules, seed=result["seed"])
    if _is_older(result):
        _require_same_values(path, result, verdict)
    else:
        _require_same(f"{path}: ratios", result["ratios"], verdict["ratios"])
        _require_same(f"{path}: withheld", result["withheld"], verdict["withheld"])
        _require_same(f"{path}: score", result["score"], verdict["score"])
    score: dict[str, Any] | None = verdict["score"]
    return score


def _is_older(result: Mapping[str, Any]) -> bool:
    """Written when intervals were percentiles and no arm was withheld."""
    return "withheld" not in result


def _require_same_values(path: Path, result: Mapping[str, Any], verdict: Mapping[str, Any]) -> None:
    """An older result's values hold; its intervals were another method's and are made anew."""
    for key in ("tau", "memory", "tpot"):
        written, own = result["ratios"] or {}, verdict["ratios"] or {}
        if key in written or key in own:
            where = f"{path}: ratios.{key}.value"
            _require_same(where, written[key]["value"], own[key]["value"])
    if result["score"] is not None and verdict["score"] is not None:
        _require_same(f"{path}: score.value", result["score"]["value"], verdict["score"]["value"])


def _read_rules(result: Mapping[str, Any], path: Path) -> Rules:
    text = result["rules"]["text"]
    _require_same(
        f"{path}: rules.sha256", result["rules"]["sha256"], sha256_bytes(text.encode("utf-8"))
    )
    rules = parse_rules(text, where=f"{path}: rules.text")
    for key in ("name", "version", "provisional"):
        own = getattr(rules, key)
        own = list(own) if isinstance(own, tuple) else own
        _require_same(f"{path}: rules.{key}", result["rules"][key], own)
    return rules


def _check_requests(result: Mapping[str, Any], path: Path, rules: Rules) -> None:
    """The entries and vLLM's figures in result.json against requests.jsonl."""
    transcript = read_transcript(path.parent)
    measured = {n: arm for n, arm in result["arms"].items() if n not in result["aliases"]}
    ks = {name: arm["engine"]["num_speculative_tokens"] for name, arm in measured.items()}
    for name, entries in build_entries(transcript, ks).items():
        where = f"{path.with_name(RESULT_NAME)}: arms.{name}"
        arm = measured[name]
        written = [{"block": 0, **entry} for entry in arm["requests"]]
        _require_same(f"{where}.requests", written, entries)
        from_requests = arm["vllm"]["from_requests"] if arm["vllm"] else None
        own = describe_counters(sum_counters(transcript, name), from_requests, ks[name])
        for key, value in own.items():
            _require_same(f"{where}.{key}", arm[key], value)
    if "protocol" in result:
        where = f"{path.with_name(RESULT_NAME)}: protocol"
        own = describe_protocol(transcript, None)
        for key in ("loads", "voids"):
            _require_same(f"{where}.{key}", result["protocol"][key], own[key])
    if _is_older(result):
        return
    fidelity = compare_with_plain(transcript, result["sampling"], rules)
    for name, value in (fidelity or {}).items():
        _require_same(
            f"{path.with_name(RESULT_NAME)}: fidelity.{name}", result["fidelity"][name], value
        )


def _require_same(where: str, written: Any, computed: Any) -> None:
    """Equal within 1e-9 (relative) at every depth. Raises ResultError naming the field."""
    if isinstance(computed, Mapping) and isinstance(written, Mapping):
        for key in sorted(computed.keys() | written.keys()):
            if key not in computed or key not in written:
                raise ResultError("is there in one place only", where=f"{where}.{key}")
            _require_same(f"{where}.{key}", written[key], computed[key])
        return
    if isinstance(computed, list) and isinstance(written, list):
        if len(computed) != len(written):
            raise ResultError(f"has {len(written)} items", where=where, expected=f"{len(computed)}")
        for index, (a, b) in enumerate(zip(written, computed, strict=True)):
            _require_same(f"{where}[{index}]", a, b)
        return
    numbers = isinstance(written, int | float) and isinstance(computed, int | float)
    same = (
        math.isclose(written, computed, rel_tol=_RELATIVE, abs_tol=1e-12)
        if numbers and not isinstance(written, bool)
        else written == computed
    )
    if not same:
        raise ResultError(
            f"is {written!r}, but the run's own data give {computed!r}",
            where=where,
            fix="The file was changed after it was written; restore it or measure again.",
        )
