"""Ratios, caps and intervals from entries, against a plain loop and against numbers by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scripted import build_rules

from paceline.errors import ResultError
from paceline.eval.figures import geomean_figure, spread_over_prompts, tau_figure
from paceline.eval.pairing import build_pairing, included_for_tpot
from paceline.eval.ratios import compute_ratios, measure_pairing, memory_ratio
from paceline.eval.resampling import draw_replicates
from paceline.eval.statistics import t_quantile

RULES = build_rules(min_tokens_for_tpot="4", num_resamples="500")
BY_MEDIANS = build_rules(
    min_tokens_for_tpot="4", num_resamples="500", tpot_statistic='"ratio_of_medians"'
)


def entry(name: str, delivered: int, steps: int, tpot: float | None, tokens: int = 9) -> Any:
    return {
        "id": name,
        "category": name.split("-")[0],
        "num_tokens": tokens,
        "delivered": delivered,
        "steps": steps,
        "tpot_ms": tpot,
    }


BASELINE = [
    entry("chat-1", 8, 4, 10.0),
    entry("chat-2", 4, 4, 12.0),
    entry("code-1", 9, 3, 8.0),
    entry("code-2", 9, 3, 6.0),
]
CANDIDATE = [
    entry("code-2", 8, 2, 3.0),
    entry("code-1", 8, 4, 8.0),
    entry("chat-1", 8, 4, 5.0),
    entry("chat-2", 9, 6, 12.0),
]
ARMS = {"baseline": BASELINE, "candidate": CANDIDATE}


def ratios(rules: Any = RULES, arms: Any = ARMS, memory: Any = None) -> Any:
    return compute_ratios(arms, memory or {"baseline": 300, "candidate": 200}, rules, seed=5)


def test_an_answer_of_just_enough_tokens_is_timed() -> None:
    arms = {
        "baseline": [entry("a-1", 3, 1, 2.0, tokens=4), entry("a-2", 2, 1, 2.0, tokens=3)],
        "candidate": [entry("a-1", 3, 1, 1.0, tokens=4), entry("a-2", 2, 1, 1.0, tokens=9)],
    }
    assert included_for_tpot(arms, min_tokens=4) == ({"a-1"}, 1)


def test_values_by_hand() -> None:
    found, score, notes = ratios()
    # baseline: chat 12/8 = 1.5, code 18/6 = 3 -> 2.25; candidate: chat 17/10, code 16/6
    tau = ((1.7 + 16 / 6) / 2) / 2.25
    assert found["tau"]["value"] == pytest.approx(tau, rel=1e-15)
    # ratios: chat 2, 1; code 1, 2 -> every category sqrt(2)
    assert found["tpot"]["value"] == pytest.approx(math.sqrt(2), rel=1e-14)
    # medians: baseline (8 + 10) / 2 = 9, candidate (5 + 8) / 2 = 6.5
    assert found["tpot"]["ratio_of_medians"] == pytest.approx(9 / 6.5, rel=1e-14)
    assert found["memory"] == {"value": 1.5, "low": 1.5, "high": 1.5, "unbounded": False}
    assert score["value"] == pytest.approx(
        100 * (0.5 * tau + 0.25 * 1.5 + 0.25 * math.sqrt(2)), rel=1e-14
    )
    assert all(note.startswith("no interval of ") for note in notes)


def test_the_rules_choose_the_statistic() -> None:
    found, score, _ = ratios(BY_MEDIANS)
    assert found["tpot"]["value"] == pytest.approx(9 / 6.5, rel=1e-14)
    assert found["tpot"]["statistic"] == "ratio_of_medians"
    assert score["terms"]["tpot"]["ratio"] == found["tpot"]["value"]


def several(arm: list[Any]) -> list[Any]:
    """Three times the prompts, none of them alike: enough for intervals."""
    return [
        {
            **e,
            "id": f"{e['id']}-{i}",
            "delivered": e["delivered"] + i,
            "steps": e["steps"] + (i + len(e["id"])) % 3,
            "tpot_ms": e["tpot_ms"] * (1 + 0.1 * i * (1 if arm is BASELINE else -1)),
        }
        for e in arm
        for i in range(3)
    ]


MANY = {"baseline": several(BASELINE), "candidate": several(CANDIDATE)}
NAMES = [[f"{category}-{n}-{i}" for n in (1, 2) for i in range(3)] for category in ("chat", "code")]


def by_id(arm: str) -> dict[str, Any]:
    return {e["id"]: e for e in MANY[arm]}


def test_time_interval_is_students_with_satterthwaites_freedom() -> None:
    found, _, _ = ratios(arms=MANY)
    base, mine = by_id("baseline"), by_id("candidate")
    variances, means = [], []
    for group in NAMES:
        logs = [math.log(base[n]["tpot_ms"] / mine[n]["tpot_ms"]) / 2 for n in group]
        means.append(sum(logs) / 6)
        variances.append(sum((x - means[-1]) ** 2 for x in logs) / 5 / 6)
    freedom = sum(variances) ** 2 / sum(v**2 / 5 for v in variances)
    half = t_quantile(0.975, freedom) * math.sqrt(sum(variances))
    assert found["tpot"]["value"] == pytest.approx(math.exp(sum(means)), rel=1e-12)
    assert found["tpot"]["low"] == pytest.approx(math.exp(sum(means) - half), rel=1e-10)
    assert found["tpot"]["high"] == pytest.approx(math.exp(sum(means) + half), rel=1e-10)
    assert found["tpot"]["degrees_of_freedom"] == pytest.approx(freedom, rel=1e-10)


def tau_by_hand(base: Any, mine: Any, groups: Any) -> tuple[float, float]:
    """(log of the tau ratio, its variance) in Python floats, prompt by prompt."""
    taus, influences = [], []
    for arm in (mine, base):
        sums = [
            (sum(arm[n]["delivered"] for n in g), sum(arm[n]["steps"] for n in g)) for g in groups
        ]
        each = [d / s for d, s in sums]
        tau = sum(each) / len(each)
        taus.append(tau)
        influences.append(
            [
                [
                    (arm[n]["delivered"] - r * arm[n]["steps"]) / (s / len(g)) / (len(each) * tau)
                    for n in g
                ]
                for g, r, (_, s) in zip(groups, each, sums, strict=True)
            ]
        )
    variance = 0.0
    for a, b in zip(*influences, strict=True):
        cells = [x - y for x, y in zip(a, b, strict=True)]
        mean = sum(cells) / len(cells)
        variance += sum((x - mean) ** 2 for x in cells) / (len(cells) - 1) / len(cells)
    return math.log(taus[0] / taus[1]), variance


@pytest.mark.parametrize("rules", [RULES, BY_MEDIANS])
def test_tau_interval_against_a_plain_loop(rules: Any) -> None:
    """The studentised bootstrap, resample by resample, in Python floats."""
    found, _, _ = ratios(rules, MANY)
    base, mine = by_id("baseline"), by_id("candidate")
    value, variance = tau_by_hand(base, mine, NAMES)
    draws = np.random.RandomState(5)
    index = [draws.randint(0, 6, size=(500, 6)) for _ in range(2)]
    far = []
    for r in range(500):
        groups = [[g[i] for i in chosen[r]] for g, chosen in zip(NAMES, index, strict=True)]
        again, spread = tau_by_hand(base, mine, groups)
        far.append(abs(again - value) / math.sqrt(spread))
    half = float(np.quantile(far, 0.95, method="higher")) * math.sqrt(variance)
    assert found["tau"]["value"] == pytest.approx(math.exp(value), rel=1e-12)
    assert found["tau"]["low"] == pytest.approx(math.exp(value - half), rel=1e-9)
    assert found["tau"]["high"] == pytest.approx(math.exp(value + half), rel=1e-9)


def test_replicates_have_the_variance_that_the_cells_say() -> None:
    random = np.random.RandomState(2)
    arms: dict[str, list[Any]] = {"baseline": [], "candidate": []}
    for n in range(240):
        name, delivered = f"{'ab'[n % 2]}-{n}", int(random.randint(40, 90))
        for arm, tau in (("baseline", 2.0), ("candidate", 2.4)):
            steps = round(delivered / tau / random.uniform(0.8, 1.25))
            time = 10 * steps / delivered * random.uniform(0.95, 1.05)
            arms[arm].append(entry(name, delivered, steps, time))
    everyone = {e["id"] for e in arms["baseline"]}
    pairing = build_pairing(arms["baseline"], arms["candidate"], everyone)
    drawn = measure_pairing(pairing, RULES, seed=1).replicates
    assert drawn is not None
    assert np.var(drawn.log_tau) == pytest.approx(np.mean(drawn.tau_tau), rel=0.15)
    assert np.var(drawn.tpot) == pytest.approx(np.mean(drawn.tpot_tpot), rel=0.15)
    covariance = np.cov(drawn.log_tau, drawn.tpot)[0, 1]
    assert covariance == pytest.approx(np.mean(drawn.tau_tpot), rel=0.15)


def test_a_resample_that_is_the_sample_has_its_spread() -> None:
    """Also with a category of one prompt, which no resample moves."""
    lone = ("chat-1-1", "chat-1-2", "chat-2-0", "chat-2-1", "chat-2-2")
    base, mine = ([e for e in arm if e["id"] not in lone] for arm in MANY.values())
    pairing = build_pairing(base, mine, {e["id"] for e in base})
    assert sorted(pairing.sizes) == [1, 6]
    tau, tpot = tau_figure(pairing), geomean_figure(pairing)
    assert tau is not None
    assert tpot is not None
    same = [np.arange(size)[None, :] for size in pairing.sizes]
    drawn = draw_replicates(pairing, spread_over_prompts(tpot), same)
    for figure, found in ((tau, drawn.tau_tau), (tpot, drawn.tpot_tpot)):
        spread = figure.spread
        assert spread is not None
        assert spread.lone > 0
        assert found[0] == pytest.approx(spread.prompts, rel=1e-12)
    assert drawn.log_tau[0] == pytest.approx(tau.log, rel=1e-12)
    assert drawn.tpot[0] == pytest.approx(0.0, abs=1e-15)


def test_score_interval_reacts_to_both_terms_and_to_the_cap() -> None:
    _, score, _ = ratios(arms=MANY)
    assert score["low"] < score["value"] < score["high"]
    fast = [{**e, "tpot_ms": e["tpot_ms"] / 100} for e in MANY["candidate"]]
    found, capped, _ = ratios(arms={**MANY, "candidate": fast})
    assert found["tpot"]["low"] > 2  # all of it beyond the cap: time adds no doubt any more
    width = found["tau"]["high"] - found["tau"]["low"]
    assert capped["high"] - capped["low"] == pytest.approx(50 * width, rel=0.1)


def test_blocks_are_pooled_and_paired() -> None:
    """Each arm answers each prompt in two blocks; the second is slower for both."""
    arms = {
        name: [
            {**e, "block": block, "tpot_ms": e["tpot_ms"] * factor}
            for block, factor in ((0, 1.0), (1, 3.0))
            for e in arm
        ]
        for name, arm in MANY.items()
    }
    one, _, _ = ratios(arms=MANY)
    two, _, _ = ratios(arms=arms)
    for name in ("tau", "tpot"):
        for key in ("value", "low", "high"):
            assert two[name][key] == pytest.approx(one[name][key], rel=1e-9), (name, key)


@pytest.mark.parametrize("rules", [RULES, BY_MEDIANS])
def test_a_block_of_its_own_widens_the_interval(rules: Any) -> None:
    def slowed(factors: tuple[float, ...]) -> Any:
        return {
            name: [
                {**e, "block": b, "tpot_ms": e["tpot_ms"] * (f if name == "candidate" else 1.0)}
                for b, f in enumerate(factors)
                for e in arm
            ]
            for name, arm in MANY.items()
        }

    steady = ratios(rules, slowed((1.0,) * 6))[0]["tpot"]
    moving = ratios(rules, slowed((0.7, 1 / 0.7) * 3))[0]["tpot"]
    assert moving["value"] == pytest.approx(steady["value"], rel=1e-9)
    assert moving["high"] - moving["low"] > 1.1 * (steady["high"] - steady["low"])


def test_other_names_give_the_same_intervals() -> None:
    """A judge publishes pseudonyms: the numbers can still be recomputed from the file."""
    renamed = {
        name: [{**e, "id": f"hidden-{hash(e['id']) % 10**9}"} for e in arm]
        for name, arm in MANY.items()
    }
    assert ratios(arms=renamed) == ratios(arms=MANY)


def test_arms_with_other_blocks_are_refused() -> None:
    twice = [*BASELINE, *({**e, "block": 1} for e in BASELINE)]
    with pytest.raises(ResultError, match="different prompts"):
        ratios(arms={**ARMS, "baseline": twice})


def test_short_answers_are_excluded_pairwise_and_counted() -> None:
    short = [entry("code-2", 8, 2, 3.0, tokens=3), *CANDIDATE[1:]]
    found, _, _ = ratios(arms={"baseline": BASELINE, "candidate": short})
    # chat: 2 and 1 -> sqrt(2); code: 1 alone
    assert found["tpot"]["value"] == pytest.approx(2**0.25, rel=1e-14)
    assert (found["tpot"]["num_prompts"], found["tpot"]["num_excluded"]) == (3, 1)


def test_a_short_answer_of_the_plain_arm_excludes_too() -> None:
    plain = [{**e, "num_tokens": 3 if e["id"] == "code-2" else 9} for e in BASELINE]
    found, _, _ = ratios(arms={"plain": plain, **ARMS})
    assert found["tpot"]["num_excluded"] == 1


def test_same_measurements_score_exactly_100() -> None:
    for rules in (RULES, BY_MEDIANS):
        found, score, _ = ratios(
            rules,
            {"baseline": BASELINE, "candidate": BASELINE},
            {"baseline": 300, "candidate": 300},
        )
        assert (score["value"], score["low"], score["high"]) == (100.0, 100.0, 100.0)
        assert (found["tau"]["value"], found["tau"]["low"], found["tau"]["high"]) == (1, 1, 1)


def test_too_few_prompts_have_no_interval_and_say_so() -> None:
    found, score, notes = ratios()
    assert found["tau"]["value"] is not None
    assert (found["tau"]["low"], found["tpot"]["high"], score["low"]) == (None, None, None)
    reason = "too few prompts: {} degrees of freedom, at least 4 are needed"
    freedom = found["tau"]["degrees_of_freedom"]
    assert freedom < 4
    assert found["tau"]["not_measured"] == reason.format(f"{freedom:.1f}")
    assert notes[0] == f"no interval of acceptance: {found['tau']['not_measured']}"
    assert notes[1].startswith("no interval of time: too few prompts")


def test_one_prompt_a_category_has_no_interval() -> None:
    arms = {name: [e for e in arm if e["id"].endswith("-1")] for name, arm in ARMS.items()}
    found, score, _ = ratios(arms=arms)
    assert found["tau"]["not_measured"].startswith("too few prompts: one in every category")
    assert score["value"] is not None
    assert score["low"] is None


def test_a_category_of_one_prompt_still_counts() -> None:
    lone = ("chat-1-1", "chat-1-2", "chat-2-0", "chat-2-1", "chat-2-2")
    arms = {name: [e for e in arm if e["id"] not in lone] for name, arm in MANY.items()}
    found, _, _ = ratios(arms=arms)
    assert found["tpot"]["low"] < found["tpot"]["value"] < found["tpot"]["high"]


def test_a_category_without_a_time_is_left_out_of_the_time() -> None:
    arms = {
        name: [{**e, "num_tokens": 3 if e["category"] == "code" else 9} for e in arm]
        for name, arm in MANY.items()
    }
    found, _, _ = ratios(arms=arms)
    base, mine = by_id("baseline"), by_id("candidate")
    logs = [math.log(base[n]["tpot_ms"] / mine[n]["tpot_ms"]) for n in NAMES[0]]
    assert found["tpot"]["value"] == pytest.approx(math.exp(sum(logs) / 6), rel=1e-12)
    assert found["tpot"]["low"] is not None
    assert found["tau"]["value"] == pytest.approx(ratios(arms=MANY)[0]["tau"]["value"], rel=1e-15)


def test_memory_not_measured_gives_no_score() -> None:
    found, score, notes = ratios(arms=MANY, memory={"baseline": 300, "candidate": None})
    assert score is None
    assert found["memory"]["value"] is None
    assert notes == ["no score: memory not measured"]


def test_a_draft_of_no_bytes_gets_the_cap() -> None:
    found, score, _ = ratios(arms=MANY, memory={"baseline": 300, "candidate": 0})
    assert found["memory"] == {"value": None, "low": None, "high": None, "unbounded": True}
    assert score["terms"]["memory"]["ratio"] is None
    assert score["terms"]["memory"]["capped_ratio"] == 2.0
    assert score["terms"]["memory"]["points"] == 50.0
    assert score["low"] < score["value"]


def test_no_time_gives_no_score() -> None:
    arms = {name: [{**e, "tpot_ms": None} for e in arm] for name, arm in MANY.items()}
    found, score, notes = ratios(arms=arms)
    assert score is None
    assert found["tpot"]["value"] is None
    assert notes == ["no score: tpot not measured"]


def test_memory_ratio() -> None:
    assert memory_ratio(300, 200) == 1.5
    assert memory_ratio(0, 0) == 1.0
    assert memory_ratio(0, 200) == 0.0
    assert memory_ratio(300, 0) == math.inf
    assert memory_ratio(None, 200) is None
