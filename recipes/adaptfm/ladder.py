"""From the unoptimised target to the fastest settings, one change a rung, in one run on one device.

    python recipes/adaptfm/ladder.py --work WORK --out bench/results/ladder-h200.json --minutes 25
    python recipes/adaptfm/ladder.py --work WORK --out LADDER.json --tiny        on a laptop
    python recipes/adaptfm/ladder.py --render bench/results/ladder-h200.json     the page's section

`smollm2` on real weights and unique prompts, then the Qwen3.5-4B shape on dummy weights. Most
important rungs first, then the best of all beside the baseline again; --first N leaves out what
comes after N. A finished rung lies in WORK and is not measured again, so the same command goes on
where it was stopped, killed included. --at-once engines start together, ahead of their turn; while
one is timed nothing starts. A rung that cannot run has its reason and stops no other. The W4A16
target is made in WORK while the first engines start, on --data where answers were made before, or
handed in with --quantised. Start with the device alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from ladder_engines import begin_quantising, open_together, say
from ladder_page import print_table, write_section
from rungs import SHAPE, SMOLLM2, Opener, Rung, build_best, prepare_shape, prepare_target

from paceline.cli.bench import read_bench_text, read_regimes
from paceline.endpoint import Answer, Request
from paceline.errors import PacelineError, PlanError
from paceline.eval import (
    Regime,
    ask_endpoint,
    build_bench_requests,
    compare_arms,
    measure_arm,
)
from paceline.forecast import read_shape
from paceline.records import build_provenance, read_json, sha256_bytes, write_json
from paceline.serve import VllmEndpoint, find_device, find_machine, measure_host_overhead
from paceline.target import TargetFacts, read_target

HERE = Path(__file__).resolve().parent
FORMAT = "paceline-ladder/1"
NUM_WARM_UP = 2
LAST = "eager-again"
REGIMES = {
    "smollm2": ("64:128", "2048:256", "7900:256"),  # it has 8,192 positions
    "qwen3.5-4b": ("64:128", "2048:256", "8192:256"),
}
TINY_REGIMES = ("64:16", "192:16")
_DUMMY = {
    "cuda": "dummy: text means nothing, acceptance is decreed",
    "cpu": "dummy: text means nothing, nor does acceptance, which vLLM's CPU build cannot be told",
}
Requests = Mapping[Regime, tuple[Sequence[Request], Sequence[Request]]]


def main() -> None:
    options = read_options()
    if options.render is not None:
        write_section(options.render, HERE.parents[1] / "docs" / "results" / "adaptfm.md")
        return
    begun = time.monotonic()
    device = options.device or find_device()
    parts = {}
    for name in options.part or list(REGIMES):
        regimes = read_regimes(list(TINY_REGIMES if options.tiny else REGIMES[name]))
        part = Part(name, regimes, options, device)
        print(f"== {name} on {part.machine}", flush=True)
        part.measure(lambda: time.monotonic() - begun < options.minutes * 60)
        parts[name] = part.build()
        ladder = {
            "format": FORMAT,
            "provenance": build_provenance(seed=0),
            "machine": part.machine,
            "num_requests": options.requests,
            "parts": parts,
        }
        write_json(options.out, ladder)
    print_table(ladder)
    print(f"every number: {options.out}")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, help="Finished rungs, logs, the W4A16 target.")
    parser.add_argument("--out", type=Path, help="The ladder as JSON, written after each part.")
    parser.add_argument("--minutes", type=float, default=1e9, help="No rung begins afterwards.")
    parser.add_argument("--at-once", type=int, help="Engines started together; 8 on CUDA, else 1.")
    parser.add_argument("--requests", type=int, default=8, help="Measured requests a regime.")
    parser.add_argument("--quantised", type=Path, help="A W4A16 folder of smollm2.")
    parser.add_argument("--data", type=Path, help="Its answers, to quantise on: none are made.")
    parser.add_argument("--first", type=int, help="Only so many rungs, and the best of them.")
    parser.add_argument("--answers", type=int, default=1024, help="To quantise on, if it is made.")
    parser.add_argument("--part", action="append", choices=list(REGIMES))
    parser.add_argument("--device")
    parser.add_argument("--tiny", action="store_true", help="Short regimes, a shape of 4 layers.")
    parser.add_argument("--render", type=Path, help="Writes a ladder into docs/results/adaptfm.md.")
    options = parser.parse_args()
    if options.render is None and (options.work is None or options.out is None):
        parser.error("--work and --out are needed")
    return options


class Part:
    """One target's ladder: its rungs, its prompts, and a folder with a file a finished rung."""

    def __init__(
        self, name: str, regimes: tuple[Regime, ...], options: argparse.Namespace, device: str
    ) -> None:
        self.name, self.regimes, self.device, self.options = name, regimes, device, options
        self.machine = find_machine(device)
        self.folder: Path = options.work / name
        self.is_shape = name != "smollm2"
        self.rungs = list(SHAPE if self.is_shape else SMOLLM2)
        self.target = read_shape_target(name, options.tiny) if self.is_shape else read_target(name)
        self.requests = self._build_requests()
        self.at_once = options.at_once or (1 if device == "cpu" else 8)
        self.quantised: Path | None = options.quantised
        self._quantising: subprocess.Popen[bytes] | None = None
        self._require_same()

    def _build_requests(self) -> Requests:
        each = NUM_WARM_UP + self.options.requests
        total = sum(regime.prompt_tokens for regime in self.regimes) * each
        if self.is_shape:
            ids = np.random.default_rng(0).integers(1000, self.target.vocab_size, total).tolist()
            text: tuple[Any, Any] = (ids, ((), ()))
        else:
            text = read_bench_text(self.target, "none", total)
        return build_bench_requests(
            *text,
            self.regimes,
            num_requests=self.options.requests,
            num_warm_up=NUM_WARM_UP,
            repeated=False,
        )

    def _require_same(self) -> None:
        """What lies in the folder belongs to this machine, target and prompts. Raises PlanError."""
        prompts = [
            row.prompt_ids for rows in self.requests.values() for row in (*rows[0], *rows[1])
        ]
        mine = {
            "machine": self.machine,
            "target": self.target.weights_fingerprint or sha256_bytes(repr(self.target).encode()),
            "regimes": [regime.name for regime in self.regimes],
            "prompts_sha256": sha256_bytes(repr(prompts).encode()),
        }
        if self.is_shape:  # where its config lies is no fact of it
            mine["target"] = sha256_bytes(repr(sorted(self.target.config.items())).encode())
        path = self.folder / "run.json"
        if path.exists() and read_json(path) != mine:
            raise PlanError(
                "another run lies here",
                where=str(path),
                expected="the same machine, target, regimes and prompts",
                fix="Name another --work.",
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, mine)
        self.prompts_sha256 = mine["prompts_sha256"]

    def measure(self, has_time: Callable[[], bool]) -> None:
        """Every rung that has no file yet; then the best of all, and the baseline again."""
        last = [rung for rung in self.rungs if rung.name == LAST]
        first = [rung for rung in self.rungs if rung.name != LAST][: self.options.first]
        todo = [rung for rung in first if self._read(rung) is None]
        wanted = not self.is_shape and any(rung.quantised for rung in todo)
        try:
            if wanted and self.quantised is None and has_time():
                self.quantised, self._quantising = begin_quantising(
                    self.target,
                    self.folder / "w4a16",
                    device=self.device,
                    data=self.options.data,
                    num_answers=self.options.answers,
                )
            self._measure(todo, has_time)
        finally:
            if self._quantising is not None:  # no time was left to wait for it
                self._quantising.kill()
                self._quantising.wait()
        measured, gains = self._gains()
        if "eager" in measured:
            best = build_best(self.rungs, gains, max(measured, key=lambda name: measured[name]))
            if best is not None:
                self.rungs.append(best)
                last.insert(0, best)
        if rest := [rung for rung in last if self._read(rung) is None]:
            self._measure(rest, has_time)

    def _measure(self, todo: Sequence[Rung], has_time: Callable[[], bool]) -> None:
        left = list(todo)
        while left and has_time():
            # what needs the quantised target waits for the next batch while it is made
            batch = [one for one in left if not (one.quantised and self._quantising)]
            if not batch:
                self._end_quantising()
                continue
            batch = batch[: self.at_once]
            left = [one for one in left if one not in batch]
            self._measure_batch(batch, has_time)

    def _end_quantising(self) -> None:
        """Waits for the quantised target where it is being made; without it, its rungs say so."""
        if self._quantising is not None and self._quantising.wait():
            self.quantised = None
        self._quantising = None

    def _measure_batch(self, batch: Sequence[Rung], has_time: Callable[[], bool]) -> None:
        ready: list[tuple[Rung, Opener]] = []
        for rung in batch:
            try:
                ready.append((rung, self._prepare(rung)))
            except PacelineError as problem:
                self._keep(rung, {"reason": one_line(problem)})
        if not ready:
            return
        say(f"starting {', '.join(rung.name for rung, _ in ready)}")
        with open_together(ready, self.folder / "logs") as opened:
            self._end_quantising()  # nothing else runs while one is timed
            for rung, endpoint in opened:
                if not has_time():
                    return
                self._keep(rung, self._measure_one(endpoint))

    def _measure_one(self, endpoint: VllmEndpoint | PacelineError) -> dict[str, Any]:
        if isinstance(endpoint, PacelineError):
            return {"reason": one_line(endpoint)}
        answers: dict[str, Answer] = {}
        ask = ask_endpoint(endpoint, on_answer=lambda a: answers.update({a.request_id: a}))
        try:
            regimes = measure_arm(ask, self.requests, gpu=self.device == "cuda")
            kernels = endpoint.kernels()
        except PacelineError as problem:
            return {"reason": one_line(problem)}
        texts = {name: list(answer.output_ids) for name, answer in answers.items()}
        found = {"regimes": regimes, "engine": asdict(endpoint.facts), "kernels": kernels}
        return {**found, "host": self._measure_host(endpoint), "texts": texts}

    def _measure_host(self, endpoint: VllmEndpoint) -> dict[str, float] | None:
        """Of the first regime's first request; None where it cannot be measured."""
        if self.is_shape:
            return None  # its engine has no clock
        try:
            found = measure_host_overhead(endpoint, next(iter(self.requests.values()))[0][0])
        except PacelineError:  # a profiler may be forbidden; what was measured before stands
            return None
        return None if found is None else {**asdict(found), "host_ms": found.host_ms}

    def _prepare(self, rung: Rung) -> Opener:
        length = max(regime.prompt_tokens + regime.new_tokens for regime in self.regimes)
        if self.is_shape:
            return prepare_shape(rung, self.target, length=length, device=self.device)
        quantised = self.quantised
        return prepare_target(rung, self.target, quantised, length=length, device=self.device)

    def _path(self, rung: Rung) -> Path:
        return self.folder / f"{rung.name}.json"

    def _keep(self, rung: Rung, found: Mapping[str, Any]) -> None:
        if "reason" in found:
            say(f"{rung.name}: {found['reason']}")
        else:
            medians = [f"{row['latency_ms']['median']:,.0f} ms" for row in found["regimes"]]
            say(f"{rung.name}: {', '.join(medians)}")
        write_json(self._path(rung), {"rung": asdict(rung), **found})

    def _read(self, rung: Rung) -> dict[str, Any] | None:
        """The rung's file; None for none, for other settings, or where it had a reason."""
        if not self._path(rung).exists():
            return None
        found = read_json(self._path(rung))
        same = found["rung"] == asdict(rung)
        return found if same and "reason" not in found else None

    def _gains(self) -> tuple[dict[str, float], dict[str, float]]:
        """(rung -> mean speed-up over the baseline, rung -> what it alone surely gave)."""
        built = self.build()["rungs"]
        speed = {row["name"]: row["speedup"]["mean"] for row in built if row.get("speedup")}
        gains = {
            row["name"]: row["gave"]["mean"]
            for row in built
            if row.get("gave") and (row["gave"]["low"] or 0.0) > 1.0
        }
        return speed, gains

    def build(self) -> dict[str, Any]:
        """The part of the ladder: what every rung is, what it measured and what it gave."""
        found = {rung.name: self._read(rung) for rung in self.rungs}
        plain = found["eager"]
        rows = []
        for rung in self.rungs:
            row: dict[str, Any] = {**asdict(rung), "over": self._standing_on(rung, found)}
            own = found[rung.name]
            if own is None or plain is None:
                row["reason"] = self._find_reason(rung) if own is None else "there is no baseline"
                rows.append(row)
                continue
            below = found.get(row["over"] or "")
            row["speedup"] = compare_arms(plain["regimes"], own["regimes"])
            row["gave"] = compare_arms(below["regimes"], own["regimes"]) if below else None
            row["same_texts"] = None if self.is_shape else count_same(plain["texts"], own["texts"])
            row["host"], row["engine"], row["kernels"] = own["host"], own["engine"], own["kernels"]
            row["regimes"] = [shorten(record) for record in own["regimes"]]
            rows.append(row)
        return {
            "target": self.target.name,
            "weights": _DUMMY[self.device] if self.is_shape else "real",
            "tiny": self.options.tiny,
            "prompts": "unique",
            "prompts_sha256": self.prompts_sha256,
            "rungs": rows,
        }

    def _standing_on(self, rung: Rung, found: Mapping[str, Any]) -> str | None:
        """The nearest rung below that was measured."""
        by_name = {one.name: one for one in self.rungs}
        over = rung.over
        while over is not None and found.get(over) is None:
            over = by_name[over].over
        return over

    def _find_reason(self, rung: Rung) -> str:
        if self._path(rung).exists():
            return str(read_json(self._path(rung)).get("reason") or "not run yet")
        return "not run yet"


def read_shape_target(name: str, tiny: bool) -> TargetFacts:
    """The bundled shape; tiny: four layers, a vocabulary of 8,192."""
    facts = read_shape(name).facts
    if not tiny:
        return facts
    small = {"num_hidden_layers": 4, "vocab_size": 8192, "hidden_size": 512}
    small |= {"intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    # the engine and the plan read the config; these are what the pool's size is read from
    return replace(
        facts,
        config={**facts.config, **small},
        layer_types=facts.layer_types[:4],
        num_hidden_layers=4,
        vocab_size=8192,
        num_key_value_heads=2,
    )


def count_same(plain: Mapping[str, list[int]], other: Mapping[str, list[int]]) -> list[int]:
    """[greedy answers equal to the baseline's, answers]."""
    return [sum(other[name] == ids for name, ids in plain.items()), len(plain)]


def shorten(record: Mapping[str, Any]) -> dict[str, Any]:
    """A regime's record with one number a request, enough for every interval."""
    rows = record["requests"]
    return {**record, "requests": [{"latency_ms": row["latency_ms"]} for row in rows]}


def one_line(problem: PacelineError) -> str:
    return " ".join(str(problem).split())[:600]


if __name__ == "__main__":
    try:
        main()
    except PacelineError as problem:
        sys.exit(f"error: {problem}")
