"""The corpus of the fuzzers: what each file is answered with, and mutations of all of them.

`bench/fuzz_readers.py` runs a million of these; here a few thousand, on every `make check`.
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import CORPUS, mutate_document, mutate_header, read_corpus

from paceline.safetensors_header import scan_header
from paceline.strict_json import scan_json

EXPECTED = json.loads((CORPUS / "expected.json").read_text())
HEADERS, DOCUMENTS = read_corpus("headers"), read_corpus("documents")
FEW = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def test_the_corpus_is_what_its_builder_writes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        "build_readers", CORPUS.parent / "build_readers.py"
    )
    assert spec is not None
    assert spec.loader is not None
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    builder.build_corpus(tmp_path)
    built = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.*")}
    kept = {path.relative_to(CORPUS): path.read_bytes() for path in CORPUS.rglob("*.*")}
    assert built == kept, "run python tests/corpus/build_readers.py"
    for kind in ("headers", "documents"):
        assert {path.name for path in (CORPUS / kind).iterdir()} == set(EXPECTED[kind])
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 64 * 1024


@pytest.mark.parametrize("name", sorted(EXPECTED["headers"]))
def test_header(name: str) -> None:
    _, problems = scan_header(CORPUS / "headers" / name)
    assert sorted({problem.rule for problem in problems}) == EXPECTED["headers"][name]
    assert name.startswith(("sound", "empty-table")) == (not problems)


@pytest.mark.parametrize("name", sorted(EXPECTED["documents"]))
def test_document(name: str) -> None:
    _, problems = scan_json((CORPUS / "documents" / name).read_bytes(), file=name)
    assert sorted({problem.rule for problem in problems}) == EXPECTED["documents"][name]


@FEW
@given(seed=st.integers(0, 2**32))
def test_a_mutated_header_is_refused_or_read_as_the_public_reader_does(
    tmp_path: Path, seed: int
) -> None:
    safetensors = pytest.importorskip("safetensors")
    data = mutate_header(Random(seed), HEADERS)
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    began = time.process_time()
    header, problems = scan_header(path)
    assert time.process_time() - began < 1.0
    if header is None or problems:
        assert problems
        assert all(problem.message and problem.rule for problem in problems)
        return
    theirs = dict(safetensors.deserialize(data))
    assert set(theirs) == set(header.tensors)
    for name, own in header.tensors.items():
        assert own.dtype == theirs[name]["dtype"]
        assert list(own.shape) == list(theirs[name]["shape"])
        assert data[own.start : own.end] == bytes(theirs[name]["data"])


@FEW
@given(seed=st.integers(0, 2**32))
def test_a_mutated_document_is_refused_or_read_as_json_does(seed: int) -> None:
    data = mutate_document(Random(seed), DOCUMENTS)
    value, problems = scan_json(data, file="x.json")
    if not problems:
        assert repr(value) == repr(json.loads(data))


def test_mutations_reach_far_and_accept_some() -> None:
    """A fuzzer whose cases all die at the door tests the door."""
    random, seen = Random(0), dict[str, int]()
    for _ in range(3000):
        _, problems = scan_json(mutate_document(random, DOCUMENTS), file="x")
        for rule in {problem.rule for problem in problems} or {"accepted"}:
            seen[rule] = seen.get(rule, 0) + 1
    assert set(seen) >= {"accepted", "json.const", "json.depth", "json.dup", "json.syntax"}
    assert seen["accepted"] > 300


def test_mutated_headers_reach_every_rule_of_the_reader(tmp_path: Path) -> None:
    random, seen = Random(0), dict[str, int]()
    path = tmp_path / "x"
    for _ in range(3000):
        path.write_bytes(mutate_header(random, HEADERS))
        _, problems = scan_header(path)
        for rule in {problem.rule for problem in problems} or {"accepted"}:
            seen[rule] = seen.get(rule, 0) + 1
    rules = ["header", "dup", "fields", "dtype", "shape", "cover", "align", "name", "meta"]
    assert set(seen) >= {"accepted", *(f"st.{rule}" for rule in rules)}
    assert seen["accepted"] > 100
