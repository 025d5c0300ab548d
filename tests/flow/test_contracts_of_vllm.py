"""Every family's contract against vLLM's own loader: sound folders are read, faults refused.

No engine: vLLM's model classes and its default loader in one child process on the CPU.
"""

from __future__ import annotations

import pytest
from contract_cases import CASES, Outcome, hold_against_vllm

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    # a fourth of the faults here; docs/results/contracts.md has them all
    return hold_against_vllm(CASES, tmp_path_factory.mktemp("cases"), stride=4)


def test_every_sound_folder_is_loaded_by_vllm_and_read_by_us(outcomes: list[Outcome]) -> None:
    assert {o.case.name: (o.sound.error, o.sound.refused) for o in outcomes} == {
        case.name: (None, None) for case in CASES
    }


def test_every_single_fault_is_refused_by_us(outcomes: list[Outcome]) -> None:
    accepted = [(o.case.name, t.fault) for o in outcomes for t in o.faults if t.refused is None]
    assert accepted == []
    assert sum(len(o.faults) for o in outcomes) > 200


def test_vllm_loads_many_of_them_without_complaint(outcomes: list[Outcome]) -> None:
    """Why the contract exists; a release that checks by itself shows here."""
    for kind, least in (("deleted", 20), ("renamed", 1)):
        tried = [t for o in outcomes for t in o.faults if t.kind == kind]
        assert sum(t.error is None for t in tried) >= least, kind


def test_a_message_names_the_tensor(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        for tried in outcome.faults:
            name = tried.fault.removeprefix("without ").split(",")[0].split(" called ")[0]
            bare = name.replace("layers.0.", "midlayer.") if "midlayer" in name else name
            assert tried.refused is not None
            assert bare in tried.refused or name in tried.refused, (tried.fault, tried.refused)
