"""Pages of runs: whatever a log says stays words, long runs make small files, and what is shown is what was logged."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from bridge.cli import run as command
from bridge.trace.log import Log
from bridge.trace.pages.series import read_series
from bridge.trace.pages.svg import Curve, Map, draw_chart, draw_map
from bridge.trace.placement import Placement
from bridge.trace.record import Name

HOSTILE = (
    "</title><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a]]>&lt;b\x1b[31m\x07",
    "'onload='x",
    "\u202eb",
)
"""Names that would be more than words on a page that did not escape them."""


class Page(HTMLParser):
    """What a browser would make of it: its tags, their attributes, its words."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


def written(
    folder: Path, layers: tuple[str, ...], steps: int, spike: int | None = None, ranks: int = 1
) -> Path:
    """A run with a gradient in each layer, a hundred times larger in one step on the last rank."""
    about = {
        "ranks": ranks,
        "engine": layers[0],
        "layers": list(layers),
        "mesh": {"data": ranks},
        "formats": ["float32"],
    }
    about["settings"] = {layers[0]: layers[-1], "optimizer": "SGD"}
    for rank in range(ranks):
        log = Log(folder, rank, about)
        for step in range(1, steps + 1):
            for number, layer in enumerate(layers):
                gradient = torch.full((4,), 1.0 + number) * (
                    150 if step == spike and rank == ranks - 1 else 1
                )
                log.add(
                    Name(step, "reduce", layer, None, "gradient", "w"),
                    gradient,
                    Placement.full((4,), ("data",)),
                    4,
                )
            log.write(step, loss=5.0 / step)
    return folder


def found_in(folder: Path, **fields: object) -> None:
    """A finding beside the log."""
    finding = {
        "id": "gradient-stale",
        "step": 2,
        "where": "",
        "evidence": "",
        "ranks": [],
        "severity": "fault",
        "meaning": "",
    }
    with (folder / "findings.jsonl").open("a") as file:
        file.write(json.dumps({**finding, **fields}) + "\n")


def page_of(*folders: Path, out: Path) -> Page:
    assert command(["trace", "html", *map(str, folders), "-o", str(out)]) in (0, 2)
    return Page(out)


def test_what_a_log_says_is_nothing_but_words(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a<b>", HOSTILE, 3), written(tmp_path / "b", HOSTILE, 3, spike=2)
    for text in HOSTILE:
        found_in(a, where=text, evidence=text)
        found_in(a, id=text, meaning=text)
    plain = page_of(written(tmp_path / "plain", tuple("abcde"), 3), out=tmp_path / "plain.html")
    alone, both = page_of(a, out=tmp_path / "one.html"), page_of(b, a, out=tmp_path / "two.html")
    for page in (alone, both):
        tags = {tag for tag, _ in page.tags}
        allowed = {"br", "strong", "rect", "div", "table", "thead", "tbody", "tr", "th", "td"}
        assert tags <= {tag for tag, _ in plain.tags} | allowed
        names = {name for _, attributes in page.tags for name in attributes}
        assert not {name for name in names if name.startswith("on") or name in ("src", "href")}
        assert "<script>alert(1)</script>" in page.words
        assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", page.words)


def test_a_page_holds_what_was_logged(tmp_path: Path) -> None:
    layers = tuple(f"layers.{number}" for number in range(4))
    folder = written(tmp_path / "run", layers, 6, spike=4, ranks=2)
    found_in(folder, step=4, where="layers.2.w", evidence="3 of 3 are old", ranks=[1])
    found_in(folder, id="decay-on-norms", severity="remark")
    series = read_series(folder)
    assert np.allclose(series.losses[:, 0], [5.0 / step for step in range(1, 7)])
    assert np.allclose(series.sizes[0, :, 3], [2.0, 4.0, 6.0, 8.0]) and np.allclose(
        series.sizes[1, 2, 3], 900.0
    )
    page = page_of(folder, out=tmp_path / "page.html")
    assert "Rank 0" in page.words and "Rank 1" in page.words, (
        "maps of their own, as the ranks are not alike"
    )
    assert "✕ fault" in page.words and "! remark" in page.words, "not by colour alone"
    assert "zero_grad is missing" in page.words and "gradient-stale, step 4, layers.2" in page.words
    assert "5 in step 1, 0.8333 in step 6" in page.words
    levels = [
        attributes
        for tag, attributes in page.tags
        if tag == "path" and "cell level3" in (attributes.get("class") or "")
    ]
    assert len(levels) == 2, "in the key, and in the map of rank 1"


def test_findings_alone_make_a_page(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    found_in(tmp_path / "run", where="head", evidence="all of them")
    page = page_of(tmp_path / "run", out=tmp_path / "page.html")
    assert (
        "this run has findings, but no log of tensors" in page.words and "all of them" in page.words
    )


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{}",
        "[1]",
        '{"id": 1',
        '{"id": "x", "step": "y", "where": "", "evidence": "", "ranks": []}',
    ],
)
def test_a_finding_that_is_none_is_named(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "run", ("a",), 2)
    (folder / "findings.jsonl").write_text(line + "\n")
    assert command(["trace", "html", str(folder), "-o", str(tmp_path / "page.html")]) == 1
    assert "findings.jsonl:1: expected a finding with id" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_long_runs_make_small_pictures() -> None:
    steps, layers = range(1000), [f"layers.{number}" for number in range(500)]
    levels = np.random.default_rng(1).integers(-1, 5, (500, 1000)).astype(np.int8)
    frames = [("layers.333", 777, "here")]
    assert len(draw_map(Map("all", layers, steps, levels, frames))) < 400_000
    values = np.sin(np.arange(1000.0))
    values[500] = 99.0
    text = draw_chart("loss", [Curve("a", steps, values)], {})
    assert len(text) < 20_000
    heights = [
        float(y)
        for y in re.findall(
            r"[ML][\d.]+ ([\d.]+)", re.findall(r'class="line line0"[^>]* d="([^"]*)"', text)[0]
        )
    ]
    assert min(heights) == 16.0, "one step in 1,000 that stands out is drawn"


def test_a_bin_shows_its_worst_cell() -> None:
    levels = np.zeros((200, 600), np.int8)
    levels[133, 444] = 4
    text = draw_map(Map("all", [f"l{number}" for number in range(200)], range(600), levels))
    assert len(re.findall(r'class="cell level4"', text)) == 1
    assert "1 of 7680 cells have level 2 or more" in text


def test_values_that_are_not_finite_are_named() -> None:
    text = draw_chart("loss", [Curve("a", range(4), np.array([1.0, np.nan, np.inf, 2.0]))], {})
    assert (
        text.count(">NaN<") == 1
        and draw_chart("loss", [Curve("a", range(2), np.full(2, np.nan))], {}) == ""
    )


def browser() -> str | None:
    """Where Chromium is."""
    return next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )


@pytest.fixture
def pictured(tmp_path: Path) -> Callable[[Path, str], bytes]:
    """The picture that a real browser makes of a page."""
    program = browser()
    if program is None:
        pytest.skip("no Chromium is installed")

    def picture(page: Path, *options: str) -> bytes:
        out, own = tmp_path / "page.png", tmp_path / "profile"
        common = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            f"--user-data-dir={own}",
        )
        words = [
            program,
            *common,
            *options,
            "--window-size=1100,1400",
            f"--screenshot={out}",
            page.as_uri(),
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
        assert out.exists(), done.stderr
        return out.read_bytes()

    return picture


@pytest.mark.outside
def test_a_browser_shows_a_page_light_and_dark(
    pictured: Callable[..., bytes], tmp_path: Path
) -> None:
    matplotlib = pytest.importorskip("matplotlib.image")
    layers = tuple(f"layers.{number}" for number in range(6))
    a, b = (
        written(tmp_path / "a", layers, 30, ranks=2),
        written(tmp_path / "b", layers, 30, spike=12, ranks=2),
    )
    page_of(b, a, out=tmp_path / "page.html")
    pictures = []
    for options in ((), ("--blink-settings=preferredColorScheme=0",)):
        (tmp_path / "shown.png").write_bytes(pictured(tmp_path / "page.html", *options))
        pictures.append(matplotlib.imread(tmp_path / "shown.png")[..., :3])
    light, dark = pictures
    assert light[:5].mean() > 0.95 and dark[:5].mean() < 0.2, "the paper"
    colours = {tuple(np.round(pixel * 255).astype(int)) for pixel in light.reshape(-1, 3)[::7]}
    assert len(colours) > 20, "curves and cells are drawn, not text alone"


def test_numbers_at_an_axis_do_not_read_alike() -> None:
    """A norm that hardly changes had the same four digits at all of its lines."""
    values = np.array([36.9601, 36.9602, 36.9604])
    page = draw_chart("norm", [Curve("a", [1, 2, 3], values)], {})
    told = re.findall(r'<text class="at"[^>]*>([^<]*)</text>', page)
    assert (told[0], told[-1]) == ("36.9601", "36.9604") and len(set(told)) == 3
