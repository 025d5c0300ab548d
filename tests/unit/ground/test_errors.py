from __future__ import annotations

import copy
import pickle

import pytest

from paceline import errors
from paceline.errors import EngineError, PacelineError, StorageError, TargetError


def test_the_message_says_what_where_expected_and_what_to_do() -> None:
    error = TargetError(
        "vocab_size is 64", where="t/config.json", expected="72", fix="Use the right target."
    )
    assert str(error) == ("t/config.json: vocab_size is 64; expected 72. Use the right target.")
    assert str(TargetError("is empty")) == "is empty."
    assert str(TargetError("why?", fix="Look.")) == "why? Look."


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_survives_another_process(name: str) -> None:
    kind = getattr(errors, name)
    error = kind("what", where="where", expected="expected", fix="fix")
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(copied) is kind
        assert str(copied) == str(error)
        assert isinstance(copied, PacelineError)


def test_exit_codes() -> None:
    assert TargetError("x").exit_code == 2
    assert EngineError("x").exit_code == 4
    assert StorageError("x").exit_code == 5
    assert TargetError("x", exit_code=7).exit_code == 7
    assert TargetError.exit_code == 2


def test_leaves_are_also_standard_errors() -> None:
    assert issubclass(errors.DraftError, ValueError)
    assert issubclass(errors.StorageError, OSError)
    assert issubclass(errors.MissingExtraError, ImportError)
