"""What must be the same for a stopped run to go on, and the opening of its transcript."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.endpoint import EngineFacts, Request
from paceline.errors import ResultError
from paceline.eval.asking import EvalPrompt
from paceline.eval.result import RESULT_NAME
from paceline.eval.transcript import (
    REQUESTS_NAME,
    Transcript,
    append_settings,
    read_transcript,
)
from paceline.records import sha256_bytes
from paceline.rules import Rules

if TYPE_CHECKING:
    from paceline.draft import Draft
    from paceline.target import TargetFacts

__all__ = ["build_settings", "describe_facts", "open_transcript"]

_ENGINE_SETTINGS = (
    "vllm_version",
    "platform",
    "device_name",
    "method",
    "num_speculative_tokens",
    "runner",
    "rejection_sample_method",
    "draft_sample_method",
    "dtype",
    "max_model_len",
    "prefix_caching",
    "enforce_eager",
)


def build_settings(
    names: Sequence[str],
    drafts: Mapping[str, Draft | None],
    prompts: Sequence[EvalPrompt],
    warm_up: Sequence[Request],
    rules: Rules,
    target: TargetFacts,
    *,
    thinking: str,
    seed: int,
    protocol: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """names: the arms. protocol: what a run of several cycles fixes beyond a quick one."""
    asked = [(p.request.request_id, p.category, p.request.prompt_ids) for p in prompts]
    warmed = [request.prompt_ids for request in warm_up]
    settings: dict[str, Any] = {
        "rules": rules.sha256,
        "target weights": target.weights_fingerprint,
        "target tokenizer": target.tokenizer_sha256,
        "prompts": sha256_bytes(repr(asked).encode()),
        "warm-up prompts": sha256_bytes(repr(warmed).encode()),
        "sampling": asdict(prompts[0].request.sampling),
        "thinking": thinking,
        "seed": seed,
        "arms": sorted(names),
        **(protocol or {}),
    }
    for name in names:
        draft = drafts.get(name)
        settings[f"draft of '{name}'"] = draft.sha256 if draft else None
    return settings


def describe_facts(name: str, facts: EngineFacts) -> dict[str, Any]:
    """What an arm's engine must be again when a run goes on or its next server starts."""
    return {f"{fact} of '{name}'": getattr(facts, fact) for fact in _ENGINE_SETTINGS}


def open_transcript(path: Path, settings: dict[str, Any]) -> Transcript:
    """Begins or goes on with a run's requests.jsonl. Raises ResultError for another run's."""
    if not path.exists():
        if (path.parent / RESULT_NAME).exists():
            raise ResultError(
                f"holds a {RESULT_NAME} but no {REQUESTS_NAME}",
                where=str(path.parent),
                fix="Choose another --out.",
            )
        append_settings(path, settings)
    transcript = read_transcript(path.parent)
    if transcript.settings is None:  # stopped before the first line was whole
        append_settings(path, settings)
        return transcript
    for key in sorted(transcript.settings.keys() | settings.keys()):
        old, new = transcript.settings.get(key), settings.get(key)
        if old != new:
            raise ResultError(
                f"the folder holds a run with other settings: {key} was {old!r}, now {new!r}",
                where=str(path.parent),
                fix="Choose another --out, or use the settings of that run.",
            )
    return transcript
