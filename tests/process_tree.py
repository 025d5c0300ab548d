"""Which process started which, as the kernel says."""

from __future__ import annotations

from pathlib import Path


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(pid: int) -> list[int]:
    """Those that any thread of it started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(word) for task in tasks for word in (task / "children").read_text().split()]


def descendants_of(pid: int) -> list[int]:
    """Every process below it, a child before its own."""
    return [found for child in children_of(pid) for found in (child, *descendants_of(child))]
