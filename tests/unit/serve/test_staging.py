from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.draft import Draft
from paceline.errors import DraftError
from paceline.serve import build_plan
from paceline.serve.staging import METHOD_WORDS, make_staging, remove_staging
from paceline.target import TargetFacts

Targets = Callable[..., TargetFacts]
Drafts = Callable[..., Draft]


def test_only_neutral_paths_and_needed_files(make_target: Targets, make_draft: Drafts) -> None:
    target, draft = make_target(), make_draft("eagle3-vs-dflash")
    (target.path / "modeling_toy.py").write_text("raise SystemExit")
    (target.path / "pytorch_model.bin").write_bytes(b"pickle")
    (draft.path / "config.json").write_text('{"a": 1}')
    (draft.path / "evil.py").write_text("raise SystemExit")
    staging = make_staging(build_plan(target, draft, device="cpu"))
    files = sorted(str(path.relative_to(staging)) for path in staging.rglob("*") if path.is_file())
    assert files == [
        f"draft-{'c' * 12}/config.json",
        f"draft-{'c' * 12}/model.safetensors",
        f"target-{'b' * 12}/config.json",
        f"target-{'b' * 12}/model.safetensors",
    ]
    assert not any(word in str(staging).lower() for word in METHOD_WORDS)
    remove_staging(staging)
    assert not staging.exists()
    assert (target.path / "model.safetensors").read_bytes() == b"weights"


def test_a_draft_is_a_copy_that_later_changes_do_not_reach(
    make_target: Targets, make_draft: Drafts
) -> None:
    draft = make_draft()
    staging = make_staging(build_plan(make_target(), draft, device="cpu"))
    (draft.path / "model.safetensors").write_bytes(b"changed later")
    staged = staging / f"draft-{'c' * 12}" / "model.safetensors"
    assert staged.read_bytes() == b"draft weights"
    remove_staging(staging)


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_draft_file_that_is_not_regular_is_refused(
    make_target: Targets, make_draft: Drafts, kind: str, tmp_path: Path
) -> None:
    draft = make_draft()
    weights = draft.path / "model.safetensors"
    weights.unlink()
    if kind == "link":
        weights.symlink_to("/etc/passwd")
    else:
        os.mkfifo(weights)
    with pytest.raises(DraftError, match=r"model\.safetensors"):
        make_staging(build_plan(make_target(), draft, device="cpu"))


def test_a_temporary_folder_with_a_method_word_is_avoided(
    make_target: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "eagle3"
    named.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(named))
    staging = make_staging(build_plan(make_target(), device="cpu"))
    assert not staging.is_relative_to(named)
    remove_staging(staging)


def test_leftovers_of_dead_processes_are_swept(
    make_target: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "temporary"
    root.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(root))
    dead, fresh, alive = (root / f"paceline-{pid}-x" for pid in (2**22 + 1, 2**22 + 2, os.getpid()))
    for folder in (dead, fresh, alive):
        folder.mkdir()
    for folder in (dead, alive):
        os.utime(folder, (0, 0))
    remove_staging(make_staging(build_plan(make_target(), device="cpu")))
    assert sorted(path.name for path in root.iterdir()) == sorted([fresh.name, alive.name])
