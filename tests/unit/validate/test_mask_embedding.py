"""`mask_embedding.pt` beside a DFlash draft: a warning if it is plain, an error if it is not."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import build_draft, build_target_facts
from contract_cases import CASES, build_tensors_of, write_folder
from torch_files import build_archive, build_plain, frame, saved_tensor

from paceline.draft import MASK_EMBEDDING, read_draft
from paceline.errors import DraftError
from paceline.rules import Rules, read_rules
from paceline.validate import Report, validate_draft

(DFLASH,) = [case for case in CASES if case.name == "dflash"]
WIDTH, TOKEN = DFLASH.config["hidden_size"], DFLASH.config["dflash_config"]["mask_token_id"]
WIDE = {"hidden_size": 64, "vocab_size": 256, "num_tokenizer_tokens": 250, "eos_token_ids": (2,)}


def build(folder: Path, data: bytes | None) -> Path:
    write_folder(DFLASH, folder, build_tensors_of(DFLASH))
    if data is not None:
        (folder / MASK_EMBEDDING).write_bytes(data)
    return folder


def check(folder: Path, rules: Rules | None = None, **more: Any) -> Report:
    target = build_target_facts(folder.parent, **WIDE)
    return validate_draft(folder, target=target, rules=rules, **more)


def told(report: Report, severity: str) -> dict[str, str]:
    return {item.rule: item.message for item in report.findings if item.severity == severity}


def build_doubles(value: float) -> bytes:
    members = {
        "data.pkl": frame(saved_tensor(WIDTH, kind="DoubleStorage")),
        "data/0": struct.pack("<d", value) * WIDTH,
        "version": b"3\n",
    }
    return build_archive(members)


def test_doubles_are_read(tmp_path: Path) -> None:
    report = check(build(tmp_path / "d", build_doubles(0.5)), deep=True)
    assert told(report, "error") == {}


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_plain_file_warns_and_a_contest_refuses_it(token: int | None, tmp_path: Path) -> None:
    folder = build(tmp_path / "d", build_plain(WIDTH, token=token))
    report = check(folder, deep=True)
    assert told(report, "error") == {}
    assert "unpickles it" in told(report, "warning")["fs.pickle"]
    contest = check(folder, read_rules("emc2-2027"))
    assert told(contest, "error")["fs.pickle"] == "pickles are not accepted"
    with pytest.raises(DraftError, match="Paceline gives it none"):
        read_draft(folder)


@pytest.mark.parametrize(
    ("data", "rule", "words"),
    [
        (lambda: b"PK\x03\x04", "fs.pickle", "not trusted"),
        (
            lambda: build_archive({"data.pkl": frame(b"cos\nsystem\n)R"), "version": b"3"}),
            "fs.pickle",
            "names 'os system'",
        ),
        (lambda: build_plain(WIDTH - 1), "ten.shape", "holds 63 numbers, the draft is 64 wide"),
        (lambda: build_plain(WIDTH, token=3), "cfg.mask", "another mask token"),
        (lambda: build_plain(WIDTH, value=b"\xc0\x7f"), "ten.finite", "64 values"),
        (lambda: build_doubles(float("inf")), "ten.finite", "64 values"),
        (lambda: b"\0" * (16 * 2**20 + 1), "fs.size", "too large"),
    ],
)
def test_what_vllm_stops_at_or_nobody_should_unpickle(
    data: Callable[[], bytes], rule: str, words: str, tmp_path: Path
) -> None:
    report = check(build(tmp_path / "d", data()), deep=True)
    assert words in told(report, "error")[rule]


def test_a_row_saved_from_a_gpu_is_told(tmp_path: Path) -> None:
    members = {
        "data.pkl": frame(saved_tensor(WIDTH, place="cuda:0")),
        "data/0": bytes(2 * WIDTH),
        "version": b"3\n",
    }
    report = check(build(tmp_path / "d", build_archive(members)))
    assert "on 'cuda:0' alone" in told(report, "warning")["fs.pickle"]


def test_of_another_family_it_is_no_part(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    (folder / MASK_EMBEDDING).write_bytes(build_plain(16))
    report = validate_draft(folder, target=build_target_facts(tmp_path))
    assert "for DFlash alone" in told(report, "error")["fs.pickle"]


def test_links_and_folders_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(build_plain(WIDTH))
    linked = build(tmp_path / "a", None)
    (linked / MASK_EMBEDDING).symlink_to(tmp_path / "x")
    assert "fs.type" in told(check(linked), "error")
    folder = build(tmp_path / "b", None)
    (folder / MASK_EMBEDDING).mkdir()
    assert "fs.flat" in told(check(folder), "error")


def test_served_by_hand_it_is_told_apart_too(tmp_path: Path) -> None:
    """vLLM opens it for DFlash, so by hand nothing is milder."""
    by_hand = {"family": "dflash", "num_speculative_tokens": 3}
    for name, data, severity in (("a", build_plain(WIDTH), "warning"), ("b", b"PK", "error")):
        folder = build(tmp_path / name, data)
        (folder / "spec.json").unlink()
        assert "fs.pickle" in told(check(folder, by_hand=by_hand), severity)
