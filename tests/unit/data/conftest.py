from __future__ import annotations

from pathlib import Path

import pytest
from toy_chat import make_chat_target

from paceline.target import TargetFacts


@pytest.fixture
def target(tmp_path: Path) -> TargetFacts:
    return make_chat_target(tmp_path / "target")
