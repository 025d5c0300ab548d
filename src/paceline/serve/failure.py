"""From a dead engine to one message: the likely cause, what to do, and the end of its log."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import EngineError

__all__ = ["explain", "last_log_lines"]

_TAIL_BYTES = 64 * 1024
_NUM_LINES = 12
_NOISE = re.compile(
    r"WARNING \d|INFO \d|FutureWarning|UserWarning|DeprecationWarning|it/s\]|% Completed"
    r"|^\s*$|^\s*warnings\.warn|\[W\d{4}|leaked (semaphore|shared_memory)"
)
_PREFIX = re.compile(r"^(\([\w-]+ pid=\d+\)\s?)?(ERROR \d\d-\d\d [\d:]+ \[[^\]]*\]\s?)?")
# pattern in the message or log -> (cause, what to do)
_NUM_MEMORY = 2  # the first ones also end a process by a signal; the others raise
_CAUSES = (
    (
        r"CUDA out of memory|OutOfMemoryError|MemoryError|Cannot allocate memory|bad_alloc",
        "not enough memory",
        "Ask for shorter texts (--max-tokens, --max-model-len), or free memory.",
    ),
    (
        r"KV cache.*(needed|larger than)|No available memory for the cache|memory for kv"
        r"|available KV cache memory",
        "the KV cache does not fit",
        "Ask for shorter texts (--max-tokens, --max-model-len), or free memory.",
    ),
    (
        r"torchvision::nms|libc10_cuda|libcudart",
        "a CUDA build of torchvision or torchaudio lies beside a CPU torch",
        "Run `.venv/bin/python scripts/repair_cpu_install.py`: it repairs this.",
    ),
    (
        r"No module named",
        "a package is missing in the engine's environment",
        "Install it there, or point PACELINE_VLLM_PYTHON at another interpreter.",
    ),
    (
        r"There is no module or parameter named|size mismatch|shape|AssertionError.*load",
        "the weights do not fit the configuration",
        "Run `paceline validate` on the draft and `paceline target show` on the target.",
    ),
    (
        r"No space left on device",
        "the disk is full",
        "Free some space.",
    ),
)


def last_log_lines(log_path: Path, *, start: int = 0, count: int = _NUM_LINES) -> list[str]:
    """The last `count` lines of an engine log after byte `start`, without progress and warnings."""
    try:
        with open(log_path, "rb") as file:
            end = file.seek(0, 2)
            file.seek(max(start, end - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]
    return [line[:300] for line in _without_frames(lines) if not _NOISE.search(line)][-count:]


def _without_frames(lines: list[str]) -> Iterator[str]:
    """Leaves out the frames of tracebacks; what was raised stays."""
    in_frames = False
    for line in lines:
        bare = _PREFIX.sub("", line)
        if bare.startswith("Traceback (most recent call last)"):
            in_frames = True
        elif not (in_frames and (bare.startswith("  ") or not bare)):
            in_frames = False
            yield bare


def explain(
    what: str, *, message: str, exit_code: int | None, log_path: Path, start: int = 0
) -> EngineError:
    """Builds the EngineError of an engine that failed, died or hung."""
    lines = last_log_lines(log_path, start=start)
    cause, fix = _guess(message, lines, exit_code)
    detail = f": {_headline(message)}" if message.strip() else ""
    text = f"the engine {what}{detail}"
    if cause:
        text += f" (likely cause: {cause})"
    tail = "".join(f"\n    {line}" for line in lines) or " the log is empty"
    return EngineError(
        text, fix=f"{fix} Whole log: {log_path}. Its last lines:{tail}".lstrip(), where=""
    )


def _headline(message: str) -> str:
    """The line of an exception that says something; pydantic's first line only counts errors."""
    lines = message.strip().splitlines()
    if "validation error" in lines[0] and len(lines) > 1:
        return lines[1].strip().partition(" [type=")[0][:500]
    return lines[0][:500]


def _guess(message: str, lines: list[str], exit_code: int | None) -> tuple[str, str]:
    by_signal = exit_code is not None and exit_code < 0 and not message
    for text in (message, "\n".join(lines)):
        for pattern, cause, fix in _CAUSES[:_NUM_MEMORY] if by_signal else _CAUSES:
            if text and re.search(pattern, text):
                return cause, fix
    if by_signal:
        assert exit_code is not None
        name = signal.Signals(-exit_code).name
        if exit_code == -signal.SIGKILL:
            return f"{name}, from outside: often the system ran out of memory", ""
        return f"{name}: the engine's native code crashed", ""
    return "", ""
