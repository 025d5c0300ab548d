"""Where a training writes, known and checked before torch is imported."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import RecipeError, StorageError

__all__ = ["checkpoint_path", "require_free"]


def checkpoint_path(out_dir: str | Path) -> Path:
    """Beside the draft folder, since a draft folder holds a draft and nothing else."""
    out_dir = Path(out_dir)
    return out_dir.with_name(f"{out_dir.name}.checkpoint")


def require_free(out_dir: str | Path, *, resume: bool) -> None:
    """Raises StorageError where a draft would go over something, RecipeError over a checkpoint."""
    out_dir = Path(out_dir)
    if out_dir.exists():
        raise StorageError(
            "already exists", where=str(out_dir), fix="Choose another --out, or remove it first."
        )
    path = checkpoint_path(out_dir)
    if path.exists() and not resume:
        raise RecipeError(
            "an unfinished training lies beside --out",
            where=str(path),
            fix="Go on with --resume, or remove that folder to start again.",
        )
