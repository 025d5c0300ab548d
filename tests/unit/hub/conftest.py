"""A Hub on this machine, the token of its user ann, and no waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_files import FILES
from hub_server import HubServer, Repo


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_ann")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
        yield server
        assert not server.leaks, "a token went to another host"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits for the Hub are written down, not waited; they are of seconds."""
    waited: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda s: waited.append(s) if s >= 0.5 else sleep(s))
    return waited


@pytest.fixture
def repo(hub: HubServer) -> Repo:
    return hub.add_repo("ann/draft", FILES, gated="manual", readers={"judge"})
