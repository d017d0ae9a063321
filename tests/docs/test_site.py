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

HOME = Path(__file__).resolve().parents[2]
CONFIG = HOME / "docs" / "site" / "mkdocs.yml"
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=[\"']?(https?:)?//[^>]*>")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of it, built as if a warning were an error."""
    if find_spec("material") is None:
        pytest.skip("needs mkdocs-material")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "-f",
        str(CONFIG),
        "-d",
        str(folder),
    ]
    quiet = {
        **os.environ,
        "NO_MKDOCS_2_WARNING": "1",
    }  # an advertisement of its makers, not of our pages
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=quiet)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    pages = {
        path.relative_to(HOME / "docs").with_suffix(".html").as_posix()
        for path in (HOME / "docs").rglob("*.md")
    }
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {page.replace("README.html", "index.html") for page in pages} <= built


def test_the_search_knows_every_field(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    text = "\n".join(
        part["text"] for part in found if part["location"].startswith("dialects/megatron")
    )
    from bridge.plan.section import fields

    missing = [path for path in fields(compat.load("megatron").schema) if path not in text]
    assert not missing


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loads = [
            match[0]
            for match in LOADED.finditer(page.read_text("utf-8"))
            if "canonical" not in match[0]
        ]
        assert not loads, page


def shown_in_a_browser(address: str, folder: Path) -> str:
    """The page at an address as a browser has it after its scripts ran."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("needs a browser: chromium")
    words = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--no-first-run",
    ]
    command = [
        *words,
        f"--user-data-dir={folder}",
        "--virtual-time-budget=8000",
        "--dump-dom",
        address,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120).stdout


ASKED = """<script>
class Worker { postMessage(message) { document.body.append(JSON.stringify(message.data) + "\\n"); } }
window.Worker = Worker;
</script><body><script src="SCRIPT"></script><script>
for (const query of QUERIES) new Worker().postMessage({ type: 2, data: query });
new Worker().postMessage({ type: 0, data: { config: "--as-it-is" } });
</script></body>"""
"""A page on which the search's worker shows what it is asked for."""


def test_a_flag_is_searched_for_as_its_setting(tmp_path: Path) -> None:
    queries = [
        "--tensor-model-parallel-size",
        "tensor-model-parallel-size",
        "-q lr",
        "cross-layer loss",
        "bf16.enabled",
    ]
    script = (HOME / "docs" / "site" / "tables.js").as_uri()
    (tmp_path / "asked.html").write_text(
        ASKED.replace("SCRIPT", script).replace("QUERIES", json.dumps(queries))
    )
    shown = shown_in_a_browser((tmp_path / "asked.html").as_uri(), tmp_path / "browser")
    said = shown.replace("&quot;", '"').rpartition("</script>")[2]
    asked = [
        *["tensor_model_parallel_size"] * 2,
        "q lr",
        "cross-layer cross_layer loss",
        "bf16.enabled",
    ]
    assert re.findall(r'^"(.*)"$', said, re.MULTILINE) == asked and "--as-it-is" in said


def test_a_page_of_a_stack_is_filtered_by_its_address(site: Path, tmp_path: Path) -> None:
    shown = shown_in_a_browser(
        f"{(site / 'dialects' / 'megatron.html').as_uri()}?rows=overlap+param+gather", tmp_path
    )
    rows = re.findall(r"<tr( class=\"filtered-out\")?>\s*<td>(.*?)</tr>", shown, re.DOTALL)
    left = [text for gone, text in rows if not gone]
    assert 0 < len(left) < 60 < len(rows)
    assert all(word in text.lower() for text in left for word in ("overlap", "param", "gather"))
    assert re.search(rf"<output>{len(left)} of {len(rows)} rows</output>", shown)
