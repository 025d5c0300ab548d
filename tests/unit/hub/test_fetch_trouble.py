"""fetch against the Hub's real API when something breaks: resumed, waited out or noticed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest
from command_line import PACELINE, mounted_disk, run_command
from hub_files import FILES, WEIGHTS, read_all, ref_of
from hub_server import Fault, HubServer, Repo, pointer_text

from paceline.errors import HubError, StorageError
from paceline.hub import (
    fetch_folder,
    fetch_to_cache,
    manifest_path,
    verify_folder,
)
from paceline.hub.names import HubRef

pytestmark = pytest.mark.usefixtures("waits")


CHUNK = 10 * 2**20  # what huggingface_hub writes at once; less than that is lost with a connection
LARGE = {"config.json": FILES["config.json"], "model.safetensors": bytes(2**10) + WEIGHTS * 40}


def asked_ranges(hub: HubServer) -> list[str]:
    return [line.partition(" ")[2].partition(" ")[2] for line in hub.store_log]


def test_interrupted_transfer_goes_on(hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    """Each cut costs less than a chunk: the next request asks for what is missing."""
    repo = hub.add_repo("ann/large", LARGE)
    hub.faults = [
        Fault("GET /object/", cut=CHUNK + 300_000),
        Fault("GET /object/", cut=CHUNK + 5),
    ]
    fetch_folder(ref_of(repo), tmp_path / "entry")
    assert read_all(tmp_path / "entry") == LARGE
    assert asked_ranges(hub) == ["", f"bytes={CHUNK}-", f"bytes={2 * CHUNK}-"]


def test_server_that_ignores_ranges(hub: HubServer, tmp_path: Path) -> None:
    repo = hub.add_repo("ann/large", LARGE)
    hub.faults = [
        Fault("GET /object/", cut=CHUNK + 300_000),
        Fault("GET /object/", ignore_range=True),
    ]
    seen: list[int] = []
    fetch_folder(ref_of(repo), tmp_path / "entry", on_progress=lambda done, _: seen.append(done))
    assert read_all(tmp_path / "entry") == LARGE
    assert seen[-1] == sum(map(len, LARGE.values()))


def test_a_stopped_fetch_is_gone_on_with(hub: HubServer, tmp_path: Path) -> None:
    """All attempts fail after some bytes: no folder; the next call asks for the rest only."""
    repo = hub.add_repo("ann/large", LARGE)
    hub.faults = [
        Fault("GET /object/", cut=CHUNK + 300_000),
        Fault("GET /object/", status=503, times=99),
    ]
    out = tmp_path / "entry"
    with pytest.raises(HubError, match="in trouble") as caught:
        fetch_folder(ref_of(repo), out)
    assert caught.value.exit_code == 6
    assert not out.exists()
    assert not manifest_path(out).exists()
    staging = tmp_path / f".entry.fetch-{repo.head[:12]}"
    assert (staging / "model.safetensors").stat().st_size == CHUNK
    hub.faults = []
    hub.log.clear()
    hub.store_log.clear()
    fetch_folder(ref_of(repo), out)
    assert read_all(out) == LARGE
    assert hub.count("resolve") == 1, "small files were whole already"
    assert asked_ranges(hub) == [f"bytes={CHUNK}-"]
    assert not staging.exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_stopped_command_is_gone_on_with(
    number: int, code: int, hub: HubServer, tmp_path: Path
) -> None:
    """Ctrl-C and kill -9 in the middle of a file: no folder, and what came is kept."""
    repo = hub.add_repo("ann/large", LARGE)
    hub.faults = [Fault("GET /object/", cut=CHUNK + 1, stalls=True)]
    words = [PACELINE, "fetch", str(ref_of(repo)), "--out", str(tmp_path / "entry")]
    part = tmp_path / f".entry.fetch-{repo.head[:12]}" / "model.safetensors"
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        for _ in range(400):
            if part.is_file() and part.stat().st_size == CHUNK:
                break
            select.select([], [], [], 0.05)
        command.send_signal(number)
        assert command.wait(timeout=20) == code
        assert b"Traceback" not in command.stderr.read()  # type: ignore[union-attr]
    assert sorted(item.name for item in tmp_path.iterdir()) == [part.parent.name]
    hub.store_log.clear()
    run_command(*words[1:]).require(0)
    assert read_all(tmp_path / "entry") == LARGE
    assert asked_ranges(hub) == [f"bytes={CHUNK}-"]


def test_what_was_kept_may_be_wrong(hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    """Bytes left by something else: the file starts again, once."""
    staging = tmp_path / f".entry.fetch-{repo.head[:12]}"
    staging.mkdir()
    (staging / "model.safetensors").write_bytes(b"x" * 1000)
    (staging / "spec.json").write_bytes(b"y" * 1000)
    fetch_folder(ref_of(repo), tmp_path / "entry")
    assert read_all(tmp_path / "entry") == FILES


@pytest.mark.parametrize("name", ["model.safetensors", "planted.txt"])
def test_planted_link(name: str, repo: Repo, tmp_path: Path) -> None:
    """Nothing is written through a link, and nothing planted gets into the folder."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    staging = tmp_path / f".entry.fetch-{repo.head[:12]}"
    staging.mkdir()
    (staging / name).symlink_to(victim)
    with pytest.raises((HubError, StorageError), match=r"symbolic link|did not write"):
        fetch_folder(ref_of(repo), tmp_path / "entry")
    assert victim.read_bytes() == b"mine"
    assert not (tmp_path / "entry").exists()


def test_rate_limit_is_waited_out(
    hub: HubServer, repo: Repo, tmp_path: Path, waits: list[float]
) -> None:
    limit = {"Retry-After": "7"}
    hub.faults = [
        Fault("revision", status=429, headers=limit),
        Fault("tree", status=429, headers=limit),
        Fault("GET .*/resolve/", status=429, headers=limit),
    ]
    fetch_folder(ref_of(repo), tmp_path / "entry")
    assert waits[:2] == [7.0, 7.0]
    assert waits[2] >= 7.0
    assert len(waits) == 3


def test_rate_limit_without_end(hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    hub.faults = [Fault("revision", status=429, headers={"Retry-After": "86400"})]
    with pytest.raises(HubError, match="limits how often") as caught:
        fetch_folder(ref_of(repo), tmp_path / "entry")
    assert caught.value.exit_code == 6


def test_server_errors_are_tried_again(
    hub: HubServer, repo: Repo, tmp_path: Path, waits: list[float]
) -> None:
    hub.faults = [
        Fault("revision", status=502),
        Fault("tree", status=500),
        Fault("GET .*/resolve/", status=503, times=2),
        Fault("GET /object/", status=500),
    ]
    fetch_folder(ref_of(repo), tmp_path / "entry")
    assert read_all(tmp_path / "entry") == FILES
    assert len(waits) == 5


def test_hub_out_of_reach(repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="cannot be reached") as caught:
        fetch_folder(ref_of(repo), tmp_path / "entry")
    assert caught.value.exit_code == 6


def test_pointer_instead_of_weights(hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    """Served instead of the object, and committed as a plain text."""
    hub.faults = [Fault("GET /object/", body=pointer_text(WEIGHTS), times=9)]
    with pytest.raises(HubError, match="Git LFS pointer") as caught:
        fetch_folder(ref_of(repo), tmp_path / "served")
    assert caught.value.rule == "lfs.pointer"
    hub.faults = []
    plain = {name: (data, False) for name, data in FILES.items()}
    commit = repo.commit({**plain, "model.safetensors": (pointer_text(WEIGHTS), False)})
    with pytest.raises(HubError, match="Git LFS pointer"):
        fetch_folder(HubRef(repo_id="ann/draft", commit=commit), tmp_path / "committed")
    assert not [item for item in tmp_path.iterdir() if not item.name.startswith(".")]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_content_that_is_not_the_commits(
    name: str, hub: HubServer, repo: Repo, tmp_path: Path
) -> None:
    """Same length, other bytes: the hash tells."""
    pattern = "GET /object/" if name == "model.safetensors" else f"GET .*/{name}"
    data = FILES[name]
    hub.faults = [Fault(pattern, body=data[:-1] + bytes([data[-1] ^ 1]))]
    with pytest.raises(HubError, match="the hash differs") as caught:
        fetch_folder(ref_of(repo), tmp_path / "entry")
    assert caught.value.rule == "lfs.hash"
    fetch_folder(ref_of(repo), tmp_path / "entry")
    assert read_all(tmp_path / "entry") == FILES


def test_more_than_listed(hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    hub.faults = [Fault("GET /object/", body=WEIGHTS * 4)]
    with pytest.raises(HubError, match="more than it listed"):
        fetch_folder(ref_of(repo), tmp_path / "entry")
    staging = tmp_path / f".entry.fetch-{repo.head[:12]}"
    assert (staging / "model.safetensors").stat().st_size <= len(WEIGHTS)


def test_asked_again(hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    """A second call downloads nothing, and sees a commit or a folder that changed."""
    out = tmp_path / "entry"
    first = fetch_folder(ref_of(repo), out)
    hub.log.clear()
    assert fetch_folder(ref_of(repo), out) == first
    assert not hub.count("resolve")
    assert verify_folder(out) == []

    held = dict(repo.commits[repo.head])
    repo.commits[repo.head]["config.json"] = (b"{}", False)
    with pytest.raises(HubError, match=r"other files at this commit: config\.json") as caught:
        fetch_folder(ref_of(repo), out)
    assert caught.value.rule == "repo.moved"
    repo.commits[repo.head] = held

    (out / "config.json").write_bytes(FILES["config.json"].replace(b"llama", b"lloma"))
    with pytest.raises(HubError, match=r"not what was fetched: config\.json"):
        fetch_folder(ref_of(repo), out)


def test_two_at_once(repo: Repo, tmp_path: Path) -> None:
    import fcntl

    staging = tmp_path / f".entry.fetch-{repo.head[:12]}"
    staging.mkdir()
    handle = os.open(staging, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(StorageError, match="another process"):
            fetch_folder(ref_of(repo), tmp_path / "entry")
    finally:
        os.close(handle)


def test_full_disk(hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    """Said before the download where it is known, and in the middle of it where it is not."""
    with mounted_disk(tmp_path / "disk", size="512k") as disk:
        with pytest.raises(StorageError, match="too full"):
            fetch_folder(ref_of(repo), disk / "entry")
        assert not hub.count("resolve")


def test_full_disk_in_the_middle(
    hub: HubServer, repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.hub import fetch

    monkeypatch.setattr(fetch, "_require_room", lambda *_: None)
    with mounted_disk(tmp_path / "disk", size="512k") as disk:
        with pytest.raises(StorageError, match="the disk is full"):
            fetch_folder(ref_of(repo), disk / "entry")
        assert not (disk / "entry").exists()


def test_cache_asks_once(hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = fetch_to_cache(ref_of(repo), cache, kind="draft")
    assert read_all(folder) == FILES
    hub.log.clear()
    assert fetch_to_cache(ref_of(repo), cache, kind="draft") == folder
    assert not hub.log
    (folder / "config.json").write_bytes(b"cut")
    assert fetch_to_cache(ref_of(repo), cache, kind="draft") == folder
    assert read_all(folder) == FILES


def test_many_want_the_same_into_the_cache(hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    """Four at once: one fetches, three wait and find it."""
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(
                lambda _: fetch_to_cache(ref_of(repo), tmp_path / "cache", kind="draft"), range(4)
            )
        )
    assert len(set(found)) == 1
    assert read_all(found[0]) == FILES
    assert hub.count("resolve") == len(FILES)
