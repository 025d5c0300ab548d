"""Estimates by shape, against sums made by hand here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from bad_folders import build_packed
from builders import build_draft, build_target_facts
from contract_cases import CASES, build_tensors_of, write_folder

from paceline.rules import Rules, read_rules
from paceline.target import TargetFacts, read_target
from paceline.validate import Report, validate_draft

EMC2 = read_rules("emc2-2027")
CASE = {case.name: case for case in CASES}
EAGLE3, MTP = CASE["eagle3, Llama layer, cut vocabulary"], CASE["mtp, Qwen3.5"]
# one layer, one key-value head of 32, key and value, 16 bits, 16,384 tokens
CACHE = 1 * 1 * 32 * 2 * 2 * 16_384
MLP = 3 * 96 * 64
MTP_WEIGHTS = 2 * (
    64 * 128  # fc
    + 3 * 64  # norms around it
    + 2 * 64 + 2 * 32  # norms of the layer and of its heads
    + 128 * 64  # queries and their gate
    + 2 * 32 * 64  # keys, values
    + 64 * 64  # output
    + MLP
)  # fmt: skip
EAGLE3_WEIGHTS = 2 * (
    64 * 192  # fc
    + 64 + 3 * 64  # norms
    + 128 * 64  # its own head
    + 64 * 128 + 2 * 32 * 128 + 64 * 64  # attention, inputs twice as wide
    + MLP
) + 8 * 128  # fmt: skip


@pytest.fixture
def target(tmp_path: Path) -> TargetFacts:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(MTP.target))
    return read_target(tmp_path / "target", require_weights=False)


def check(case_name: str, target: TargetFacts, rules: Rules | None = EMC2) -> Report:
    folder = target.path.parent / "d"
    write_folder(CASE[case_name], folder, build_tensors_of(CASE[case_name]))
    return validate_draft(folder, target=target, rules=rules)


def found(report: Report) -> dict[str, str]:
    return {item.severity: item.found for item in report.findings if item.rule == "mem.est"}


def test_an_mtp_head_is_its_own_baseline(target: TargetFacts) -> None:
    assert found(check(MTP.name, target)) == {"note": f"{MTP_WEIGHTS + CACHE:,} bytes"}


def test_a_larger_draft_is_told_against_the_contests_baseline(target: TargetFacts) -> None:
    report = check(EAGLE3.name, target)
    size = f"{EAGLE3_WEIGHTS + CACHE:,} bytes"
    assert found(report) == {"note": size, "warning": size}
    (warning,) = [f for f in report.findings if (f.rule, f.severity) == ("mem.est", "warning")]
    ratio = (EAGLE3_WEIGHTS + CACHE) / (MTP_WEIGHTS + CACHE)
    assert f"{ratio:.2f} times the baseline" in warning.message
    assert f"against {MTP_WEIGHTS + CACHE:,}" in warning.message


def test_without_a_contest_there_is_no_baseline(target: TargetFacts) -> None:
    assert set(found(check(EAGLE3.name, target, rules=None))) == {"note"}


def test_medusa_keeps_no_keys_and_values(target: TargetFacts) -> None:
    weights = 2 * (3 * 64 * 64 + 256 * 64)
    report = check("medusa, one output layer", target, rules=None)
    assert found(report) == {"note": f"{weights:,} bytes"}


def test_packed_weights_count_as_stored(tmp_path: Path) -> None:
    plain = validate_draft(build_draft(tmp_path / "a"), target=build_target_facts(tmp_path))
    packed = validate_draft(build_packed(tmp_path / "b"), target=build_target_facts(tmp_path))
    held = {
        report: int(found(report)["note"].split()[0].replace(",", "")) for report in (plain, packed)
    }
    # q 16 x 32, k and v 8 x 32, o 16 x 16, and three of 32 x 16: 16 bits against 4, and the scales
    elements = 16 * 32 + 2 * 8 * 32 + 16 * 16 + 3 * 32 * 16
    scales = sum(
        tensor["data_offsets"][1] - tensor["data_offsets"][0]
        for name, tensor in read_table(tmp_path / "b" / "model.safetensors").items()
        if name.endswith(("_scale", "_shape"))
    )
    assert held[plain] - held[packed] == elements * 2 - elements // 2 - scales


def read_table(path: Path) -> dict[str, dict[str, list[int]]]:
    data = path.read_bytes()
    table = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {name: entry for name, entry in table.items() if name != "__metadata__"}


def test_loading_counts_files_casts_and_rotary_tables(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    headers = (folder / "model.safetensors").stat().st_size
    files = headers - 8 - int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    resident = files - 64 + 2 * (64 - 16) * 16  # without t2d; 16 rows of the head are held as 64
    table = 32_768 * 4 * (2 + 12)
    total = files + resident + table

    def rules_at(limit: int) -> set[str]:
        limits = dataclasses.replace(EMC2.limits, max_files_bytes=limit)
        report = validate_draft(folder, target=build_target_facts(tmp_path), limits=limits)
        return {item.rule for item in report.findings if item.severity == "error"}

    assert "mem.load" not in rules_at(-(-total // 4))
    assert "mem.load" in rules_at((total - 1) // 4)
