"""What a challenge of optimised targets asks of quality. The numbers live in TOML files."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from paceline.errors import RulesError
from paceline.records import sha256_bytes
from paceline.rules.contest import TargetRules
from paceline.rules.read import _read_fields, list_rules

__all__ = [
    "GATE_NAMES",
    "AnswerRules",
    "Challenge",
    "QualityGate",
    "QualityGates",
    "list_challenges",
    "parse_challenge",
    "read_challenge",
]


@dataclass(frozen=True, kw_only=True)
class QualityGate:
    """minimum: share of right answers asked of the challenge's own target, the edge passes.

    max_loss: largest loss in share of right answers to the unoptimised target. task, metric,
    filter: lm-evaluation-harness's names; filter "none" where the answer is not extracted.
    """

    minimum: float
    task: str
    metric: str
    filter: str
    max_loss: float


@dataclass(frozen=True, kw_only=True)
class QualityGates:
    mmlu_pro: QualityGate
    ifeval: QualityGate
    gpqa_diamond: QualityGate


GATE_NAMES = tuple(QualityGates.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class AnswerRules:
    """max_tokens: of one answer, its thought included. max_broken_share: of finished answers."""

    max_tokens: int
    max_broken_share: float
    confidence: float


@dataclass(frozen=True, kw_only=True)
class Challenge:
    name: str
    version: str
    title: str
    target: TargetRules
    gates: QualityGates
    answers: AnswerRules
    provisional: tuple[str, ...]
    sha256: str

    def gate(self, name: str) -> QualityGate:
        """One gate by its name in the file. Raises RulesError."""
        gate = getattr(self.gates, name, None)
        if not isinstance(gate, QualityGate):
            raise RulesError(
                f"there is no gate {name!r}",
                where=self.name,
                expected=f"one of {', '.join(GATE_NAMES)}",
            )
        return gate


def list_challenges() -> tuple[str, ...]:
    """Names of the bundled challenges, sorted: rules with quality gates."""
    folder = resources.files("paceline.rules")
    found = {p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml")}
    return tuple(sorted(found - set(list_rules())))


def read_challenge(name_or_path: str | Path) -> Challenge:
    """Reads a bundled challenge by name ("adaptfm-2026") or a TOML file. Raises RulesError."""
    bundled = resources.files("paceline.rules") / f"{name_or_path}.toml"
    path = bundled if "/" not in str(name_or_path) and bundled.is_file() else Path(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RulesError(
            "there is no such challenge",
            where=str(name_or_path),
            expected="a TOML file with quality gates, or adaptfm-2026",
        ) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise RulesError(f"cannot be read: {problem}", where=str(name_or_path)) from None
    return parse_challenge(text, where=str(name_or_path))


def parse_challenge(text: str, *, where: str = "challenge") -> Challenge:
    """Parses a challenge's text; a missing or a spare key is an error. Raises RulesError."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise RulesError(f"is not valid TOML: {problem}", where=where) from None
    if "gates" not in table:
        raise RulesError(
            "has no quality gates", where=where, expected="a [gates] table, as in adaptfm-2026"
        )
    provisional: list[str] = []
    fields = _read_fields(Challenge, table, where, "", provisional, skip=("provisional", "sha256"))
    challenge = Challenge(
        **fields, provisional=tuple(provisional), sha256=sha256_bytes(text.encode("utf-8"))
    )
    _require_sane(challenge, where)
    return challenge


def _require_sane(challenge: Challenge, where: str) -> None:
    answers = challenge.answers
    shares = {"answers.max_broken_share": answers.max_broken_share}
    for name in GATE_NAMES:
        gate = challenge.gate(name)
        shares |= {f"gates.{name}.minimum": gate.minimum, f"gates.{name}.max_loss": gate.max_loss}
    for dotted, share in shares.items():
        if not 0 <= share <= 1:
            raise RulesError(f"key '{dotted}' is {share}", where=where, expected="between 0 and 1")
    if not 0.5 <= answers.confidence < 1:
        raise RulesError(
            f"key 'answers.confidence' is {answers.confidence}",
            where=where,
            expected="between 0.5 and 1",
        )
    if answers.max_tokens < 1:
        raise RulesError(
            f"key 'answers.max_tokens' is {answers.max_tokens}", where=where, expected="at least 1"
        )
