from __future__ import annotations

import json
from typing import Any

import pytest
from build_result import build_result, build_variants
from rich.console import Console

from paceline.errors import ResultError
from paceline.report import print_report, render_score_table

VARIANTS = build_variants()


def _reread(result: dict[str, Any]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(json.dumps(result))
    return value


def _printed(result: dict[str, Any], *, width: int = 80) -> str:
    console = Console(
        width=width, color_system=None, force_terminal=False, record=True, quiet=False
    )
    with console.capture() as capture:
        print_report(_reread(result), console)
    return capture.get()


def _lines(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_fits_in_80_columns(name: str) -> None:
    text = _printed(VARIANTS[name][0])

    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\x1b" not in text  # neither colour nor a stranger's escape sequence
    for title in ("Acceptance by position", "Draft memory", "Trained against served", "Notes"):
        assert title in text


def test_the_terms_show_the_numbers_of_the_record() -> None:
    result, _ = build_result()
    text = _printed(result)
    arms, terms = result["arms"], result["score"]["terms"]

    row = _lines(text, "Acceptance length   ")[0].split()[2:]
    assert row == [
        f"{arms['candidate']['tau']['value']:.3f}",
        f"{arms['baseline']['tau']['value']:.3f}",
        f"{terms['tau']['ratio']:.3f}",
        f"{terms['tau']['capped_ratio']:.3f}",
        "50",
        "%",
        f"{terms['tau']['points']:.2f}",
    ]
    assert "18.8 MiB" in text  # 19739545 bytes
    assert "cap 1.200" in text  # the memory ratio of 1.245 is cut there
    assert f"Score  {result['score']['value']:.1f}" in text
    assert "gate.minimum_tau_ratio" in text
    assert "795 of 812 steps agree (97.9 %)" in text
    ours = arms["candidate"]["vllm"]
    assert f"{ours['acceptance_length']:.3f}" in text
    position = _lines(text, "2  ")[0].split()
    assert position[1] == f"{ours['position_acceptance'][1]:.3f}"
    assert position[2] == f"{ours['conditional_acceptance'][1]:.3f}"


def test_steps_that_a_run_did_not_tell_apart_are_not_spoken_of() -> None:
    result, _ = build_result()
    for replay in result["replay"].values():
        for key in ("num_near_tie", "num_real", "near_tie_logits"):
            replay.pop(key, None)
    told = " ".join(_printed(result).split("Trained against served")[1].split())
    assert "795 of 812 steps agree (97.9 %); first position" in told


def test_the_baseline_against_itself_reads_100() -> None:
    assert "Score  100.0" in _printed(VARIANTS["same"][0])


def test_a_missing_fact_is_not_measured_and_never_zero() -> None:
    text = _printed(VARIANTS["no-memory"][0])

    assert "Score  not measured  NOT SCORED" in text
    assert "Not measured: draft memory." in text
    assert _lines(text, "total  ")[0].split() == ["total", *["not", "measured"] * 2]
    assert "0.0 MiB" not in text
    assert "  not measured" in _printed(VARIANTS["no-replay"][0]).split("Trained against served")[1]


def test_an_unranked_run_and_a_run_without_baseline_say_why() -> None:
    text = _printed(VARIANTS["unranked"][0])
    assert "UNRANKED" in text
    assert "at least 0.900 needed: not passed" in text
    assert "acceptance is below the gate of 0.9" in text

    assert "No baseline was measured" in _printed(VARIANTS["no-baseline"][0])


def test_acceptance_length_one_is_printed_as_it_is() -> None:
    result = VARIANTS["nothing-held"][0]
    result["arms"]["candidate"]["notes"] = ["the draft contributes nothing"]
    text = _printed(result)
    assert _lines(text, "acceptance length, vLLM's own")[0].split()[-2] == "1.000"
    assert "candidate: the draft contributes nothing" in text


def test_a_draft_without_bytes_reaches_the_cap() -> None:
    text = _printed(VARIANTS["no-bytes"][0])
    row = _lines(text, "Draft memory   ")[0].split()[2:]
    assert row == ["0", "bytes", "23.4", "MiB", "unlimited", "1.200", "25", "%", "30.00"]
    assert "cap 1.200" in text
    assert "K of 'candidate' is 3, the rules say 5" in text
    assert "no intervals: they need two prompts in every category" in text
    arms = VARIANTS["no-bytes"][0]["arms"]
    times = _lines(text, "Time per token   ")[0].split()[3:7:2]
    assert times == [f"{arms[arm]['tpot_ms']['median']:.2f}" for arm in ("candidate", "baseline")]


def test_markup_in_a_name_is_text() -> None:
    result, _ = build_result(name="[bold red]x[/bold red] [/] [link=http://a]y")
    assert "[bold red]x[/bold red] [/] [link=http://a]y" in _printed(result)


@pytest.mark.parametrize("width", [60, 100, 160])
def test_other_widths_are_kept(width: int) -> None:
    text = _printed(VARIANTS["k7"][0], width=width)
    assert max(len(line) for line in text.splitlines()) <= width


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("score", "value"), "119"),
        (("score", "value"), True),
        (("arms", "candidate", "tau"), 2.2),
        (("arms", "candidate", "notes"), "a note"),
        (("score", "value"), 1e999),
        (("score", "value"), 10**400),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(path: tuple[str, ...], value: object) -> None:
    result, _ = build_result()
    here = result
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = value

    with pytest.raises(ResultError, match=path[-1]):
        print_report(result, Console(quiet=True))


def test_another_format_is_refused() -> None:
    with pytest.raises(ResultError, match="paceline-result/1"):
        render_score_table({"format": "paceline-result/2"})


def test_no_near_tie_is_none_and_not_missing() -> None:
    result, _ = build_result()
    result["fidelity"]["candidate"].update(near_tie=0, max_near_tie_gap=None)
    result["fidelity"]["baseline"].update(near_tie=None, max_near_tie_gap=None)
    row = _lines(_printed(result), "widest near tie, nat")[0].split()[4:]
    assert row == ["none", "not", "measured"]


def test_a_withheld_arm_has_no_score_and_says_why() -> None:
    text = _printed(VARIANTS["withheld"][0])
    assert "Score  not measured  WITHHELD" in text
    assert "candidate withheld from scoring: it loops in 12 of 12 answers where" in text
    assert "\u202e" not in text
    table = next(line for line in text.splitlines() if line.startswith("score"))
    assert table.split() == ["score", "-"]


def test_a_score_in_a_withheld_record_is_not_shown() -> None:
    result, _ = build_result()
    result["withheld"] = {"candidate": ["it loops"]}
    text = _printed(result)
    assert f"{result['score']['value']:.1f}" not in text.split("Gate")[0]
    assert "WITHHELD" in text
