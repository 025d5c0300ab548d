from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.draft import Draft
from paceline.errors import PlanError
from paceline.serve import build_plan, format_command, serve_http
from paceline.target import TargetFacts

Targets = Callable[..., TargetFacts]
Drafts = Callable[..., Draft]


def test_the_printed_command_is_what_a_shell_runs(
    make_target: Targets, make_draft: Drafts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell runs the printed lines; the interpreter is one that only shows its arguments."""
    shown = tmp_path / "shown.json"
    python = tmp_path / "python"
    python.write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\n"
        f"open({str(shown)!r}, 'w').write("
        "json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))\n"
    )
    python.chmod(0o755)
    monkeypatch.setenv("PACELINE_VLLM_PYTHON", str(python))
    draft = make_draft('it\'s a "draft"')
    plan = build_plan(make_target(), draft, device="cpu", num_threads=1)
    subprocess.run(["sh", "-ec", format_command(plan, port=8123)], check=True, cwd=tmp_path)
    arguments, env, folder = json.loads(shown.read_text())
    assert arguments[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert arguments[arguments.index("--port") + 1] == "8123"
    assert "--no-enable-prefix-caching" in arguments
    assert "--no-trust-remote-code" in arguments
    speculative = json.loads(arguments[arguments.index("--speculative-config") + 1])
    assert (speculative["method"], speculative["num_speculative_tokens"]) == ("eagle3", 3)
    weights = Path(folder, speculative["model"], "model.safetensors")
    assert weights.read_bytes() == b"draft weights"
    target = Path(folder, arguments[arguments.index("--model") + 1])
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert "," not in env["VLLM_CPU_OMP_THREADS_BIND"]
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in env


def test_a_port_in_use_is_said_before_anything_starts(
    make_target: Targets, play_vllm: Callable[..., None]
) -> None:
    play_vllm("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PlanError, match=f"port {port} cannot be used"):
            serve_http(build_plan(make_target(), device="cpu"), port=port)
