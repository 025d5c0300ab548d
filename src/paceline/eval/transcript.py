"""requests.jsonl: everything a run measured, one line an event, appended as it happens.

settings   what must be the same for a run to go on after a stop
facts      what an arm's first server of a run in cycles said it was, and its memory
segment    an engine is ready to be measured; its counters at that moment
answer     one finished request of one arm, and the engine's counters after it
failure    one request that the engine did not answer
fork       the target's own view of the token where an arm left the plain text
likelihood nats a token of one text under the target alone
load       what else the machine did during one block
void       a block that does not count, and why; it is measured again

An arm's answers lie in blocks: one server's life in a run of several cycles. A row without a block
is of block 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.endpoint import Answer, Counters, TokenChoice
from paceline.errors import ResultError
from paceline.records import append_jsonl, read_jsonl

__all__ = [
    "ALL_ARMS",
    "REQUESTS_NAME",
    "Transcript",
    "append_answer",
    "append_facts",
    "append_failure",
    "append_fork",
    "append_likelihood",
    "append_load",
    "append_segment",
    "append_settings",
    "append_void",
    "parse_answer",
    "read_answers",
    "read_transcript",
    "require_sound",
]

REQUESTS_NAME = "requests.jsonl"
ALL_ARMS = "all"  # whose load a quick run logs: its arms take turns


@dataclass(kw_only=True)
class Transcript:
    """A requests.jsonl in memory. blocks: arm -> block -> request id -> answer or failure row.

    readings: (arm, block, segment) -> counters at the start and after each answer, in order.
    forks, likelihoods: (arm, request id, block) -> what the target alone says. loads: (arm, block)
    -> record. voids: one row a block that did not count.
    """

    settings: dict[str, Any] | None = None
    blocks: dict[str, dict[int, dict[str, dict[str, Any]]]] = field(default_factory=dict)
    readings: dict[tuple[str, int, int], list[Counters]] = field(default_factory=dict)
    forks: dict[tuple[str, str, int], TokenChoice] = field(default_factory=dict)
    likelihoods: dict[tuple[str, str, int], float] = field(default_factory=dict)
    loads: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    voids: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    last_segment: int = -1

    @property
    def outcomes(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Arm -> request id -> row, of each arm's first block."""
        return {arm: blocks[min(blocks)] for arm, blocks in self.blocks.items() if blocks}

    @property
    def num_segments(self) -> int:
        return 1 + self.last_segment

    def find(self, arm: str, block: int = 0) -> dict[str, dict[str, Any]]:
        """Request id -> row of one block; empty before its first."""
        return self.blocks.get(arm, {}).get(block, {})


def append_settings(path: Path, settings: Mapping[str, Any]) -> None:
    append_jsonl(path, {"kind": "settings", "settings": dict(settings)})


def append_facts(
    path: Path, *, arm: str, engine: Mapping[str, Any], memory: Mapping[str, Any] | None
) -> None:
    append_jsonl(path, {"kind": "facts", "arm": arm, "engine": dict(engine), "memory": memory})


def append_segment(
    path: Path, *, arm: str, segment: int, counters: Counters, block: int = 0
) -> None:
    row = {"kind": "segment", "arm": arm, "block": block, "segment": segment}
    append_jsonl(path, {**row, "counters": asdict(counters)})


def append_answer(
    path: Path,
    answer: Answer,
    *,
    arm: str,
    category: str,
    segment: int,
    counters: Counters,
    block: int = 0,
) -> None:
    row = asdict(answer)
    row["id"] = row.pop("request_id")
    head = {"kind": "answer", "arm": arm, "block": block, "category": category, "segment": segment}
    append_jsonl(path, {**head, **row, "counters": asdict(counters)})


def append_failure(
    path: Path,
    *,
    arm: str,
    request_id: str,
    category: str,
    num_prompt_tokens: int,
    error: str,
    block: int = 0,
) -> None:
    row = {"kind": "failure", "arm": arm, "block": block, "id": request_id, "category": category}
    append_jsonl(path, {**row, "num_prompt_tokens": num_prompt_tokens, "error": error})


def append_fork(
    path: Path, *, arm: str, request_id: str, choice: TokenChoice, block: int = 0
) -> None:
    row = {"kind": "fork", "arm": arm, "block": block, "id": request_id}
    append_jsonl(path, {**row, **asdict(choice)})


def append_likelihood(
    path: Path, *, arm: str, request_id: str, nll_nats: float, block: int = 0
) -> None:
    row = {"kind": "likelihood", "arm": arm, "block": block, "id": request_id}
    append_jsonl(path, {**row, "nll_nats": nll_nats})


def append_load(path: Path, *, arm: str, block: int, load: Mapping[str, Any]) -> None:
    append_jsonl(path, {"kind": "load", "arm": arm, "block": block, "load": dict(load)})


def append_void(path: Path, *, arm: str, block: int, reason: str) -> None:
    append_jsonl(path, {"kind": "void", "arm": arm, "block": block, "reason": reason})


def read_transcript(run_dir: str | Path) -> Transcript:
    """Reads requests.jsonl; a cut last line is left out. Raises ResultError naming the line."""
    path = Path(run_dir) / REQUESTS_NAME
    transcript = Transcript()
    for number, row in enumerate(read_jsonl(path), 1):
        where = f"{path}:{number}"
        try:
            _add_row(transcript, row)
        except (KeyError, TypeError, ValueError) as problem:
            if isinstance(problem, ResultError):
                raise
            raise ResultError(
                f"is not a row of a run: {problem!r}", where=where, fix="Restore the file."
            ) from None
    return transcript


def _add_row(transcript: Transcript, row: dict[str, Any]) -> None:
    kind = row["kind"]
    if kind == "settings":
        transcript.settings = row["settings"]
        return
    arm, block = row["arm"], row.get("block", 0)
    if not isinstance(arm, str) or not isinstance(block, int):
        raise ValueError("arm or block")
    if kind == "facts":
        transcript.facts[arm] = {"engine": row["engine"], "memory": row["memory"]}
    elif kind == "segment":
        segment = row["segment"]
        transcript.last_segment = max(transcript.last_segment, segment)
        transcript.readings[arm, block, segment] = [_parse_counters(row["counters"])]
    elif kind == "answer":
        require_sound(parse_answer(row))
        transcript.readings[arm, block, row["segment"]].append(_parse_counters(row["counters"]))
        _own_block(transcript, arm, block)[row["id"]] = row
    elif kind == "failure":
        if not isinstance(row["error"], str) or not isinstance(row["num_prompt_tokens"], int):
            raise ValueError("error or num_prompt_tokens")
        _own_block(transcript, arm, block)[row["id"]] = row
    elif kind == "fork":
        transcript.forks[arm, row["id"], block] = TokenChoice(
            token_ids=tuple(row["token_ids"]), logprobs=tuple(row["logprobs"])
        )
    elif kind == "likelihood":
        transcript.likelihoods[arm, row["id"], block] = float(row["nll_nats"])
    elif kind == "load":
        transcript.loads[arm, block] = dict(row["load"])
    elif kind == "void":
        _forget(transcript, arm, block)
        transcript.voids.append({"arm": arm, "block": block, "reason": str(row["reason"])})
    else:
        raise ValueError(f"kind {kind!r}")


def _own_block(transcript: Transcript, arm: str, block: int) -> dict[str, dict[str, Any]]:
    return transcript.blocks.setdefault(arm, {}).setdefault(block, {})


def _forget(transcript: Transcript, arm: str, block: int) -> None:
    """A void block stays in the file and counts for nothing."""
    transcript.blocks.get(arm, {}).pop(block, None)
    transcript.loads.pop((arm, block), None)
    for reading in [key for key in transcript.readings if key[:2] == (arm, block)]:
        del transcript.readings[reading]
    for table in (transcript.forks, transcript.likelihoods):
        for key in [key for key in table if key[0] == arm and key[2] == block]:
            del table[key]


def _parse_counters(row: dict[str, Any]) -> Counters:
    per_position = tuple(row["num_accepted_tokens_per_pos"])
    return Counters(**{**row, "num_accepted_tokens_per_pos": per_position})


def parse_answer(row: Mapping[str, Any]) -> Answer:
    """The Answer of an answer row."""

    def optional(name: str) -> tuple[int, ...] | None:
        return None if row[name] is None else tuple(row[name])

    return Answer(
        request_id=row["id"],
        prompt_ids=tuple(row["prompt_ids"]),
        output_ids=tuple(row["output_ids"]),
        finish_reason=row["finish_reason"],
        sent_at_s=row["sent_at_s"],
        chunk_times_s=tuple(row["chunk_times_s"]),
        chunk_tokens=tuple(row["chunk_tokens"]),
        per_step_accepted=optional("per_step_accepted"),
        per_step_drafted=optional("per_step_drafted"),
    )


def read_answers(run_dir: str | Path, arm: str) -> list[Answer]:
    """One arm's answers of its first block, in the order they finished; failures are left out."""
    outcomes = read_transcript(run_dir).outcomes.get(arm, {})
    return [parse_answer(row) for row in outcomes.values() if row["kind"] == "answer"]


def require_sound(answer: Answer) -> None:
    """Raises ResultError for an answer whose tokens, chunks and times contradict each other."""
    times = answer.chunk_times_s
    problem = None
    if not answer.output_ids:
        problem = "the answer is empty"
    elif sum(answer.chunk_tokens) != len(answer.output_ids) or min(answer.chunk_tokens) < 1:
        problem = f"chunks of {list(answer.chunk_tokens)} for {len(answer.output_ids)} tokens"
    elif len(times) != len(answer.chunk_tokens):
        problem = f"{len(times)} chunk times for {len(answer.chunk_tokens)} chunks"
    elif any(b < a for a, b in zip((answer.sent_at_s, *times), times, strict=False)):
        problem = "times that run backwards"
    if problem:
        raise ResultError(problem, where=f"request {answer.request_id!r}")
