"""docs/rules.md is the table of rules, and says nothing else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from paceline.validate import RULES

ROOT = Path(__file__).parents[3]


def test_the_page_is_what_the_script_writes() -> None:
    spec = importlib.util.spec_from_file_location(
        "write_rules_doc", ROOT / "scripts" / "write_rules_doc.py"
    )
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    assert page == script.build_page(), "run python scripts/write_rules_doc.py"


def test_every_rule_has_its_entry_and_a_link_that_leads_somewhere() -> None:
    page = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    for rule in RULES.values():
        assert f"\n### {rule.rule_id}\n" in page
        module = rule.by.rpartition(".")[0].replace(".", "/")
        assert (ROOT / "src" / "paceline" / f"{module}.py").is_file()
