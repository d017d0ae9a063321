"""The site: built without a warning, found by its search, filtered in a browser, and with nothing loaded from elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import compat

pytestmark = pytest.mark.outside

HOME = Path(__file__).resolve().parents[1]
CONFIG = HOME / "docs" / "site" / "mkdocs.yml"
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=[\"']?(https?:)?//[^>]*>")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of it, built as if a warning were an error."""
    if find_spec("material") is None:
        pytest.skip("needs mkdocs-material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(CONFIG), "-d", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an advertisement of its makers, not of our pages
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=quiet)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    pages = {path.relative_to(HOME / "docs").with_suffix(".html").as_posix() for path in (HOME / "docs").rglob("*.md")}
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {page.replace("README.html", "index.html") for page in pages} <= built


def test_the_search_knows_every_field(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    text = "\n".join(part["text"] for part in found if part["location"].startswith("dialects/megatron"))
    from bridge.config import fields

    missing = [path for path in fields(compat.load("megatron").schema) if path not in text]
    assert not missing


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loads = [match[0] for match in LOADED.finditer(page.read_text("utf-8")) if "canonical" not in match[0]]
        assert not loads, page


def test_a_page_of_a_stack_is_filtered_by_its_address(site: Path, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("needs a browser: chromium")
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    page = f"{(site / 'dialects' / 'megatron.html').as_uri()}?rows=overlap+param+gather"
    command = [*words, f"--user-data-dir={tmp_path}", "--virtual-time-budget=8000", "--dump-dom", page]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120).stdout
    rows = re.findall(r"<tr( class=\"filtered-out\")?>\s*<td>(.*?)</tr>", shown, re.DOTALL)
    left = [text for gone, text in rows if not gone]
    assert 0 < len(left) < 60 < len(rows)
    assert all(word in text.lower() for text in left for word in ("overlap", "param", "gather"))
    assert re.search(rf"<output>{len(left)} of {len(rows)} rows</output>", shown)
