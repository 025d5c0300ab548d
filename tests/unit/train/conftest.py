"""A tiny random Llama target with data rows, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import make_data, make_hybrid, make_target

from paceline.target import TargetFacts, read_target


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    return read_target(make_target(tmp_path_factory.mktemp("tiny") / "target"))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    return read_target(make_hybrid(tmp_path_factory.mktemp("hybrid") / "target"))


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory, target: TargetFacts) -> Path:
    return make_data(tmp_path_factory.mktemp("rows") / "data", target)
