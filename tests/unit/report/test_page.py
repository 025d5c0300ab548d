from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from build_result import HOSTILE, build_result, build_variants

from paceline.errors import ResultError, StorageError
from paceline.report import build_page, write_report

VARIANTS = build_variants()
_VOID = {"meta", "br", "link", "img", "hr", "input"}
_SELF_CLOSED = {"circle", "rect", "line", "polygon", "polyline"}


class _Balance(HTMLParser):
    """Collects tags, attributes and text; fails on an unbalanced tag."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(key, value or "") for key, value in attrs]
        self.ids += [value or "" for key, value in attrs if key == "id"]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _SELF_CLOSED
        self.attributes += [(key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> at line {self.getpos()[0]}"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)


def _parse(page: str) -> _Balance:
    parser = _Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def _page(name: str) -> str:
    result, rows = VARIANTS[name]
    return build_page(result, rows)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_balanced_and_fetches_nothing(name: str) -> None:
    page = _page(name)
    parsed = _parse(page)

    assert not parsed.tags & {"script", "img", "link", "iframe", "object", "embed", "base", "form"}
    assert not [key for key, _ in parsed.attributes if key.startswith("on") or key == "src"]
    links = [value for key, value in parsed.attributes if key in {"href", "xlink:href"}]
    assert links
    assert all(link.removeprefix("#") in parsed.ids for link in links)
    assert len(set(parsed.ids)) == len(parsed.ids)
    style = "".join(re.findall(r"<style>(.*?)</style>", page, re.DOTALL))
    style += "".join(value for key, value in parsed.attributes if key == "style")
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in page
    for wrong in ("nan", "None", "inf"):
        assert not re.search(rf"(?<![\w]){wrong}(?![\w])", "".join(parsed.text))
        assert not [
            v for k, v in parsed.attributes if k in {"x", "y", "cx", "points"} and wrong in v
        ]


def test_the_page_holds_the_numbers() -> None:
    result, rows = VARIANTS["usual"]
    text = " ".join(_parse(build_page(result, rows)).text)
    ours = result["arms"]["candidate"]

    assert f"{result['score']['value']:.1f}" in text
    for term in result["score"]["terms"].values():
        assert f"{term['ratio']:.3f}" in text
        assert f"{term['points']:.2f}" in text
    for entry in ours["tau"]["by_category"].values():
        assert f"{entry['value']:.3f}" in text
    for share in (*ours["vllm"]["position_acceptance"], *ours["vllm"]["conditional_acceptance"]):
        assert f"{share:.3f}" in text
    assert f"{ours['memory']['total_bytes']:,}" in text
    assert "4f2a4f2a" in text
    assert "Provisional rules." in text
    for key in result["rules"]["provisional"]:
        assert key in text


def test_times_come_from_the_request_rows() -> None:
    result, _ = VARIANTS["usual"]
    rows = [
        {
            "kind": "answer",
            "arm": arm,
            "id": name,
            "chunk_times_s": [1.0, end],
            "chunk_tokens": [1, 10],
        }
        for arm, name, end in (
            ("candidate", "a", 1.1),
            ("baseline", "a", 1.2),
            ("candidate", "b", 1.3),
            ("baseline", "b", 1.2),
            ("candidate", "c", 1.1),  # no partner
        )
    ]
    text = "".join(_parse(build_page(result, rows)).text)
    assert "The candidate is faster on 1 of 2 prompts." in text
    assert "Paired by prompt" in text
    assert "Paired by prompt" not in build_page(result)


def test_a_broken_request_row_is_named() -> None:
    row = {"kind": "answer", "arm": "candidate", "id": "a"}
    row |= {"chunk_times_s": [1.0, 2.0], "chunk_tokens": [1]}
    with pytest.raises(ResultError, match=r"requests\.jsonl:1"):
        build_page(VARIANTS["usual"][0], [row])


def test_a_baseline_measured_once_is_paired_with_itself() -> None:
    text = "".join(_parse(_page("same")).text)
    assert "Candidate and baseline are one measurement." in text


def test_first_differences_show_ids_and_missing_tokens() -> None:
    page = _page("usual")
    cases = page[page.index("First differences") :]
    assert "id 28" in cases
    assert "beyond the best" in cases
    assert cases.index("real fork") < cases.index("near tie")


def test_the_same_input_gives_the_same_bytes() -> None:
    result, rows = build_result()
    again = json.loads(json.dumps(result))
    assert build_page(result, rows) == build_page(again, rows)


def test_hostile_text_is_shown_and_never_obeyed() -> None:
    page = _page("hostile")
    parsed = _parse(page)
    text = "".join(parsed.text)

    assert "<script" not in page
    assert "<img" not in page
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert "[U+202E]" in text
    assert "[U+001B]" in text
    assert "<script>alert(1)</script>" in text
    assert "{{ 7 * 7 }}" in text
    assert len(page) < 400_000
    page.encode("utf-8")  # the lone surrogate is gone


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_in_every_field(text: str) -> None:
    def poison(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: poison(item) for key, item in value.items()}
        if isinstance(value, list):
            return [poison(item) for item in value]
        return text if isinstance(value, str) else value

    result, rows = build_result(num_categories=2, prompts_per_category=1)
    result = poison(result)
    result["format"] = "paceline-result/1"
    result["arms"][text] = result["arms"]["candidate"]
    result["prompts"]["categories"] = {text: 1}
    for arm in result["arms"].values():
        entry = next(iter(arm["tau"]["by_category"].values()))
        arm["tau"]["by_category"] = {text: entry}
        arm["position_acceptance_by_category"] = {text: [0.5, 0.2, 0.1]}
    page = build_page(result, rows)

    assert not _parse(page).tags & {"script", "img"}
    assert "\u202e" not in page
    page.encode("utf-8")


def test_sample_tokens_are_told_apart_without_colour() -> None:
    result, rows = VARIANTS["usual"]
    page = build_page(result, rows)
    css = page[page.index("<style>") : page.index("</style>")]

    assert re.search(r"\.tokens \.hit \{[^}]*underline", css)
    assert re.search(r"\.tokens \.miss \{[^}]*line-through", css)
    steps = result["samples"][1]["steps"]
    article = re.findall(r"<article.*?</article>", page, re.DOTALL)[1]
    assert article.count('class="hit"') == sum(len(step["accepted"]) for step in steps)
    assert article.count('class="miss"') == sum(len(step["rejected"]) for step in steps)
    assert article.count('class="own"') == len(steps)
    # the first sample has counts only
    first = re.findall(r"<article.*?</article>", page, re.DOTALL)[0]
    assert 'class="miss"' not in first
    counts = [step["num_rejected"] for step in result["samples"][0]["steps"]]
    assert [int(n) for n in re.findall(r"×(\d+)</span>", first)] == [n for n in counts if n]


def test_write_report_reads_the_run_folder(tmp_path: Path) -> None:
    result, rows = VARIANTS["usual"]
    (tmp_path / "result.json").write_text(json.dumps(result), encoding="utf-8")
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "requests.jsonl").write_text(lines, encoding="utf-8")

    path = write_report(tmp_path)

    assert path == tmp_path / "report.html"
    assert path.read_text(encoding="utf-8") == build_page(result, rows)
    (tmp_path / "requests.jsonl").unlink()
    assert "Paired by prompt" not in write_report(tmp_path).read_text(encoding="utf-8")


def test_a_folder_without_a_result_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"result\.json"):
        write_report(tmp_path)
    (tmp_path / "result.json").write_text('{"format": "paceline-result/1", "arms": ', "utf-8")
    with pytest.raises(ResultError, match="not valid JSON"):
        write_report(tmp_path)
    (tmp_path / "result.json").write_text('{"format": "paceline-result/1"}', "utf-8")
    (tmp_path / "report.html").mkdir()
    with pytest.raises(StorageError):
        write_report(tmp_path)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the chromium browser")
@pytest.mark.parametrize("name", ["usual", "k7", "hostile", "long-names"])
def test_no_sideways_scrolling_on_a_phone(name: str, tmp_path: Path) -> None:
    page = html.escape(_page(name), quote=True)
    (tmp_path / "frame.html").write_text(
        f'<!doctype html><title>-</title><iframe style="width:375px;height:800px;border:0" '
        f'srcdoc="{page}"></iframe><script>onload=()=>{{const d=document.querySelector("iframe")'
        ".contentDocument.documentElement;document.body.textContent="
        '"widths "+d.clientWidth+" "+d.scrollWidth}</script>',
        encoding="utf-8",
    )
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", "--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom", (tmp_path / "frame.html").as_uri(),
    ]  # fmt: skip
    environment = {**os.environ, "HOME": str(tmp_path)}
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    match = re.search(r"widths (\d+) (\d+)", answer.stdout)
    if match is None:
        pytest.skip("the browser did not start here")
    assert match[1] == "375"
    assert int(match[2]) <= 375
