"""One million generated headers and JSON documents through the strict readers, without a fault.

    python bench/fuzz_readers.py [--cases 1000000] [--seed 0] [--keep]     (make bench runs it so)

Half are safetensors files, half JSON documents: mutations that know the structure
(tests/mutations.py) of the corpus in tests/corpus/readers. Whatever JSON is read goes on to the
checks of spec.json, config.json or the shard index. A fault is any exception. What our reader
accepts must be what the public readers (safetensors, json) make of the same bytes. Then five cases
in a hundred more are files of torch.save, held against torch.load, and one in a hundred goes
through the whole static validator, as one file of a draft folder of any family. Prints one JSON
object; with --keep it joins the other seeds in
bench/results/fuzz_readers.json. Exit 1 after any fault, or a case that takes half a second of the
processor.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from contract_cases import CASES, build_tensors_of, write_folder  # noqa: E402
from mutations import (  # noqa: E402
    CORPUS,
    mutate_archive,
    mutate_document,
    mutate_header,
    read_corpus,
)
from torch_files import build_plain  # noqa: E402

from paceline.draft import (  # noqa: E402
    SPEC_KEYS,
    build_contract,
    check_tensors,
    parse_mask_embedding,
    read_draft,
)
from paceline.draft.index import check_index  # noqa: E402
from paceline.draft.spec import check_spec  # noqa: E402
from paceline.errors import DraftError  # noqa: E402
from paceline.problems import Problem  # noqa: E402
from paceline.records import build_provenance, write_json  # noqa: E402
from paceline.rules import read_rules  # noqa: E402
from paceline.safetensors_header import Header, scan_header  # noqa: E402
from paceline.strict_json import scan_json  # noqa: E402
from paceline.target import TargetFacts, read_target  # noqa: E402
from paceline.validate import render_junit, validate_draft  # noqa: E402

SLOW_S = 0.5
RULES = read_rules("emc2-2027")


class Tally:
    """Counts of a run, and the first few cases that went wrong."""

    def __init__(self) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong: list[dict[str, str]] = []
        self.slowest_s = 0.0

    def note(self, kind: str, problems: list[Problem], seconds: float) -> None:
        self.slowest_s = max(self.slowest_s, seconds)
        for rule in {problem.rule for problem in problems} or {"accepted"}:
            self.outcomes[f"{kind} {rule}"] += 1

    def blame(self, what: str, seed: str, detail: str) -> None:
        self.outcomes[what] += 1
        if len(self.wrong) < 10:
            self.wrong.append({"what": what, "case": seed, "detail": detail[-800:]})


def run_headers(tally: Tally, cases: int, seed: int, place: Path) -> None:
    from safetensors import deserialize

    corpus, random = read_corpus("headers"), Random(f"{seed} headers")
    contract = build_contract("eagle3", json.loads((CORPUS / "documents" / "config").read_bytes()))
    for number in range(cases):
        data = mutate_header(random, corpus)
        place.write_bytes(data)
        case = f"headers {seed} {number}"
        began = time.process_time()
        try:
            header, problems = scan_header(place)
            tally.note("header", problems, time.process_time() - began)
            if header is not None:
                check_tensors(contract, {place.name: header.tensors})
                check_index(
                    {"weight_map": dict.fromkeys(header.tensors, place.name)},
                    True,
                    {place.name: header},
                    [place.name],
                )
        except Exception:
            tally.blame("fault", case, traceback.format_exc())
            continue
        if header is None or problems:
            continue
        try:
            theirs = deserialize(data)
        except Exception as error:
            tally.blame("accepted, but safetensors refuses it", case, str(error))
            continue
        if not _agree(header, data, theirs):
            tally.blame("accepted, but safetensors reads another thing", case, repr(data[:300]))


def _agree(header: Header, data: bytes, theirs: list[tuple[str, dict[str, Any]]]) -> bool:
    if {name for name, _ in theirs} != set(header.tensors):
        return False
    for name, tensor in theirs:
        own = header.tensors[name]
        if own.dtype != tensor["dtype"] or own.shape != tuple(tensor["shape"]):
            return False
        if data[own.start : own.end] != bytes(tensor["data"]):
            return False
    return True


def _consume(value: Any) -> None:
    """What the draft room does with a document of any of its files."""
    if not isinstance(value, dict):
        return
    check_spec(value)
    check_index(value, True, {}, ["model.safetensors", "model-00001-of-00002.safetensors"])
    for family in SPEC_KEYS:
        try:
            build_contract(family, value)
        except DraftError:
            continue


def run_documents(tally: Tally, cases: int, seed: int) -> None:
    corpus, random = read_corpus("documents"), Random(f"{seed} documents")
    for number in range(cases):
        data = mutate_document(random, corpus)
        case = f"documents {seed} {number}"
        began = time.process_time()
        try:
            value, problems = scan_json(data, file="config.json")
            tally.note("document", problems, time.process_time() - began)
            _consume(value)
        except Exception:
            tally.blame("fault", case, traceback.format_exc())
            continue
        if problems:
            continue
        try:
            theirs = json.loads(data)
        except ValueError as error:
            tally.blame("accepted, but json refuses it", case, str(error))
            continue
        if repr(theirs) != repr(value):
            tally.blame("accepted, but json reads another thing", case, repr(data[:300]))


def run_archives(tally: Tally, cases: int, seed: int) -> None:
    """Files of torch.save, whose pickle is never run here; torch must read what is accepted."""
    import io

    import torch

    random, corpus = Random(f"{seed} archives"), [build_plain(), build_plain(token=3)]
    for number in range(cases):
        data = mutate_archive(random, corpus)
        case = f"archives {seed} {number}"
        began = time.process_time()
        try:
            saved = parse_mask_embedding(data)
        except DraftError:
            tally.outcomes["archive refused"] += 1
            tally.slowest_s = max(tally.slowest_s, time.process_time() - began)
            continue
        except Exception:
            tally.blame("fault", case, traceback.format_exc())
            continue
        tally.note("archive", [], time.process_time() - began)
        try:
            state = torch.load(io.BytesIO(data), weights_only=True)
            row = state["embedding"] if isinstance(state, dict) else state
            raw = row.detach().contiguous().view(torch.uint8).numpy().tobytes()
        except Exception as error:
            tally.blame("accepted, but torch refuses it", case, str(error))
            continue
        if raw != data[saved.tensor.start : saved.tensor.end]:
            tally.blame("accepted, but torch reads another thing", case, repr(data[:300]))


def build_bases(place: Path) -> list[tuple[Path, TargetFacts]]:
    """A sound draft of every family and variant, one in shards, each with its target."""
    bases = []
    for number, case in enumerate(CASES):
        folder, target = place / f"{number}" / "draft", place / f"{number}" / "target"
        write_folder(case, folder, build_tensors_of(case))
        target.mkdir()
        (target / "config.json").write_text(json.dumps(case.target))
        bases.append((folder, read_target(target, require_weights=False)))
    return bases


def run_folders(tally: Tally, cases: int, seed: int, place: Path) -> None:
    """The whole static validator, and the reader, over drafts of which one file is mutated."""
    bases, random = build_bases(place.parent), Random(f"{seed} folders")
    sound = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder, _ in bases]
    for number in range(cases):
        turn = number % len(bases)
        folder, target = bases[turn]
        name = random.choice(sorted(sound[turn]))
        mutate = mutate_header if name.endswith(".safetensors") else mutate_document
        (folder / name).write_bytes(mutate(random, [sound[turn][name]]))
        began = time.process_time()
        try:
            report = validate_draft(folder, target=target, rules=RULES)
            tally.note(f"folder {report.verdict}", [], time.process_time() - began)
            json.dumps(report.to_json_dict()).encode("utf-8")
            render_junit(report, name="fuzz").encode("utf-8")
            try:
                read_draft(folder)
            except DraftError as error:
                uncovered = any(item.rule == "cfg.contract" for item in report.findings)
                if report.verdict != "fail" and not uncovered:
                    tally.blame("passed, but read_draft refuses it", name, str(error))
        except Exception:
            tally.blame("fault", f"folders {seed} {number} {name}", traceback.format_exc())
        (folder / name).write_bytes(sound[turn][name])


def keep(figures: dict[str, Any]) -> None:
    place = Path(__file__).parent / "results" / "fuzz_readers.json"
    earlier = json.loads(place.read_text())["runs"] if place.exists() else []
    runs = [run for run in earlier if run["seed"] != figures["seed"]] + [figures]
    totals = {name: sum(run[name] for run in runs) for name in ("cases", "folders", "faults")}
    write_json(place, {"provenance": build_provenance(), **totals, "runs": runs})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    tally, half = Tally(), options.cases // 2
    counts = {"headers": half, "documents": half, "archives": half // 10, "folders": half // 50}
    parts: tuple[tuple[str, Callable[[Path], None]], ...] = (
        ("headers", lambda place: run_headers(tally, half, options.seed, place)),
        ("documents", lambda place: run_documents(tally, half, options.seed)),
        ("archives", lambda place: run_archives(tally, counts["archives"], options.seed)),
        ("folders", lambda place: run_folders(tally, counts["folders"], options.seed, place)),
    )
    rates: dict[str, int] = {}
    memory = Path("/dev/shm")  # files that never reach a disk
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for name, work in parts:
            began = time.monotonic()
            work(Path(folder) / "case.safetensors")
            rates[f"{name}_per_s"] = round(counts[name] / max(time.monotonic() - began, 1e-9))
    figures = {
        "cases": 2 * half,
        "archives": counts["archives"],
        "folders": counts["folders"],
        "seed": options.seed,
        **rates,
        "slowest_ms": round(tally.slowest_s * 1000, 1),
        "faults": tally.outcomes["fault"],
        "disagreements": sum(n for what, n in tally.outcomes.items() if ", but " in what),
        "wrong": tally.wrong,
        "outcomes": dict(sorted(tally.outcomes.items())),
    }
    print(json.dumps(figures, indent=2))
    if options.keep:
        keep(figures)
    if tally.wrong or tally.slowest_s > SLOW_S:
        sys.exit(1)


if __name__ == "__main__":
    main()
