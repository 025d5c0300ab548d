"""Writes docs/rules.md from the table of rules that the validator itself uses.

    python scripts/write_rules_doc.py

tests/unit/validate/test_rule_page.py says when the page is behind the table.
"""

from __future__ import annotations

from pathlib import Path

from paceline.records import write_text
from paceline.validate import RULES, Rule
from paceline.validate.rules import name_input

PAGE = Path(__file__).parents[1] / "docs" / "rules.md"
HEAD = """# Rules of `paceline validate`

Written by `scripts/write_rules_doc.py` from [rules.toml](../src/paceline/validate/rules.toml):
change that file, not this page. `paceline validate --explain RULE` prints one entry.
An error refuses the draft (exit 2), a warning asks for a look (exit 1 under `--strict`), a note
only tells. A rule may tell a milder case with a milder severity. Words in `{}` stand for what was
found.

Without `--target`, `--rules` or `--deep` some rules are checked in part or not at all: every run
names them in its `not.checked` notes, and `--junit` marks them as skipped. Everything but the
rules that need `--deep` or `--run` reads names, JSON, headers and vocabulary maps only, without
torch, transformers or vLLM. Rules that need `paceline fetch` are checked by that command, and by
`validate` where its manifest lies beside the folder.

## In a CI job

```yaml
# .github/workflows/draft.yml
name: draft
on: [push, pull_request]
env:
  PACELINE: git+https://github.com/OWNER/paceline    # where this repository lives, at a commit
jobs:
  validate:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
        with:
          lfs: true
      - uses: actions/setup-python@v5
        with:
          python-version: "3.11"
      - run: pip install "$PACELINE"
      - run: paceline validate draft/ --rules emc2-2027 --deep --strict --junit report.xml
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: validate
          path: report.xml
```

`report.xml` is JUnit: one test case a rule, failed, passed or skipped. `--json` prints the findings
as one object. The base install has no torch, so the job takes a minute.
"""


def build_page() -> str:
    """The whole page: a table to look through, then every rule."""
    parts = [HEAD]
    groups: dict[str, list[Rule]] = {}
    for rule in RULES.values():
        groups.setdefault(rule.group, []).append(rule)
    parts.append(f"## All {len(RULES)} rules\n")
    parts += ["| rule | severity | what must hold | needs |", "| --- | --- | --- | --- |"]
    for rule in RULES.values():
        link = f"[{rule.rule_id}](#{rule.rule_id.replace('.', '')})"
        cells = (link, rule.severity, rule.summary.replace("|", "\\|"), name_inputs(rule))
        parts.append(f"| {' | '.join(cells)} |")
    for group, rules in groups.items():
        parts.append(f"\n## {group}")
        parts += map(build_entry, rules)
    return "\n".join(parts) + "\n"


def build_entry(rule: Rule) -> str:
    module, _, function = rule.by.rpartition(".")
    path = f"src/paceline/{module.replace('.', '/')}.py"
    needs = name_inputs(rule)
    return "\n".join(
        [
            f"\n### {rule.rule_id}\n",
            f"**{rule.severity}**: {rule.summary}. {rule.why}\n",
            f"- says: `{rule.message}`",
            f"- to do: {rule.fix}",
            *([f"- needs: {needs}"] if needs else []),
            f"- checked by [`{function}`](../{path})",
        ]
    )


def name_inputs(rule: Rule) -> str:
    shown = [f"`{name_input(name)}`" for name in rule.needs]
    return ", ".join([*shown, *(f"in part `{name_input(name)}`" for name in rule.partly)])


if __name__ == "__main__":
    write_text(PAGE, build_page())
