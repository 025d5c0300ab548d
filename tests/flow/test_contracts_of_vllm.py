"""Every family's contract against vLLM's own loader: sound folders are read, faults refused.

No engine: vLLM's model classes and its default loader in one child process on the CPU.
"""

from __future__ import annotations

import pytest
from contract_cases import CASES
from contract_probe import Outcome, hold_against_vllm

pytestmark = pytest.mark.engine
OF_TENSORS = ("deleted", "renamed", "reshaped")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    # one fault in six here; docs/results/contracts.md has them all
    return hold_against_vllm(CASES, tmp_path_factory.mktemp("cases"), stride=6)


def test_every_sound_folder_is_loaded_by_vllm_and_read_by_us(outcomes: list[Outcome]) -> None:
    assert {o.case.name: (o.sound.error, o.sound.told, o.sound.message) for o in outcomes} == {
        case.name: (None, "", "") for case in CASES
    }


def test_every_fault_of_a_tensor_is_refused_by_us(outcomes: list[Outcome]) -> None:
    faults = [(o.case.name, t) for o in outcomes for t in o.faults if t.kind in OF_TENSORS]
    assert [(name, t.fault) for name, t in faults if t.told != "error"] == []
    assert len(faults) > 150


def test_what_vllm_builds_otherwise_without_a_word_is_told_by_us(outcomes: list[Outcome]) -> None:
    faults = [(o.case.name, t) for o in outcomes for t in o.faults if t.kind not in OF_TENSORS]
    assert [(name, t.fault) for name, t in faults if t.error == "another" and not t.told] == []
    assert len(faults) > 80


def test_vllm_builds_the_same_model_of_the_exported_envelope(outcomes: list[Outcome]) -> None:
    tried = {o.case.name: t.error for o in outcomes for t in o.envelopes}
    assert set(tried.values()) == {None}, tried
    assert len(tried) >= 6


def test_vllm_loads_many_of_them_without_complaint(outcomes: list[Outcome]) -> None:
    """Why the contract exists; a release that checks by itself shows here."""
    for kind, least in (("deleted", 15), ("renamed", 1), ("size changed", 1)):
        tried = [t for o in outcomes for t in o.faults if t.kind == kind]
        assert sum(t.is_silent for t in tried) >= least, kind
