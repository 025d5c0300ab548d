"""Folders that mean harm: no code runs, nothing outside the folder is read, nothing hangs."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from bad_folders import raw_header
from builders import build_draft, build_shards, build_target_facts, encode_d2t
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.draft import read_draft
from paceline.errors import DraftError
from paceline.validate import RULES, Report, validate_draft


def check(folder: Path, deep: bool = True) -> Report:
    return validate_draft(folder, target=build_target_facts(folder.parent), deep=deep)


def rules(report: Report) -> set[str]:
    return {item.rule for item in report.findings if item.severity == "error"}


def test_a4_huge_rotary_table_fails(tmp_path: Path) -> None:
    report = check(build_draft(tmp_path / "a", config={"max_position_embeddings": 10**9}))
    assert rules(report) == {"cfg.pos"}
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 1000.0}
    assert rules(check(build_draft(tmp_path / "b", config={"rope_parameters": rope}))) == {
        "cfg.pos"
    }


def test_long_llama3_rope_is_not_taken_for_a_huge_table(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    config = {"max_position_embeddings": 131072, "rope_parameters": rope}
    assert check(build_draft(tmp_path / "d", config=config)).verdict == "pass"


@pytest.mark.parametrize(
    "change",
    [
        {"auto_map": {"AutoModel": "modeling.Draft"}},
        {"eagle_config": {"auto_map": {}}},
        {"trust_remote_code": True},
        {"_attn_implementation_internal": "someone/kernel"},
        {"rope_parameters": {"rope_type": "default", "x": [{"auto_class": "y"}]}},
    ],
)
def test_a13_keys_that_load_code_fail_at_any_depth(change: dict[str, Any], tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d", config=change, weights_follow_config=False)
    assert "cfg.auto_map" in rules(check(folder))


def test_a13_code_beside_the_weights_fails_and_never_runs(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    for name in ("modeling.py", "x.SO", "chat_template.jinja", "tool.ipynb"):
        (folder / name).write_text("raise SystemExit('ran')")
    report = check(folder)
    assert {item.file for item in report.findings if item.rule == "fs.code"} == {
        "modeling.py",
        "x.SO",
        "chat_template.jinja",
        "tool.ipynb",
    }


def test_a13_a_pickle_under_a_safetensors_name_fails(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    (folder / "model.safetensors").write_bytes(b"PK\x03\x04" + b"\0" * 200)
    found = [item for item in check(folder).findings if item.rule == "fs.pickle"]
    assert "zip archive" in found[0].message


def test_a14_patterns_never_reach_a_matcher(tmp_path: Path) -> None:
    config = {"quantization_config": {"ignore": ["re:(a+)+$"] * 1000}}
    folder = build_draft(tmp_path / "d", config=config)
    assert "q.method" in rules(check(folder))


def test_a11_non_finite_weights_fail_and_name_the_tensor(tmp_path: Path) -> None:
    infinite = struct.pack("<H", 0x7F80)
    raw = b"\x80\x3f" * 15 + infinite
    folder = build_draft(tmp_path / "d", tensors={"norm.weight": ("BF16", (16,), raw)})
    assert check(folder, deep=False).verdict == "pass"
    (found,) = [item for item in check(folder).findings if item.rule == "ten.finite"]
    assert found.where == "norm.weight"
    assert "1 values" in found.message


def test_a12_ids_out_of_range_fail_without_reading_weights(tmp_path: Path) -> None:
    tensors = {"d2t": encode_d2t([2**62] * 16)}
    assert "ten.d2t" in rules(check(build_draft(tmp_path / "a", tensors=tensors), deep=False))
    config = {"eagle_aux_hidden_state_layer_ids": [1, 2, 10**6]}
    assert "cfg.aux" in rules(check(build_draft(tmp_path / "b", config=config), deep=False))


def test_links_are_never_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"password": "hunter2"}')
    for name in ("config.json", "model.safetensors", "metadata.json"):
        folder = build_draft(tmp_path / name.split(".")[0])
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
        report = check(folder)
        assert "fs.type" in rules(report)
        assert "hunter2" not in json.dumps(report.to_json_dict())
        with pytest.raises(DraftError):
            read_draft(folder)


def test_hard_links_folders_and_colliding_names_fail(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    os.link(folder / "spec.json", tmp_path / "other.json")
    (folder / "sub").mkdir()
    (folder / "readme.MD").write_text("a")
    (folder / "README.md").write_text("b")
    messages = " ".join(item.message for item in check(folder).findings)
    assert "is a hard link" in messages
    assert "is a folder" in messages
    assert "only in upper and lower case" in messages


def test_a_fifo_does_not_hang_anything(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "x.json"):
        folder = build_draft(tmp_path / name.split(".")[0])
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        started = time.monotonic()
        assert "fs.type" in rules(check(folder))
        if name != "x.json":
            with pytest.raises(DraftError):
                read_draft(folder)
        else:
            read_draft(folder)
        assert time.monotonic() - started < 5


def test_names_are_printed_safely(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    (folder / "a\x1b[2Jb\u202etxt").write_text("x")
    with open(os.fsencode(folder) + b"/\xff\xfe", "w") as file:
        file.write("x")
    text = json.dumps(check(folder).to_json_dict(), ensure_ascii=False)
    assert "\x1b" not in text
    assert "\u202e" not in text
    text.encode("utf-8")


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 100, 1500, 9000])
def test_a_half_written_weight_file_fails_with_a_reason(cut: int, tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    report = check(folder)
    assert report.verdict == "fail"
    found = [item for item in report.findings if item.rule in {"st.header", "st.cover"}]
    assert "cut short" in found[0].message
    with pytest.raises(DraftError, match="cut short"):
        read_draft(folder)


def test_a_large_hostile_header_ends_in_bounded_time(tmp_path: Path) -> None:
    entries = b",".join(
        b'"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(200_000)
    )
    folder = raw_header(tmp_path / "d", None, text=b"{" + entries + b"}")
    started = time.process_time()
    assert check(folder).verdict == "fail"
    assert time.process_time() - started < 10


def test_the_static_pass_imports_no_heavy_package(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    code = (
        "import sys; from paceline.validate import validate_draft;"
        f"validate_draft({str(folder)!r}, deep=True);"
        "print(sorted({'torch', 'transformers', 'vllm', 'safetensors'} & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


# random and mutated input: a verdict, never an exception

SLOW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
NAMES = st.sampled_from(["config.json", "spec.json", "metadata.json", "model.safetensors"])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["eagle3", "ngram", [1, 2, 3], {"a": {}}, 2**70, -1]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


def settle(folder: Path, name: str, data: bytes) -> None:
    before = (folder / name).read_bytes()
    try:
        (folder / name).write_bytes(data)
        report = validate_draft(folder, target=build_target_facts(folder), deep=True)
        assert report.verdict in {"pass", "warn", "fail"}
        assert all(item.rule in RULES for item in report.findings)
        json.dumps(report.to_json_dict()).encode("utf-8")
        try:
            read_draft(folder)
        except DraftError as error:
            assert report.verdict == "fail"
            str(error).encode("utf-8")
    finally:
        (folder / name).write_bytes(before)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_draft(tmp_path_factory.mktemp("hostile") / "draft")


@SLOW
@given(name=NAMES, data=st.binary(max_size=400))
def test_random_bytes(sound: Path, name: str, data: bytes) -> None:
    settle(sound, name, data)


@SLOW
@given(data=st.data())
def test_flipped_bytes(sound: Path, data: st.DataObject) -> None:
    name = data.draw(NAMES)
    content = bytearray((sound / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(content), 2500) - 1))
        content[at] = data.draw(st.integers(0, 255))
    settle(sound, name, bytes(content))


@SLOW
@given(name=st.sampled_from(["config.json", "spec.json", "metadata.json"]), data=st.data())
def test_mutated_json(sound: Path, name: str, data: st.DataObject) -> None:
    value = json.loads((sound / name).read_text())
    for key in data.draw(st.lists(st.sampled_from(sorted(value)), min_size=1, max_size=3)):
        value[key] = data.draw(JSON)
    settle(sound, name, json.dumps(value).encode())


@SLOW
@given(data=st.data())
def test_mutated_headers(sound: Path, data: st.DataObject) -> None:
    content = (sound / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    for name in data.draw(st.lists(st.sampled_from(sorted(header)), min_size=1, max_size=3)):
        entry = header[name]
        if data.draw(st.booleans()) and isinstance(entry, dict):
            entry[data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))] = data.draw(JSON)
        else:
            header[name] = data.draw(JSON)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    settle(sound, "model.safetensors", struct.pack("<Q", len(text)) + text + content[8 + length :])


@pytest.mark.parametrize(
    "header",
    [b'{"a":' + b"[" * (16 * 2**20 - 100) + b"}", b"{" + b'"a":1,' * 2_000_000 + b'"b":1}'],
    ids=["brackets", "values"],
)
def test_a_header_bomb_is_refused_before_it_is_read_through(header: bytes, tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    begin = time.process_time()
    assert "st.header" in rules(check(folder))
    assert time.process_time() - begin < 2.0  # read through: 7 s and more


def test_many_shards_get_no_more_room_than_one_file(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    (folder / "model.safetensors").unlink()
    entry = '"%s%d":{"dtype":"BF16","shape":[1],"data_offsets":[%d,%d]}'
    rows = (entry % ("a" * 80, i, 2 * i, 2 * i + 2) for i in range(11_000))
    text = ("{" + ",".join(rows) + "}").encode()
    text += b" " * (-len(text) % 8)
    data = struct.pack("<Q", len(text)) + text + b"\0" * 22_000
    for number in range(1, 41):
        (folder / f"model-{number:05d}-of-00040.safetensors").write_bytes(data)
    begin = time.process_time()
    assert "st.count" in rules(check(folder))
    assert time.process_time() - begin < 6.0  # all forty: minutes
    with pytest.raises(DraftError):
        read_draft(folder)


def test_names_of_files_never_reach_the_terminal_raw(tmp_path: Path) -> None:
    folder = build_shards(tmp_path / "d")
    first = folder / "model-00001-of-00002.safetensors"
    hostile = "\x1b[2J\udcff.safetensors"
    (folder / hostile).write_bytes(first.read_bytes())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["extra.weight"] = "\x1b[2J"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    report = check(folder)
    assert report.verdict == "fail"
    for item in report.findings:
        for text in (item.file, item.where, item.found, item.expected, item.message, item.fix):
            assert text.isprintable()
            assert len(text) <= 600
    with pytest.raises(DraftError) as caught:
        read_draft(folder)
    assert str(caught.value).isprintable()


def test_a_record_is_shown_in_short(tmp_path: Path) -> None:
    """Any value of a stranger's metadata may be quoted in a finding."""
    huge = {"a": ["\x1b" * 50] * 100}
    trained = {"trained_rotary_dim": huge, "thinking": huge, "embeddings": huge}
    for item in check(build_draft(tmp_path / "d", metadata={"trained": trained})).findings:
        assert item.message.isprintable()
        assert len(item.message) <= 600


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b.safetensors"]
)
def test_an_index_that_leaves_the_folder_is_called_that(file: str, tmp_path: Path) -> None:
    found = check(build_shards(tmp_path / "d", index={"fc.weight": file})).findings
    assert any("points outside the folder" in item.message for item in found)
