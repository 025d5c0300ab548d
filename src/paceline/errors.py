"""Every error a user can meet.

    PacelineError
    ├── TargetError      the target folder or name is wrong
    ├── DraftError       the draft folder is wrong
    ├── DataError        prompts, answers or token rows are wrong
    ├── RecipeError      a training recipe, checkpoint or training run is wrong
    ├── RulesError       a rules file is wrong
    ├── ResultError      a run folder or result file is wrong
    ├── PlanError        the serving plan cannot work (found before anything starts)
    ├── EngineError      the engine died, hung, or is not what was planned
    ├── HubError         the Hugging Face Hub refused, is out of reach, or sent something else
    ├── StorageError     the disk is full or a file cannot be written
    └── MissingExtraError  an optional part of the install is needed

A message has the form: what is wrong, where, what was expected, what to do.

    try:
        draft = read_draft(path)
    except DraftError as error:
        print(error)          # one message, no traceback
"""

from __future__ import annotations

__all__ = [
    "DataError",
    "DraftError",
    "EngineError",
    "HubError",
    "MissingExtraError",
    "PacelineError",
    "PlanError",
    "RecipeError",
    "ResultError",
    "RulesError",
    "StorageError",
    "TargetError",
]


class PacelineError(Exception):
    """Base of all errors caused by input, settings or the machine; never by a bug of ours.

    `what` is a full clause ("tensor 'd2t' is missing"); `where` a file, key or tensor;
    `expected` what would have been right; `fix` what to do. `exit_code` is the process exit code.
    """

    exit_code = 2

    def __init__(
        self, what: str, *, where: str = "", expected: str = "", fix: str = "", exit_code: int = 0
    ) -> None:
        super().__init__(what, where, expected, fix)
        self.what = what
        self.where = where
        self.expected = expected
        self.fix = fix
        if exit_code:
            self.exit_code = exit_code

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.expected:
            text += f"; expected {self.expected}"
        text = text if text.endswith((".", "!", "?")) else text + "."
        return f"{text} {self.fix}".rstrip() if self.fix else text

    def __reduce__(self) -> tuple[object, ...]:
        told = (type(self), self.what, self.where, self.expected, self.fix)
        return (_rebuild, told, self.__dict__.copy())


def _rebuild(
    kind: type[PacelineError], what: str, where: str, expected: str, fix: str
) -> PacelineError:
    return kind(what, where=where, expected=expected, fix=fix)


class TargetError(PacelineError, ValueError):
    """The target folder or name is wrong."""


class DraftError(PacelineError, ValueError):
    """The draft folder is wrong."""


class DataError(PacelineError, ValueError):
    """Prompts, answers or token rows are wrong."""


class RecipeError(PacelineError, ValueError):
    """A training recipe, checkpoint or training run is wrong."""


class RulesError(PacelineError, ValueError):
    """A rules file is wrong."""


class ResultError(PacelineError, ValueError):
    """A run folder or result file is wrong."""


class PlanError(PacelineError, ValueError):
    """The serving plan cannot work; found before anything starts."""


class EngineError(PacelineError, RuntimeError):
    """The engine died, hung, or is not what was planned."""

    exit_code = 4


class HubError(PacelineError, RuntimeError):
    """The Hugging Face Hub refused, is out of reach, or holds something else than was named.

    exit_code 2 where the user can change it, 6 where the network or the Hub has to recover.
    `rule` is the id of the rule of `paceline validate` that was broken, "" where there is none.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        expected: str = "",
        fix: str = "",
        exit_code: int = 0,
        rule: str = "",
    ) -> None:
        super().__init__(what, where=where, expected=expected, fix=fix, exit_code=exit_code)
        self.rule = rule

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text} (rule {self.rule})" if self.rule else text


class StorageError(PacelineError, OSError):
    """The disk is full or a file cannot be written."""

    exit_code = 5


class MissingExtraError(PacelineError, ImportError):
    """An optional part of the install is needed."""
