"""Rules about where a fetched folder comes from: `paceline fetch` leaves a manifest beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from paceline.errors import HubError, PacelineError
from paceline.hub import manifest_path, parse_ref, read_manifest, verify_folder
from paceline.problems import show_value
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding

__all__ = ["check_provenance", "has_manifest"]

_MAX_MANIFEST_BYTES = 2**20
_MAX_TOLD = 5


def has_manifest(case: Case) -> bool:
    """Whether the folder was fetched; the manifest lies beside it, where no author can write."""
    try:
        status = os.lstat(manifest_path(case.scan.path))
    except OSError:
        return False
    return status.st_size <= _MAX_MANIFEST_BYTES


def check_provenance(case: Case, *, deep: bool) -> Iterator[Finding]:
    """`rev.sha`, `repo.id` and `repo.moved` of a fetched folder; nothing of any other.

    deep: hashes every file again; else names and sizes alone.
    """
    if not has_manifest(case):
        return
    try:
        manifest = read_manifest(case.scan.path)
        parse_ref(f"{manifest.get('repo')}@{manifest.get('commit')}")
    except PacelineError as problem:
        rule = problem.rule if isinstance(problem, HubError) else ""
        yield finding(
            rule or "repo.moved",
            "",
            problem.what,
            where=manifest_path(case.scan.path).name,
            found=manifest_path(case.scan.path).name,
            expected=problem.expected or "what `paceline fetch` wrote",
            fix=problem.fix or "Fetch the folder again.",
        )
        return
    differences = list(_compare_sizes(case, manifest["files"]))
    if deep and not differences:
        differences = verify_folder(case.scan.path)
    if differences:
        more = len(differences) - _MAX_TOLD
        shown = "; ".join(differences[:_MAX_TOLD]) + (f"; {more} more" if more > 0 else "")
        yield finding(
            "repo.moved",
            "",
            f"the folder is not what was fetched: {shown}",
            where=f"{manifest['repo']}@{manifest['commit']}",
            found=differences[0],
            expected="the files that were fetched, byte for byte",
            fix="Remove the folder and fetch it again.",
        )


def _compare_sizes(case: Case, recorded: dict[str, dict[str, object]]) -> Iterator[str]:
    """One sentence for each file that is gone, new or of another size."""
    for name in sorted({*recorded, *case.scan.names}):
        if name not in recorded:
            yield f"{show_value(name)}: was not fetched, it came later"
        elif name not in case.scan.names:
            yield f"{show_value(name)}: is gone"
        else:
            size = os.lstat(case.scan.path / name).st_size
            if size != recorded[name].get("bytes"):
                yield f"{show_value(name)}: is {size:,} bytes long, fetched were others"
