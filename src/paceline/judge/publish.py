"""Raw runs -> the sealed result folder of one entry; and the folder that goes to the public."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ResultError
from paceline.eval import score_run
from paceline.judge.conduct import check_conduct, compare_orders, compare_sets, list_broken
from paceline.judge.home import Home
from paceline.judge.ledger import LEDGER_NAME, export_lines, parse_lines, read_key, read_lines
from paceline.judge.screen import Screen
from paceline.judge.seal import seal_result, seal_transcript, write_private
from paceline.records import atomic_folder, read_json, sha256_file, write_json
from paceline.report import write_report
from paceline.rules import Rules

__all__ = ["publish_entry", "publish_results", "read_verdict", "verify_results"]

VERDICT_NAME = "verdict.json"
ORDER_EFFECT = 0.02  # under rules of no contest


def publish_entry(
    home: Home,
    content_sha256: str,
    *,
    parts: Sequence[str],
    rules: Rules,
    screen: Screen,
    key: bytes,
) -> None:
    """Seals an entry's runs into results/<content_sha256>, all or nothing.

    Raises ResultError when the sealed result does not give the same score again.
    """
    work = home.work_dir(content_sha256)
    results = {part: seal_result(work / part, screen=screen, key=key) for part in parts}
    transcripts = {
        part: write_private(
            home.private_dir(content_sha256) / f"{part}.jsonl",
            seal_transcript(work / part, key=key),
        )
        for part in parts
    }
    with atomic_folder(home.result_dir(content_sha256), replace=True) as folder:
        write_json(folder / "result.json", results["hidden"])
        score_run(folder)  # from the sealed file alone, as anybody can
        write_report(folder)
        write_json(
            folder / VERDICT_NAME,
            {
                "score": results["hidden"].get("score"),
                "result_sha256": sha256_file(folder / "result.json"),
                "transcripts_sha256": transcripts,
                **_judge_conduct(results, rules),
            },
        )


def _judge_conduct(results: Mapping[str, Mapping[str, Any]], rules: Rules) -> dict[str, Any]:
    conduct = check_conduct(results["hidden"], rules)
    orders = None
    if "shuffled" in results:
        orders = compare_orders(
            results["hidden"],
            results["shuffled"],
            noise=rules.contest.max_order_effect if rules.contest else ORDER_EFFECT,
            confidence=rules.statistics.confidence,
        )
    twin = compare_sets(results["hidden"], results["twin"]) if "twin" in results else None
    withheld = list_broken(conduct)
    if orders and orders["same"] is False:
        withheld.append("acceptance depends on the order of requests: state is kept across them")
    notes = []
    if twin and twin["suspicious"]:
        notes.append(
            f"acceptance on the public twin set is {twin['gap']:.2f} of what the hidden set gives, "
            "measured against the baseline"
        )
    return {
        "conduct": conduct,
        "orders": orders,
        "twin": twin,
        "withheld": withheld,
        "notes": notes,
    }


def read_verdict(home: Home, content_sha256: str) -> dict[str, Any]:
    """What the ledger takes over of a sealed result."""
    verdict = read_json(home.result_dir(content_sha256) / VERDICT_NAME)
    score = verdict.pop("score")
    if score is not None:
        score = {name: score.get(name) for name in ("value", "low", "high", "ranked", "reasons")}
    return {"score": score, **verdict}


def publish_results(home: Home, lines: Sequence[str], out: str | Path) -> int:
    """Writes the public folder: the ledger, and a folder an entry; returns how many entries.

    lines: the ledger, from the queue. The folder appears whole; an earlier one of this judge is
    replaced, anything else is left alone. Raises ResultError when a result is not what was signed.
    """
    out = Path(out)
    if out.exists() and not (out / LEDGER_NAME).exists() and any(out.iterdir()):
        raise ResultError(
            "the folder holds something else",
            where=str(out),
            expected="a new folder, or one that `paceline judge publish` wrote",
        )
    key = read_key(home.key_path)
    export_lines(home.ledger_path, lines)
    bodies = parse_lines(lines, where=str(home.ledger_path), key=key)
    num_entries = 0
    with atomic_folder(out, replace=True) as folder:
        for body in bodies:
            if body["kind"] == "result" and body["state"] == "done":
                own = home.result_dir(body["content_sha256"])
                _require_signed(own / "result.json", body)
                shutil.copytree(own, folder / "entries" / body["content_sha256"][:16])
                num_entries += 1
        export_lines(folder / LEDGER_NAME, lines)
    return num_entries


def verify_results(path: str | Path, *, key_path: str | Path | None = None) -> dict[str, Any]:
    """Checks a ledger file or published folder: chain, signatures, results.

    Returns {"num_lines", "num_results", "signatures": "checked" | "not checked: no key"}.
    Raises ResultError naming the first thing that is wrong.
    """
    path = Path(path)
    ledger = path / LEDGER_NAME if path.is_dir() else path
    key = None if key_path is None else read_key(key_path)
    bodies = parse_lines(read_lines(ledger), where=str(ledger), key=key)
    num_results = 0
    for body in bodies:
        folder = ledger.parent / "entries" / str(body["content_sha256"])[:16]
        if body["kind"] == "result" and body["state"] == "done" and folder.exists():
            _require_signed(folder / "result.json", body)
            num_results += 1
    return {
        "num_lines": len(bodies),
        "num_results": num_results,
        "signatures": "checked" if key else "not checked: no key",
    }


def _require_signed(path: Path, body: Mapping[str, Any]) -> None:
    if not path.is_file() or sha256_file(path) != body["result_sha256"]:
        raise ResultError(
            "is not the result that was signed",
            where=str(path),
            expected=f"a file of sha256 {str(body['result_sha256'])[:16]}",
        )
