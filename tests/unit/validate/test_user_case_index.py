"""Where every user case is tested: what a folder can express has its rows in user_cases.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from user_cases import USER_CASES

UNIT = Path(__file__).parents[1]
# case -> how many inputs its report asks for, of those that a draft folder (and a target) expresses
OF_FOLDERS: dict[str, int] = {
    "U01": 2,  # a reduced vocabulary without a map
    "U02": 3,  # d2t written as ids
    "U04": 1,  # padded vocabularies of one tokenizer
    "U06": 4,  # the mask token of a block draft
    "U07": 3,  # random embeddings
    "U08": 4,  # whose output layer
    "U09": 2,  # head_dim is not hidden / heads
    "U11": 5,  # tapped layers
    "U13": 1,  # beyond the range of float16
    "U14": 3,  # an index that promises too much
    "U16": 4,  # an MTP head that the config promises
    "U17": 3,  # partial rotary
    "U18": 1,  # a context beyond the draft's positions
    "U20": 3,  # a plain head in a quantised target
    "U22": 4,  # a hybrid target quantised the wrong way
    "U31": 9,  # K and what was trained
    "U32": 5,  # settings of model-free drafts, and a path that names another method
}
# what a run, a plan or data expresses: case -> (file below tests/unit, words in it)
ELSEWHERE: dict[str, tuple[str, str]] = {
    "U13": ("serve/test_checks.py", "test_float16_with_a_bf16_draft_is_said"),
    "U18": ("serve/test_checks.py", "max_model_len"),
    "U23": ("data/test_prompt_reading.py", "U23"),
    "U24": ("train/test_batches.py", "U24"),
    "U26": ("eval/test_eval_unfair.py", "test_u26_thinking_and_target_mismatch_are_noted"),
    "U27": (
        "train/test_stored_states.py",
        "test_states_that_are_not_numbers_or_too_few_name_their_row",
    ),
    "U28": ("train/test_stored_states.py", "what_does_not_fit_is_refused_before_the_first_token"),
    "U29": ("train/test_training.py", "U29"),
    "U31": ("serve/test_checks.py", "U31"),
    "U32": ("serve/test_plan.py", "U32"),
    "U33": ("ground/test_acceptance.py", "U33"),
    "U35": ("eval/test_eval_gate.py", "test_u35_a_real_fork_is_withheld_from_scoring"),
    "U36": ("eval/test_eval_unfair.py", "test_u36_prefix_cache"),
    "U37": ("eval/test_eval_timing.py", "U37"),
    "U39": ("eval/test_eval_fidelity.py", "U39"),
}


ALL = "01 02 04 06 07 08 09 11 13 14 16 17 18 20 22 23 24 26 27 28 29 31 32 33 35 36 37 39"


def rows_of(case: str) -> list[str]:
    return [row.case for row in USER_CASES if re.match(rf"{case}\D", row.case)]


def test_no_report_is_without_a_test() -> None:
    assert {*OF_FOLDERS, *ELSEWHERE} == {f"U{number}" for number in ALL.split()}


@pytest.mark.parametrize("case", OF_FOLDERS)
def test_every_input_of_a_report_is_a_row(case: str) -> None:
    assert len(rows_of(case)) >= OF_FOLDERS[case], rows_of(case)


def test_every_row_belongs_to_a_report() -> None:
    known = tuple(f"{case}" for case in OF_FOLDERS)
    assert [row.case for row in USER_CASES if not row.case.startswith((*known, "later: "))] == []


def test_a_row_that_refuses_or_warns_says_why() -> None:
    for row in USER_CASES:
        assert row.rule or row.verdict == "pass" or row.case == "U31 spare heads", row.case


@pytest.mark.parametrize("case", ELSEWHERE)
def test_the_other_reports_are_tested_where_they_say(case: str) -> None:
    file, words = ELSEWHERE[case]
    assert words in (UNIT / file).read_text(encoding="utf-8")
