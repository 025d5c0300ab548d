"""fetch against the Hub's real API on real sockets: what is right and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hub_files import FILES, WEIGHTS, read_all, ref_of
from hub_server import Fault, HubServer, Repo

from paceline.errors import HubError, StorageError
from paceline.hub import (
    fetch_folder,
    manifest_path,
    parse_ref,
    read_manifest,
    verify_folder,
)
from paceline.hub.names import HubRef

pytestmark = pytest.mark.usefixtures("waits")


def test_files_and_manifest(hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    out = tmp_path / "entry"
    seen: list[tuple[int, int]] = []
    manifest = fetch_folder(ref_of(repo), out, on_progress=lambda *at: seen.append(at))
    assert read_all(out) == FILES
    total = sum(map(len, FILES.values()))
    assert seen[-1] == (total, total)
    assert manifest == read_manifest(out) == json.loads(manifest_path(out).read_text())
    assert (manifest["repo"], manifest["commit"]) == (repo.repo_id, repo.head)
    for name, data in FILES.items():
        record = manifest["files"][name]
        assert record["sha256"] == hashlib.sha256(data).hexdigest()
        assert record["bytes"] == len(data)
        assert record["lfs"] == name.endswith(".safetensors")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["entry", "entry.fetch.json"]
    assert "hf_ann" not in manifest_path(out).read_text()


@pytest.mark.parametrize(
    ("revision", "words"),
    [
        ("main", "a branch or a tag"),
        ("v1.0", "a branch or a tag"),
        ("abcdef1", "a shortened commit"),
        ("a" * 39, "a shortened commit"),
        ("g" * 40, "a branch or a tag"),
        ("a" * 41, "a branch or a tag"),
        ("", "a branch or a tag"),
    ],
)
def test_only_a_whole_commit(revision: str, words: str) -> None:
    with pytest.raises(HubError, match=words) as caught:
        parse_ref(f"ann/draft@{revision}")
    assert caught.value.rule == "rev.sha"
    assert str(caught.value).endswith("(rule rev.sha)")


@pytest.mark.parametrize(
    "name", ["draft", "a/b/c", "../draft", "ann/..", "ann/a..b", "ann/", "ann/dr\naft", "änn/draft"]
)
def test_repository_names(name: str) -> None:
    with pytest.raises(HubError, match="not the name of a repository") as caught:
        parse_ref(f"{name}@{'a' * 40}")
    assert caught.value.rule == "repo.id"


def test_a_branch_spelled_like_a_commit(hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    repo.refs["d" * 40] = repo.head
    with pytest.raises(HubError, match="another commit"):
        fetch_folder(parse_ref(f"ann/draft@{'d' * 40}"), tmp_path / "entry")
    assert not hub.count("resolve")


def test_old_commit_stays_when_the_branch_moves(hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    before = ref_of(repo)
    repo.add({"spec.json": b"{}"})
    fetch_folder(before, tmp_path / "entry")
    assert read_all(tmp_path / "entry") == FILES


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (None, "gated and no token was given"),
        ("hf_eve", "gated and this account has not been let in"),
        ("hf_wrong", "does not know this token"),
        ("hf_wr\x7fong", "characters that no token has"),
        ("hf_é", "characters that no token has"),
    ],
)
def test_no_access(
    token: str | None,
    words: str,
    repo: Repo,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError, match=words) as caught:
        fetch_folder(ref_of(repo), tmp_path / "entry")
    assert caught.value.exit_code == 2
    assert caught.value.rule == ("" if "characters" in words else "repo.access")
    assert token is None or token not in repr(caught.value)
    assert not (tmp_path / "entry").exists()


def test_a_reader_of_a_gated_repository(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_judge")
    fetch_folder(ref_of(repo), tmp_path / "entry")
    assert read_all(tmp_path / "entry") == FILES


@pytest.mark.parametrize(
    ("repo_id", "commit", "words", "rule"),
    [
        ("ann/none", "a" * 40, "no such repository", "repo.access"),
        ("eve/secret", "a" * 40, "no such repository", "repo.access"),
        ("ann/draft", "a" * 40, "no such commit", "repo.moved"),
    ],
)
def test_not_there(
    repo_id: str, commit: str, words: str, rule: str, hub: HubServer, repo: Repo, tmp_path: Path
) -> None:
    hub.add_repo("eve/secret", FILES, private=True)
    with pytest.raises(HubError, match=words) as caught:
        fetch_folder(HubRef(repo_id=repo_id, commit=commit), tmp_path / "entry")
    assert caught.value.rule == rule


@pytest.mark.parametrize("kind", ["draft", "target"])
@pytest.mark.parametrize(
    "path", ["../config.json", "a/../../b.json", "/etc/passwd", "a//b.json", "x\n.json", "", "a\\b"]
)
def test_names_that_leave_the_folder(
    path: str, kind: str, hub: HubServer, repo: Repo, tmp_path: Path
) -> None:
    repo.odd_items = [{"type": "file", "oid": "a" * 40, "size": 3, "path": path}]
    with pytest.raises(HubError, match="lists a file under the name"):
        fetch_folder(ref_of(repo), tmp_path / "entry", kind=kind)  # type: ignore[arg-type]
    assert not hub.count("resolve")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "item",
    [
        {"type": "file", "oid": "a" * 40, "size": 3, "path": "modeling.py"},
        {"type": "file", "oid": "a" * 40, "size": 3, "path": "tokenizer.json"},
        {"type": "file", "oid": "a" * 40, "size": 3, "path": "pytorch_model.bin"},
        {"type": "file", "oid": "a" * 40, "size": 3, "path": "fetch.json"},
        {"type": "directory", "oid": "a" * 40, "path": "sub"},
        {"type": "directory", "oid": "a" * 40, "path": "metadata.json"},
        {"type": "symlink", "oid": "a" * 40, "size": 3, "path": "metadata.json"},
        {"type": "file", "oid": "a" * 40, "size": 3, "path": "sub/config.json"},
    ],
)
def test_extra_files_of_a_draft(
    item: dict[str, object], hub: HubServer, repo: Repo, tmp_path: Path
) -> None:
    repo.odd_items = [item]
    with pytest.raises(HubError, match="holds what no draft has") as caught:
        fetch_folder(ref_of(repo), tmp_path / "entry")
    assert str(item["path"]) in str(caught.value)
    assert not hub.count("resolve")


@pytest.mark.parametrize(
    "item",
    [
        {"type": "file", "oid": "a" * 40, "size": -1, "path": "metadata.json"},
        {"type": "file", "oid": "a" * 40, "size": "3", "path": "metadata.json"},
        {"type": "file", "oid": "../../x", "size": 3, "path": "metadata.json"},
        {"type": "file", "oid": "a" * 40, "path": "metadata.json"},
        {"type": "file", "oid": "a" * 40, "size": 3, "path": "metadata.json", "lfs": {"size": 3}},
        {"type": "file", "oid": "a" * 40, "size": 3, "path": 7},
        {"oid": "a" * 40},
        "text",
    ],
)
def test_listing_without_sense(item: object, repo: Repo, tmp_path: Path) -> None:
    repo.odd_items = [item]  # type: ignore[list-item]
    with pytest.raises(HubError):
        fetch_folder(ref_of(repo), tmp_path / "entry")


def test_size_limits_come_before_the_download(hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    total = sum(map(len, FILES.values()))
    with pytest.raises(HubError, match=f"{total:,} bytes long together"):
        fetch_folder(ref_of(repo), tmp_path / "entry", max_bytes=total - 1)
    repo.add({**FILES, "README.md": bytes(16 * 2**20 + 1)})
    with pytest.raises(HubError, match=r"README\.md"):
        fetch_folder(ref_of(repo), tmp_path / "entry")
    repo.odd_items = [
        {"type": "file", "oid": "a" * 40, "size": 1, "path": f"model-{i:05}-of-00099.safetensors"}
        for i in range(99)
    ]
    with pytest.raises(HubError, match="too many files"):
        fetch_folder(ref_of(repo), tmp_path / "entry")
    assert not hub.count("resolve")
    hub.faults = [Fault("tree", times=0)]
    repo.odd_items = []
    fetch_folder(
        parse_ref(f"ann/draft@{next(iter(repo.commits))}"), tmp_path / "entry", max_bytes=total
    )


def test_target_takes_what_it_needs_and_names_the_rest(hub: HubServer, tmp_path: Path) -> None:
    files = {
        **{name: data for name, data in FILES.items() if name != "spec.json"},
        "tokenizer.json": b"{}",
        "model.safetensors-00001-of-00001.safetensors": WEIGHTS[:1000],
    }
    rest = {"modeling_x.py": b"import os", "model.bin": b"PK", ".hidden.json": b"{}"}
    repo = hub.add_repo("big/target", {**files, **rest})
    repo.odd_items = [{"type": "directory", "oid": "a" * 40, "path": "onnx"}]
    manifest = fetch_folder(ref_of(repo), tmp_path / "target", kind="target")
    assert read_all(tmp_path / "target") == files
    assert manifest["left_out"] == sorted([*rest, "onnx"])


@pytest.mark.parametrize("endpoint", ["ftp://x", "https://user:pw@host", "file:///etc", "hub"])
def test_endpoint_that_is_none(
    endpoint: str, repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(HubError, match="HF_ENDPOINT"):
        fetch_folder(ref_of(repo), tmp_path / "entry")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"null", b"{}", b'{"id": 3}', b"\xff"])
def test_answers_that_are_no_api(body: bytes, hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    hub.faults = [Fault("revision", body=body)]
    with pytest.raises(HubError):
        fetch_folder(ref_of(repo), tmp_path / "entry")


def test_other_folders_are_left_alone(repo: Repo, tmp_path: Path) -> None:
    out = tmp_path / "entry"
    out.mkdir()
    with pytest.raises(StorageError, match="was not fetched"):
        fetch_folder(ref_of(repo), out)
    out.rmdir()
    fetch_folder(ref_of(repo), out)
    repo.add({"spec.json": b"{}"})
    with pytest.raises(StorageError, match="already holds ann/draft@"):
        fetch_folder(ref_of(repo), out)


def test_verify_names_every_change(repo: Repo, tmp_path: Path) -> None:
    out = tmp_path / "entry"
    fetch_folder(ref_of(repo), out)
    (out / "config.json").write_bytes(b"{}")
    (out / "spec.json").unlink()
    (out / "evil.py").write_bytes(b"")
    weights = out / "model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    found = verify_folder(out)
    assert [line.split(":")[0] for line in found] == [
        "config.json",
        "model.safetensors",
        "spec.json",
        "evil.py",
    ]
    manifest_path(out).unlink()
    with pytest.raises(HubError, match="does not exist"):
        verify_folder(out)
