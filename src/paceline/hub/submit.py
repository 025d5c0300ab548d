"""A draft folder -> a gated repository at a commit, proven by fetching it back."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import HubError
from paceline.hub.client import Hub, TransientHubError, ask, hub_errors, open_hub
from paceline.hub.download import FileHashes, hash_file, open_plain
from paceline.hub.fetch import fetch_folder
from paceline.hub.names import HUB_OWN_FILES, HubRef, is_allowed, parse_repo_id
from paceline.problems import show_value
from paceline.records import storage_errors

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

__all__ = ["Submission", "submit_folder"]

_MAX_NAMES = 64


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What was submitted. is_private: the page is hidden, so no organiser can see it yet."""

    ref: HubRef
    files: dict[str, str]  # name -> sha256
    is_new: bool
    is_private: bool
    removed: tuple[str, ...]


def submit_folder(
    folder: str | Path,
    repo_id: str,
    *,
    listed: bool = False,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Submission:
    """Uploads a draft folder, which the caller has validated, and fetches it back to compare.

    A new repository is private and gated (each request approved by hand) before it holds a file;
    an existing one is gated first if it was not, its visibility stays. listed: makes the page
    visible once all is uploaded; the files stay gated. Files of an older draft are removed.
    Raises HubError; after a failure the same call sends only what is missing.
    """
    parse_repo_id(repo_id)
    files = _hash_folder(Path(folder))
    hub = open_hub()
    if not hub.has_token:
        raise HubError(
            "uploading needs a token",
            expected="a token with write access",
            fix="Set HF_TOKEN, or run `hf auth login`.",
        )
    info, is_new = _prepare_repo(hub, repo_id, on_stage)
    held = {item.rfilename for item in info.siblings or []} - HUB_OWN_FILES
    _require_draft_repo(repo_id, held)
    stale = tuple(sorted(held - files.keys()))
    on_stage(f"uploading {len(files)} files to {repo_id}")
    ref = _commit(hub, repo_id, Path(folder), files, stale, info.sha)
    on_stage("fetching it back to compare")
    _require_same(ref, files)
    is_private = bool(info.private)
    if listed and is_private:
        _show_page(hub, repo_id)
        is_private = False
    return Submission(
        ref=ref,
        files={name: hashes.sha256 for name, hashes in files.items()},
        is_new=is_new,
        is_private=is_private,
        removed=stale,
    )


def _hash_folder(folder: Path) -> dict[str, FileHashes]:
    """Hashes of exactly the files that may travel; any other file is an error."""
    found = {}
    with storage_errors(folder):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            names = sorted(os.listdir(handle))  # noqa: PTH208
            for name in names[: _MAX_NAMES + 1]:
                if name in HUB_OWN_FILES:
                    continue
                if not is_allowed(name, "draft") or len(names) > _MAX_NAMES:
                    raise HubError(
                        f"'{show_value(name)}' is not a file of a draft",
                        where=str(folder),
                        fix="Run `paceline validate` on the folder.",
                    )
                file = open_plain(name, handle, os.O_RDONLY)
                try:
                    found[name] = hash_file(file)
                finally:
                    os.close(file)
        finally:
            os.close(handle)
    if "spec.json" not in found:
        raise HubError("there is no spec.json", where=str(folder), expected="a draft folder")
    return found


def _prepare_repo(
    hub: Hub, repo_id: str, on_stage: Callable[[str], None]
) -> tuple[ModelInfo, bool]:
    """The repository, there and gated before any file is sent."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    def look() -> ModelInfo | None:
        try:
            return hub.api.model_info(repo_id)
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:
            return None

    info = ask(hub, repo_id, look)
    is_new = info is None
    if info is None:
        on_stage(f"creating {repo_id}, private and gated")
        ask(hub, repo_id, lambda: hub.api.create_repo(repo_id, private=True, exist_ok=True))
    if info is None or info.gated != "manual":
        try:
            ask(hub, repo_id, lambda: hub.api.update_repo_settings(repo_id, gated="manual"))
        except TransientHubError:
            raise
        except HubError:
            if info is not None and not info.private:
                raise  # else: nobody sees a private repository, gated or not
        info = ask(hub, repo_id, lambda: hub.api.model_info(repo_id))
    if info.gated != "manual" and not info.private:
        raise HubError(
            "the Hub did not gate the repository",
            where=repo_id,
            expected='access requests approved by hand ("manual")',
            fix="Turn on access requests in the repository's settings; nothing was uploaded.",
        )
    return info, is_new


def _show_page(hub: Hub, repo_id: str) -> None:
    """Makes the page of a private repository visible; never without the gate before its files."""

    def change(private: bool) -> None:
        ask(
            hub,
            repo_id,
            lambda: hub.api.update_repo_settings(repo_id, gated="manual", private=private),
        )

    change(private=False)
    info = ask(hub, repo_id, lambda: hub.api.model_info(repo_id))
    if info.gated != "manual":
        change(private=True)
        raise HubError(
            "the Hub did not gate the repository, so it is private again",
            where=repo_id,
            expected='access requests approved by hand ("manual")',
            fix="Turn on access requests in its settings, then make it visible there.",
        )


def _require_draft_repo(repo_id: str, held: set[str]) -> None:
    """A repository of something else is not emptied for a draft."""
    others = sorted(name for name in held if not is_allowed(name, "draft"))
    if others:
        raise HubError(
            f"the repository holds '{show_value(others[0])}', which is not of a draft",
            where=repo_id,
            expected="a new repository, or one that holds a draft",
            fix="Name another repository, or remove those files there; nothing was uploaded.",
        )


def _commit(
    hub: Hub,
    repo_id: str,
    folder: Path,
    files: dict[str, FileHashes],
    stale: tuple[str, ...],
    head: str | None,
) -> HubRef:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants

    with hub_errors(hub, repo_id):
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(folder / name))
            for name in files
        ]
        operations += [CommitOperationDelete(path_in_repo=name, is_folder=False) for name in stale]
        # Git LFS and not Xet: one sha256 names the same bytes here, in transit and on the Hub.
        before, constants.HF_HUB_DISABLE_XET = constants.HF_HUB_DISABLE_XET, True
        try:
            done = hub.api.create_commit(
                repo_id, operations, commit_message="Submit a draft", parent_commit=head
            )
        finally:
            constants.HF_HUB_DISABLE_XET = before
    if not re.fullmatch(r"[0-9a-f]{40}", str(done.oid)):
        raise HubError("the Hub did not name the commit it made", where=repo_id)
    return HubRef(repo_id=repo_id, commit=str(done.oid))


def _require_same(ref: HubRef, files: dict[str, FileHashes]) -> None:
    """Fetches the commit into a temporary folder and compares every hash."""
    fix = "Run the same command again; until it passes, do not hand in this commit."
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-submit-") as temporary:
            manifest = fetch_folder(ref, Path(temporary) / "back")
    except HubError as problem:
        raise HubError(
            f"it was uploaded, but could not be fetched back: {problem.what}",
            where=problem.where or str(ref),
            expected=problem.expected,
            fix=fix,
            exit_code=problem.exit_code,
            rule=problem.rule,
        ) from problem
    back = {name: item["sha256"] for name, item in manifest["files"].items()}
    sent = {name: hashes.sha256 for name, hashes in files.items()}
    if back != sent:
        changed = sorted(name for name in back.keys() | sent if back.get(name) != sent.get(name))
        raise HubError(
            f"what came back is not what is in the folder: {', '.join(changed)}",
            where=str(ref),
            fix=f"Was the folder changed during the upload? {fix}",
        )
