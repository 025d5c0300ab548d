"""The import table of the design holds: `.importlinter`, and no torch in a base install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

_BASE_COMMANDS = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "vllm", "safetensors", "tokenizers"}:
            raise ImportError(f"base install imports {name}")
sys.meta_path.insert(0, Refuse())
import paceline.cli.app
import paceline.rules, paceline.validate, paceline.report, paceline.eval, paceline.draft
import paceline.target, paceline.data, paceline.serve, paceline.forecast, paceline.hub
"""


def test_rooms_stand_on_lower_floors_only() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_base_install_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", _BASE_COMMANDS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
