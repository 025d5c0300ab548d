from __future__ import annotations

import signal
from pathlib import Path

import pytest

from paceline.serve.failure import explain, last_log_lines

LOG = """\
(MainProcess pid=1) INFO 11-30 08:23:08 [model.py:699] Resolved architecture
(MainProcess pid=1) WARNING 11-30 08:23:18 [cpu.py:207] Triton is not installed.
Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]
/x/dispatcher.py:138: FutureWarning: deprecated
Loading weights
(EngineCore pid=2) ERROR 11-30 08:23:19 [core.py:99] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-30 08:23:19 [core.py:99]   File "/x/engine.py", line 3, in run
(EngineCore pid=2) ERROR 11-30 08:23:19 [core.py:99]     explode()
(EngineCore pid=2) ERROR 11-30 08:23:19 [core.py:99] ValueError: boom
"""


def test_last_lines_are_without_noise_and_frames(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("an earlier run\n" + LOG)
    lines = last_log_lines(log, start=len("an earlier run\n"))
    assert lines == ["Loading weights", "ValueError: boom"]
    assert last_log_lines(tmp_path / "none.log") == []


@pytest.mark.parametrize(
    ("message", "exit_code", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", 1, "not enough memory"),
        ("ValueError: 4.0 GiB KV cache is needed, which is larger than", 1, "KV cache does not"),
        ("RuntimeError: operator torchvision::nms does not exist", 1, "torchvision"),
        ("ValueError: There is no module or parameter named 'x'", 1, "weights do not fit"),
        ("", -signal.SIGKILL, "SIGKILL, from outside"),
        ("", -signal.SIGSEGV, "SIGSEGV: the engine's native code crashed"),
    ],
)
def test_causes(tmp_path: Path, message: str, exit_code: int, cause: str) -> None:
    error = explain("died", message=message, exit_code=exit_code, log_path=tmp_path / "x.log")
    assert cause in str(error)
    assert error.exit_code == 4


@pytest.mark.parametrize(
    ("said", "exit_code", "cause"),
    [
        ("No module named 'vllm._deepselect_C'", -signal.SIGKILL, "SIGKILL, from outside"),
        ("No module named 'vllm._deepselect_C'", 1, "a package is missing"),
        ("terminate called after throwing: std::bad_alloc", -signal.SIGABRT, "not enough memory"),
    ],
)
def test_what_was_said_before_a_signal_is_seldom_its_cause(
    tmp_path: Path, said: str, exit_code: int, cause: str
) -> None:
    log = tmp_path / "x.log"
    log.write_text(said + "\n")
    assert cause in str(explain("died", message="", exit_code=exit_code, log_path=log))


def test_pydantic_counts_errors_first(tmp_path: Path) -> None:
    message = "ValidationError: 1 validation error for X\n  Value error, K is odd [type=v]\n  more"
    text = str(explain("failed", message=message, exit_code=1, log_path=tmp_path / "x.log"))
    assert text.startswith("the engine failed: Value error, K is odd. Whole log:")
