"""The site in a real browser: layout, sorting, links, console, contrast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from browser import Page, open_browser
from build_field import write_field

from paceline.report import read_submissions, write_leaderboard
from paceline.rules import read_rules

RULES = read_rules("emc2-2027")
PAGES = ("index.html", "contest.html", "submit.html")
NAMES = "Array.from(document.querySelectorAll('#board tbody tr')).filter(r => !r.hidden)"
LEAST_CONTRAST = 4.5
LEAST_TOUCH_PX = 24

# text colour against what is painted behind it, by the formula of WCAG 2
CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const read = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] + below[i] * (1 - top[3]));
  const behind = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) {
      layers.push(read(getComputedStyle(at).backgroundColor));
      if (layers.at(-1)[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const light = (rgb) => rgb.map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || ['SCRIPT', 'STYLE', 'OPTION', 'title'].includes(node.tagName)) continue;
    if (!node.getClientRects().length) continue;
    const style = getComputedStyle(node);
    let back = behind(node);
    const mark = node.closest('svg.field') && style.fill === window.markText;
    const ink = over(read(node.closest('svg') ? style.fill : style.color), back);
    if (mark) continue;
    const [a, b] = [light(ink), light(back)].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), text.slice(0, 40), style.fontSize]);
  }
  return found.sort((x, y) => x[0] - y[0]);
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    public = write_field(folder / "public", RULES)
    write_leaderboard(read_submissions([public]), asdict(RULES), folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with open_browser() as page:
        yield page


def names(page: Page) -> list[str]:
    return list(page.ask(f"{NAMES}.map(r => r.dataset.name)"))


def numbers(page: Page, key: str) -> list[float]:
    values = page.ask(f"{NAMES}.map(r => r.dataset.{key})")
    return [float(value) for value in values if value]


@pytest.mark.parametrize("width", [390, 768, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wider_than_the_screen(page: Page, site: Path, width: int, name: str) -> None:
    page.resize(width)
    page.open(site / name)
    assert page.ask("document.documentElement.scrollWidth") == width
    # no text is cut or painted over its neighbour: every box keeps its words inside
    cut = page.ask("""Array.from(document.querySelectorAll('main *'))
      .filter(e => !e.closest('.scroll, svg') && e.scrollWidth > e.clientWidth + 1
        && e.clientWidth > 0 && getComputedStyle(e).display !== 'inline')
      .map(e => e.className + ': ' + e.textContent.trim().slice(0, 40))""")
    assert cut == []
    assert page.errors == []


def test_rows_are_cards_on_a_phone_and_a_table_on_a_desk(page: Page, site: Path) -> None:
    place = "Array.from(document.querySelector('#board tbody tr').cells)"
    tops = f"{place}.map(c => Math.round(c.getBoundingClientRect().top))"
    page.resize(1280)
    page.open(site / "index.html")
    assert len(set(page.ask(tops))) == 1
    page.resize(390)
    page.open(site / "index.html")
    assert len(set(page.ask(tops))) == 3
    small = page.ask(f"""Array.from(document.querySelectorAll(
      'main a, main button, main select, main input'))
      .filter(e => e.getClientRects().length && !e.closest('svg, .heat, .banner'))
      .map(e => [(e.closest('label.check') || e).getBoundingClientRect().height, e.textContent])
      .filter(([h]) => h < {LEAST_TOUCH_PX} && h > 0)""")
    # a draft's link is as large as its card, whatever its words are
    assert [text for _, text in small if text not in names(page)] == []


def test_sorting(page: Page, site: Path) -> None:
    page.resize(1280)
    page.open(site / "index.html")
    start = names(page)
    assert numbers(page, "rank") == sorted(numbers(page, "rank"))
    for key in ("score", "tau", "memory", "tpot"):
        head = f"document.querySelector('#board th[data-key={key}]')"
        page.ask(f"{head}.querySelector('button').click()")
        assert numbers(page, key) == sorted(numbers(page, key), reverse=True)
        assert page.ask(f"{head}.getAttribute('aria-sort')") == "descending"
        assert page.ask(f"{NAMES}.at(-1).dataset.{key}") == ""  # missing stays last
        page.ask(f"{head}.querySelector('button').click()")
        assert numbers(page, key) == sorted(numbers(page, key))
        assert page.ask(f"{NAMES}.at(-1).dataset.{key}") == ""
        assert page.ask("document.querySelectorAll('[aria-sort]').length") == 1
    page.ask("document.querySelector('#board th[data-key=rank] button').click()")
    assert names(page) == start
    page.ask("""(() => { const s = document.getElementById('sort'); s.value = 'name';
      s.dispatchEvent(new Event('change')); })()""")
    assert sorted(names(page), key=str.lower) != start
    assert names(page)[0] in (
        "<script>alert(1)</script>",
        "a-draft-with-a-name-that-goes-on-and-on-and-on-2...",
    )
    assert page.errors == []


def test_filters(page: Page, site: Path) -> None:
    page.resize(1280)
    page.open(site / "index.html")

    def put(name: str, value: str) -> None:
        page.ask(f"""(() => {{ const e = document.getElementById('{name}'); e.value = '{value}';
          e.dispatchEvent(new Event('input')); }})()""")

    put("search", "NORDLICHT v2")
    assert names(page) == ["tailwind-eagle3-v2"]
    put("search", "")
    put("family", "mtp")
    assert set(names(page)) == {"kite-mtp", "no-luck"}
    page.ask("document.getElementById('all').click()")
    assert names(page) == ["kite-mtp"]
    assert page.ask("document.getElementById('count').textContent") == "1 of 10 entries"
    put("search", "no such draft")
    assert names(page) == []
    assert page.ask("document.getElementById('none').hidden") is False
    assert page.errors == []


def test_a_row_opens_its_report_and_a_mark_too(page: Page, site: Path) -> None:
    page.resize(1280)
    page.open(site / "index.html")
    # the middle of the score's cell, far from the words of the link
    spot = page.ask("""(() => { const r = document.querySelector('#board tbody tr').cells[2]
      .getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()""")
    name = names(page)[0]
    page.click_link(*spot)
    assert page.ask("location.pathname").endswith("entries/kitesurf-kite-mtp/index.html")
    assert name in page.ask("document.querySelector('h1').textContent")
    page.open(site / "index.html")
    links = page.ask("Array.from(document.querySelectorAll('svg a')).map(a => a.href.baseVal)")
    assert len(links) == 2 * 7  # measured and not superseded, in two plots
    assert all((site / link).is_file() for link in links)
    assert page.errors == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", PAGES)
def test_contrast(page: Page, site: Path, name: str, dark: bool) -> None:
    page.resize(1280, dark=dark)
    page.open(site / name)
    # numbers inside marks stand on the mark, not on the page: they are looked at by themselves
    page.ask("""(() => { const root = getComputedStyle(document.documentElement);
      const probe = document.createElement('i'); probe.style.color = root.getPropertyValue('--on');
      document.body.append(probe); window.markText = getComputedStyle(probe).color;
      probe.remove(); })()""")
    found = page.ask(CONTRAST)
    assert len(found) > 20
    assert [item for item in found if item[0] < LEAST_CONTRAST] == []
    for back in ("--candidate", "--plain"):
        assert page.ask(_pair("--on", back)) >= LEAST_CONTRAST
    assert page.errors == []


def _pair(ink: str, back: str) -> str:
    """Contrast of two of the page's variables."""
    body = CONTRAST[: CONTRAST.index("const found = []")]
    return f"""{body}
      const root = getComputedStyle(document.documentElement);
      const [a, b] = ['{ink}', '{back}']
        .map(n => light(read(root.getPropertyValue(n).trim()).slice(0, 3))).sort((x, y) => y - x);
      return (a + 0.05) / (b + 0.05);
    }})()"""


def test_it_reads_without_scripts(page: Page, site: Path) -> None:
    page.resize(1280)
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.open(site / "index.html")
        page.call("Emulation.setScriptExecutionDisabled", value=False)
        assert page.ask("document.getElementById('tools').hidden") is True
        assert len(names(page)) == 10
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=False)
