"""How often each interval holds the truth, by simulation with a known truth.

    python bench/coverage.py [--runs 1000] [--sizes 40,40,40] [--kind skew] ...

Worlds of prompts are drawn again and again; the intervals are those of `paceline eval`, from the
same functions. One line of Markdown a world: the share of runs whose 95 % interval held the truth
(tau ratio, geometric mean of time ratios, ratio of median times, score by each of the two), and
beside it what a plain percentile bootstrap of the tau ratio would have held.
"""

from __future__ import annotations

import argparse
import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from paceline.eval.figures import geomean_figure, tau_figure
from paceline.eval.pairing import Arm, Pairing
from paceline.eval.ratios import measure_intervals
from paceline.rules import Rules, read_rules

Array = NDArray[np.float64]

TAU, STEP_MS, EFFECT = 1.9, 12.0, 0.15
KINDS = ("even", "skewed", "mixed", "outliers")
SIZES = ("2x8", "3x8", "5x8", "10x8", "25x8", "40x8", "80x8", "40x1", "40,40,10,3,1")
FIGURES = ("tau", "geomean", "medians", "score by geomean", "score by medians")


def draw_world(
    random: np.random.Generator, sizes: list[int], kind: str, *, num_blocks: int, unbalance: float
) -> Pairing:
    """Prompts of a kind: even (log-normal), skewed (exponential), mixed (a fifth drafts nothing),
    outliers (one time in 33 is far off). unbalance: standard deviation of a block's log time."""
    arms: dict[str, list[list[Array]]] = {"baseline": [[], [], []], "candidate": [[], [], []]}
    shifts = {name: random.normal(0, unbalance, num_blocks) for name in arms}
    for category, size in enumerate(sizes):
        tokens = np.clip(np.round(np.exp(random.normal(4.6, 0.7, size))), 17, 1024) - 1
        hard = {
            "even": lambda n: random.normal(0, 0.15, n),
            "skewed": lambda n: random.exponential(0.25, n) - 0.25,
            "mixed": lambda n: np.where(random.random(n) < 0.2, -1.5, random.normal(0.05, 0.1, n)),
            "outliers": lambda n: random.normal(0, 0.15, n),
        }[kind](size)
        level = math.log(TAU) + math.log1p(0.3 * (category - (len(sizes) - 1) / 2) / len(sizes))
        for name, effect in (("baseline", 0.0), ("candidate", EFFECT)):
            noise = random.normal(0, 0.08, size)
            steps = tokens / np.clip(np.exp(level + hard + noise + effect), 1, 4)
            steps = np.maximum(1, np.round(steps))
            logs = np.log(STEP_MS * steps / tokens)[:, None] + shifts[name]
            logs = logs + (
                random.exponential(0.06, logs.shape)
                if kind == "skewed"
                else random.normal(0, 0.04, logs.shape)
            )
            if kind == "outliers":
                far = random.random(logs.shape) < 0.03
                logs = logs + np.where(far, random.exponential(1.0, logs.shape), 0)
            repeat = np.ones((1, num_blocks))
            for part, values in zip(
                arms[name], (tokens[:, None] * repeat, steps[:, None] * repeat, logs), strict=True
            ):
                part.append(values)
    made = {
        name: Arm(delivered=tuple(d), steps=tuple(s), log_tpot=tuple(t))
        for name, (d, s, t) in arms.items()
    }
    return Pairing(
        categories=tuple(f"c{i:03d}" for i in range(len(sizes))),
        ids=tuple(tuple(map(str, range(size))) for size in sizes),
        baseline=made["baseline"],
        candidate=made["candidate"],
    )


def read_truth(sizes: list[int], kind: str, rules: Rules) -> dict[str, float]:
    """The figures of a world of 200,000 prompts a category (its blocks have no shift)."""
    big = [200_000] * len(sizes)
    world = draw_world(np.random.default_rng(1), big, kind, num_blocks=1, unbalance=0.0)
    figures = {"tau": tau_figure(world), "geomean": geomean_figure(world)}
    truth = {name: figure.value for name, figure in figures.items() if figure}
    # medians over all prompts, so a category weighs by its prompts
    weights = np.concatenate([np.full(200_000, size / sum(sizes)) for size in sizes])
    truth["medians"] = weighted_median(world.baseline, weights) / weighted_median(
        world.candidate, weights
    )
    for name in ("geomean", "medians"):
        truth[f"score by {name}"] = 100 * (
            rules.weights["tau"] * truth["tau"]
            + rules.weights["memory"]
            + rules.weights["tpot"] * truth[name]
        )
    return truth


def weighted_median(arm: Arm, weights: Array) -> float:
    values = np.concatenate([logs[:, 0] for logs in arm.log_tpot])
    order = np.argsort(values)
    share = np.cumsum(weights[order])
    return math.exp(float(values[order][np.searchsorted(share, share[-1] / 2)]))


def percentile_tau(world: Pairing, num_resamples: int, seed: int) -> tuple[float, float]:
    """The plain percentile bootstrap, for comparison."""
    random = np.random.default_rng(seed)
    total: dict[str, Array | float] = {"baseline": 0.0, "candidate": 0.0}
    for category, size in enumerate(world.sizes):
        index = random.integers(0, size, (num_resamples, size))
        for name, arm in (("baseline", world.baseline), ("candidate", world.candidate)):
            delivered, steps = arm.delivered[category][:, 0], arm.steps[category][:, 0]
            total[name] = total[name] + delivered[index].sum(1) / steps[index].sum(1)
    low, high = np.quantile(total["candidate"] / total["baseline"], [0.025, 0.975])
    return float(low), float(high)


def simulate(
    sizes: list[int], kind: str, *, runs: int, num_blocks: int, unbalance: float, resamples: int
) -> dict[str, float | None]:
    """Share of runs whose interval held the truth; None where most runs had no interval."""
    by_rules = {}
    for name, statistic in (("geomean", "paired_geomean"), ("medians", "ratio_of_medians")):
        rules = read_rules("demo")
        terms = dataclasses.replace(rules.terms, tpot_statistic=statistic)
        statistics = dataclasses.replace(rules.statistics, num_resamples=resamples)
        by_rules[name] = dataclasses.replace(rules, terms=terms, statistics=statistics)
    truth = read_truth(sizes, kind, by_rules["geomean"])
    held = dict.fromkeys((*FIGURES, "percentile"), 0)
    measured = dict.fromkeys(held, 0)

    def count(name: str, low: float | None, high: float | None, right: float) -> None:
        if low is not None and high is not None:
            measured[name] += 1
            held[name] += low <= right <= high

    for run in range(runs):
        random = np.random.default_rng([run, len(sizes), sizes[0]])
        world = draw_world(random, sizes, kind, num_blocks=num_blocks, unbalance=unbalance)
        for name, rules in by_rules.items():
            tau, tpot, score = measure_intervals(world, 1.0, rules, seed=run)
            if name == "geomean":
                count("tau", tau["low"], tau["high"], truth["tau"])
            count(name, tpot["low"], tpot["high"], truth[name])
            if score:
                right = truth[f"score by {name}"]
                count(f"score by {name}", score["low"], score["high"], right)
        count("percentile", *percentile_tau(world, resamples, run), truth["tau"])
    return {
        name: held[name] / measured[name] if measured[name] > runs / 2 else None for name in held
    }


def read_sizes(text: str) -> list[int]:
    """ "40x8" is eight categories of 40; "40,3,1" is three categories."""
    if "x" in text:
        size, number = text.split("x")
        return [int(size)] * int(number)
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--resamples", type=int, default=199)
    parser.add_argument("--sizes", nargs="*", default=SIZES)
    parser.add_argument("--kind", nargs="*", default=KINDS)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--unbalance", type=float, default=0.0)
    args = parser.parse_args()
    for text in args.sizes:
        for kind in args.kind:
            found = simulate(
                read_sizes(text),
                kind,
                runs=args.runs,
                num_blocks=args.blocks,
                unbalance=args.unbalance,
                resamples=args.resamples,
            )
            shown = ["-" if share is None else f"{share * 100:.1f}" for share in found.values()]
            print(f"| {text} | {args.blocks} | {kind} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
