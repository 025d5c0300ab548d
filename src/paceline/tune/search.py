"""The search: method, then K, then one setting at a time; each against the best so far, paired.

Every trial is one fresh engine that answers the same requests, so ratios are over paired prompts.
A trial whose greedy texts are not the target's (paceline.eval's fidelity gate) counts for nothing,
however fast it is. What the target alone differs by between two starts is the noise floor: a
smaller difference is a tie, and a tie changes nothing. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from paceline.errors import EngineError, PlanError
from paceline.eval import compare_arms
from paceline.tune.journal import Journal
from paceline.tune.settings import Settings
from paceline.tune.space import Knob, Situation, build_knobs, neighbours_of_k, vary

__all__ = ["Bench", "Outcome", "Row", "search"]

NOISE_KEY = "noise"
_STREAM_INTERVAL = 8  # tokens a piece
BASELINE = Settings()
Trial = Mapping[str, Any]


class Bench(Protocol):
    """What measures; `paceline tune` has one of real engines."""

    def measure(self, settings: Settings) -> dict[str, Any]:
        """ "regimes" (records of eval), "texts", "k", "method" of one fresh engine.

        Raises PlanError and EngineError for settings that cannot be served.
        """
        ...

    def judge(
        self, plain: Trial, trials: Sequence[Trial], *, again: bool
    ) -> tuple[list[list[str]], list[dict[str, Any]] | None]:
        """Why each trial's texts are not the target's (empty: they are), by the target alone.

        again: also measures the target once more; its records.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trial in the table. verdict: baseline, faster, slower, tie, withheld, failed, not
    measured (against the best before it); speedup and ratio as `compare_arms` gives them."""

    stage: str
    label: str
    settings: Settings
    verdict: str
    why: str = ""
    k: int | None = None
    speedup: Mapping[str, Any] | None = None
    ratio: Mapping[str, Any] | None = None


@dataclass(kw_only=True)
class Outcome:
    """rows in the order they were tried; knobs that were left alone, with the reason.

    k: drafted tokens a step of the best.
    """

    best: Settings = BASELINE
    k: int | None = None
    noise: float | None = None
    rows: list[Row] = field(default_factory=list)
    knobs: list[Knob] = field(default_factory=list)
    break_even: float | None = None


def search(
    drafts: Sequence[Settings],
    situation: Situation,
    bench: Bench,
    journal: Journal,
    *,
    budget_s: float,
    clock: Callable[[], float],
    tell: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Tries settings until nothing is left to try or the budget is spent.

    budget_s counts what the journal holds already. The trial that is running when it ends is
    finished. Raises EngineError and PlanError when the target alone cannot be served.
    """
    run = _Run(situation, bench, journal, budget_s=budget_s, clock=clock, tell=tell)
    run.start()
    run.stage("method", [(_name(settings), settings) for settings in drafts])
    run.choose_k()
    if run.outcome.best.draft == "none" and drafts:
        tell("no draft is faster than the target alone")
    run.tune_knobs()
    run.ablate()
    run.try_http()
    return run.outcome


class _Run:
    def __init__(
        self,
        situation: Situation,
        bench: Bench,
        journal: Journal,
        *,
        budget_s: float,
        clock: Callable[[], float],
        tell: Callable[[str], None],
    ) -> None:
        self.situation, self.bench, self.journal = situation, bench, journal
        self.budget_s, self.clock, self.tell = budget_s, clock, tell
        self.outcome = Outcome()

    def start(self) -> None:
        plain = self._measure("target alone", BASELINE)
        if plain is None or "error" in plain:
            raise EngineError(
                "the target alone was not measured",
                where=str(plain["error"]) if plain else "budget",
                fix="Give more --minutes." if plain is None else "",
            )
        self.outcome.rows.append(
            Row(stage="baseline", label="target alone", settings=BASELINE, verdict="baseline")
        )

    def stage(self, name: str, candidates: Sequence[tuple[str, Settings]]) -> None:
        """Measures, judges and compares candidates; the fastest that is faster becomes the best."""
        tried = [
            (label, settings, self._measure(label, settings)) for label, settings in candidates
        ]
        self._judge([trial for _, _, trial in tried if trial is not None])
        before = self.outcome.best
        fastest: tuple[float, Settings] | None = None
        for label, settings, _ in tried:
            row = self._compare(name, label, settings, before)
            self.outcome.rows.append(row)
            if row.verdict == "faster" and row.ratio is not None:
                gain = float(row.ratio["mean"])
                if fastest is None or gain > fastest[0]:
                    fastest = gain, settings
        if fastest is not None:
            self.outcome.best = fastest[1]

    def choose_k(self) -> None:
        """Climbs from the draft's own K to its neighbours while that is faster."""
        measured: set[int] = set()
        while (k := self._k()) is not None:
            measured.add(k)
            around = neighbours_of_k(k, sorted(measured), max_k=self.situation.max_k)
            if not around or self._is_over():
                return
            best = self.outcome.best
            self.stage("K", [(f"K = {n}", replace(best, k=n)) for n in around])
            measured.update(around)
            if self.outcome.best == best:
                return

    def tune_knobs(self) -> None:
        for knob in build_knobs(self.outcome.best, self._k(), self.situation):
            candidates = vary(self.outcome.best, knob)
            if knob.reason is not None or knob.risk is not None:
                self.outcome.knobs.append(knob)
            if candidates:
                self.stage(
                    knob.name,
                    [(f"{knob.name} {_show(getattr(c, knob.name))}", c) for c in candidates],
                )

    def ablate(self) -> None:
        """The best without each of its settings; without its draft: where drafting breaks even."""
        best = self.outcome.best
        self.outcome.k = self._k()
        without = []
        for name, value in asdict(BASELINE).items():
            if name not in ("k", "draft") and getattr(best, name) != value:
                without.append((f"best, no {name}", replace(best, **{name: value})))
        if best.draft != "none":
            without.append(("best, no draft", best.without_draft()))
        for label, settings in without:
            trial = self._measure(label, settings)
            if settings != BASELINE:
                self._judge([trial] if trial is not None else [])
            self.outcome.rows.append(self._compare("ablation", label, settings, best))
        self.outcome.break_even = self._find_break_even()

    def try_http(self) -> None:
        """The best through vLLM's own server: what HTTP, text and streaming add, and whether fewer
        and larger pieces of stream are faster."""
        name, interval = "stream_interval", _STREAM_INTERVAL
        if self.situation.concurrency > 1:
            reason = "measured through HTTP, where requests are asked one at a time"
            self.outcome.knobs.append(Knob(name=name, reason=reason))
            return
        best = self.outcome.best
        served = replace(best, http=True)
        wide = replace(served, stream_interval=interval)
        for label, settings, against in (
            ("best, through HTTP", served, best),
            (f"{name} {interval}", wide, served),
        ):
            trial = self._measure(label, settings)
            self._judge([trial] if trial is not None else [])
            row = self._compare("http", label, settings, against)
            self.outcome.rows.append(row)
        if row.verdict == "faster":
            self.outcome.best = replace(best, stream_interval=interval)

    def _find_break_even(self) -> float | None:
        """Acceptance length at which a drafted token takes as long as one without: tau times
        TPOT with the draft over TPOT without, all else the same."""
        best = self.outcome.best
        if best.draft == "none":
            return None
        one = self.journal.find(best.key)
        other = self.journal.find(best.without_draft().key)
        if one is None or other is None or "error" in other:
            return None
        found = []
        for drafted, plain in zip(one["regimes"], other["regimes"], strict=True):
            times = drafted["tpot_ms"]["median"], plain["tpot_ms"]["median"]
            if drafted["tau"] is None or None in times or not times[1]:
                return None
            found.append(drafted["tau"] * times[0] / times[1])
        return float(max(found))

    def _k(self) -> int | None:
        trial = self.journal.find(self.outcome.best.key)
        return None if trial is None else trial.get("k")

    def _is_over(self) -> bool:
        return self.journal.seconds >= self.budget_s

    def _measure(self, label: str, settings: Settings) -> Trial | None:
        """A trial, from the journal where it is; None when the time is over."""
        found = self.journal.find(settings.key)
        if found is not None:
            return found
        if self._is_over():
            return None
        self.tell(f"measuring {label} ...")
        begun = self.clock()
        try:
            measured = self.bench.measure(settings)
        except (PlanError, EngineError) as problem:
            measured = {"error": str(problem).partition("\n")[0]}
        kept = {"key": settings.key, "label": label, "settings": asdict(settings), **measured}
        self.journal.add({**kept, "seconds": self.clock() - begun})
        return self.journal.find(settings.key)

    def _judge(self, trials: Sequence[Trial]) -> None:
        """Holds texts against the target's, on one start of the target alone for all of them."""
        open_ones = [t for t in trials if "error" not in t and "withheld" not in t]
        open_ones = [trial for trial in open_ones if trial["key"] != BASELINE.key]
        if not open_ones:
            return
        plain = self.journal.find(BASELINE.key)
        assert plain is not None
        again = self.journal.find(NOISE_KEY) is None
        begun = self.clock()
        self.tell("holding texts against the target's ...")
        reasons, measured = self.bench.judge(plain, open_ones, again=again)
        share = (self.clock() - begun) / len(open_ones)
        for trial, why in zip(open_ones, reasons, strict=True):
            seconds = trial["seconds"] + (0.0 if measured else share)
            self.journal.add({**trial, "withheld": why, "seconds": seconds})
        if measured is not None:
            noise = abs(compare_arms(plain["regimes"], measured)["mean"] - 1)
            seconds = self.clock() - begun
            self.journal.add({"key": NOISE_KEY, "noise": noise, "seconds": seconds})

    def _compare(self, stage: str, label: str, settings: Settings, best: Settings) -> Row:
        trial, against = self.journal.find(settings.key), self.journal.find(best.key)
        plain = self.journal.find(BASELINE.key)
        assert plain is not None
        row = Row(stage=stage, label=label, settings=settings, verdict="not measured")
        if trial is None:
            return replace(row, why="the time was over")
        if "error" in trial:
            return replace(row, verdict="failed", why=trial["error"])
        if against is None or "error" in against:
            return replace(row, why="what it is held against was not measured")
        row = replace(
            row,
            k=trial.get("k"),
            speedup=compare_arms(plain["regimes"], trial["regimes"]),
            ratio=compare_arms(against["regimes"], trial["regimes"]),
        )
        if trial.get("withheld"):
            return replace(row, verdict="withheld", why="; ".join(trial["withheld"]))
        assert row.ratio is not None
        self.outcome.noise = (self.journal.find(NOISE_KEY) or {}).get("noise")
        return replace(row, verdict=judge_ratio(row.ratio, self.outcome.noise or 0.0))


def judge_ratio(ratio: Mapping[str, Any], noise: float) -> str:
    """faster or slower only beyond the noise floor and, where there is one, the interval."""
    mean, low, high = ratio["mean"], ratio["low"], ratio["high"]
    if mean > 1 + noise and (low is None or low > 1):
        return "faster"
    if mean < 1 - noise and (high is None or high < 1):
        return "slower"
    return "tie"


def _name(settings: Settings) -> str:
    return f"draft {settings.draft}" + ("" if settings.k is None else f", K = {settings.k}")


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
