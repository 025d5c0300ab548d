from __future__ import annotations

from collections.abc import Callable

import pytest
from command_line import Outcome

from paceline.cli import main


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs `paceline WORDS` in this process, 80 columns wide; an engine start is a failure."""

    def no_engine(*words: object, **settings: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("paceline.serve.start", no_engine)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: object) -> Outcome:
        monkeypatch.setattr("sys.argv", ["paceline", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return Outcome(code=int(stopped.value.code or 0), out=out, err=err)

    return call
