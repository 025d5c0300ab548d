"""What an engine's environment keeps and gains, so that it finds what was compiled before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.serve.confined import lend_caches
from paceline.serve.plan import build_env
from paceline.serve.process import build_child_env, find_cache

CUDA, CPU = build_env("cuda", "v2", None), build_env("cpu", "v1", 1)


def test_paths_hold_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine works in its staging folder: what the user named from here still means here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"src{os.pathsep}/opt/x{os.pathsep}")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "cache")
    staging = tmp_path / "staging"
    staging.mkdir()
    env = build_child_env(CUDA, staging)
    assert env["PYTHONPATH"].split(os.pathsep) == [
        str(staging / "library"),
        str(tmp_path / "src"),
        "/opt/x",
    ]
    assert env["VLLM_CACHE_ROOT"] == str(tmp_path / "cache")
    assert env["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "triton")


def test_tuned_kernels_lie_in_one_place_or_where_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_cache() == tmp_path / "vllm"
    assert build_child_env(CUDA, tmp_path)["TRITON_CACHE_DIR"] == str(tmp_path / "vllm" / "triton")
    assert "TRITON_CACHE_DIR" not in build_child_env(CPU, tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    assert build_child_env(CUDA, tmp_path)["TRITON_CACHE_DIR"] == str(tmp_path / "own")


def test_the_sandbox_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = tmp_path / "known"
    (known / "modelinfos").mkdir(parents=True)
    (known / "modelinfos" / "a.json").write_text("{}")
    (known / "triton" / "kernel").mkdir(parents=True)
    (known / "triton" / "kernel" / "k.cubin").write_bytes(b"tuned")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(known))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    for device in ("cpu", "cuda"):
        staging = tmp_path / device
        (staging / "scratch").mkdir(parents=True)
        env = lend_caches(staging, device)
        assert (Path(env["VLLM_CACHE_ROOT"]) / "modelinfos" / "a.json").read_text() == "{}"
        assert ("TRITON_CACHE_DIR" in env) is (device == "cuda")
    lent = Path(env["TRITON_CACHE_DIR"])
    assert lent.is_relative_to(tmp_path / "cuda" / "scratch")
    (lent / "kernel" / "k.cubin").write_bytes(b"a stranger's")
    assert (known / "triton" / "kernel" / "k.cubin").read_bytes() == b"tuned"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "never"))  # nothing was tuned yet
    (tmp_path / "first" / "scratch").mkdir(parents=True)
    assert not Path(lend_caches(tmp_path / "first", "cuda")["TRITON_CACHE_DIR"]).exists()
