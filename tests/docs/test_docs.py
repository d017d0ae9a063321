"""The documentation says what the code does: pages are current, links lead somewhere, the matrix holds on translations."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import bridge
import compat
from bridge.errors import BridgeError
from bridge.plan.section import fields
from bridge.stack.dialect import Config
from bridge.stack.rules import How
from bridge.testing import configs
from bridge.translation import reference
from bridge.translation.translate import translate

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
LONGEST_PAGE = 400_000
"""Bytes of a page that a code host still renders."""

needs_docs = pytest.mark.skipif(not DOCS.is_dir(), reason="runs in a checkout")
everyone = pytest.mark.parametrize("name", compat.names())
PAIRS = tuple(permutations(compat.names(), 2))


def generate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The generator in a folder of documentation."""
    environment = {**os.environ, "PYTHONPATH": str(Path(bridge.__file__).parents[1])}
    command = [sys.executable, str(folder / "generate"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@needs_docs
@pytest.mark.once
def test_pages_are_current() -> None:
    done = generate(DOCS, "--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), "run `python docs/generate`"


@needs_docs
@pytest.mark.once
def test_what_is_out_of_date_is_named(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(DOCS, docs, ignore=shutil.ignore_patterns("__pycache__"))
    page, guide, odd = (
        docs / "fidelity" / "README.md",
        docs / "multi-stage.md",
        docs / "dialects" / "gone.md",
    )
    page.write_text(page.read_text("utf-8").replace("| exact |", "| exactly |"), "utf-8")
    guide.write_text(guide.read_text("utf-8").replace("refused |", "taken |", 1), "utf-8")
    odd.write_text("a stack that is no more", "utf-8")
    done = generate(docs, "--check")
    assert done.returncode == 1
    assert set(done.stdout.splitlines()) == {
        f"out of date: {path}"
        for path in ("fidelity/README.md", "multi-stage.md", "dialects/gone.md")
    }
    assert odd.exists()


@needs_docs
@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = DOCS / page
    text = path.read_text("utf-8")
    for target, anchor in LINK.findall(text):
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{target}#{anchor}"


@cache
def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@needs_docs
@pytest.mark.parametrize("page", PAGES)
def test_pages_are_fit_to_read(page: str) -> None:
    text = (DOCS / page).read_text("utf-8")
    assert len(text.encode()) < LONGEST_PAGE
    assert not re.search(r"/(home|work|root|tmp|Users)/", text)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert len(headings) == len(set(headings))
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        assert len({row.replace("\\|", "").count("|") for row in table.splitlines()}) == 1


@needs_docs
@everyone
def test_every_field_is_on_its_page(name: str) -> None:
    text = (DOCS / "dialects" / f"{name}.md").read_text("utf-8")
    missing = [path for path in fields(compat.load(name).schema) if f"| `{path}`" not in text]
    assert missing == []


@needs_docs
def test_the_guide_counts_as_fast_llm_does() -> None:
    """Gathers and reductions that Fast-LLM's own order of work gives for 8 stages (multi_stage.py, schedule.py)."""
    rows = re.findall(
        r"^\| (\d+)(?: \(all\))? \| (\d+)(?: \(all\))? \|[^|]*\| (.*?) \| (.*?) \| (.*?) \|",
        guide(),
        re.MULTILINE,
    )
    found = {(int(weights), int(grads)): tuple(runs) for weights, grads, *runs in rows}
    assert found[8, 8] == ("8, 8", "8, 8", "8, 8")
    assert found[8, 2] == ("8, 8", "8, 32", "8, 8")
    assert found[2, 2] == ("14, 8", "50, 32", "14, 8")
    assert found[1, 1] == ("15, 8", "57, 32", "15, 8")
    assert found[3, 3] == ("13, 8", "43, 32", "13, 8")


@needs_docs
def test_the_guide_says_what_is_refused() -> None:
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in guide().splitlines()
        if line.startswith("| `")
    ]
    rows = {first: rest for first, *rest in lines}
    assert rows["`zero_stage: 0`"] == ["refused"] * 3
    assert rows["`zero_stage: 2, num_grad_buffers: 2`"] == [
        "weights whole, gradients 2 buffers",
        "refused",
        "refused",
    ]
    assert rows["`stages_per_pipeline_stage: 2`"] == ["refused"] * 3


def guide() -> str:
    """The multi-stage guide."""
    return (DOCS / "multi-stage.md").read_text("utf-8")


# What the pages are made of


@everyone
def test_every_field_is_explained(name: str) -> None:
    known = fields(compat.load(name).schema)
    assert [
        path
        for path, leaf in known.items()
        if len(leaf.doc.split()) < 2 or not leaf.doc.endswith(".")
    ] == []


@everyone
def test_every_field_is_in_some_release(name: str) -> None:
    dialect = compat.load(name)
    spans = {path: reference.spans(dialect, path) for path in fields(dialect.schema)}
    assert [path for path, found in spans.items() if not found] == []
    order = dialect.versions.index
    assert all(order(span.since) <= order(span.until) for found in spans.values() for span in found)


@everyone
def test_disagreements_are_about_fields_and_releases(name: str) -> None:
    dialect = compat.load(name)
    for row in dialect.disagreements:
        assert row.path in fields(dialect.schema)
        assert row.said != row.done
        assert row.place and row.source
        assert {row.since, row.until} <= {"", *dialect.versions}


@pytest.mark.parametrize(
    ("name", "path", "expected"),
    [
        ("deepspeed", "gradient_clipping", [("0.15.0", "0.19.2", 0.0), ("0.19.3", "0.19.8", 1.0)]),
        (
            "megatron",
            "cpu_offloading_weights",
            [("0.9.0", "0.14.0", True), ("0.15.0", "0.20.0.dev20260822", False)],
        ),
        ("megatron", "moe_extended_tp", [("0.9.0", "0.16.1", False)]),
        (
            "merak",
            "args.parallel_vocab",
            [("0.1.0", "0.1.0", True), ("1.1.1", "2.2.2+main", False)],
        ),
        (
            "automodel",
            "distributed.mp_policy.reduce_dtype",
            [("0.1.0", "0.4.0", "bf16"), ("0.5.0", "0.7.0", "fp32")],
        ),
        ("fast_llm", "model.multi_stage.compile_all", [("0.1.0", "0.3.0", False)]),
    ],
)
def test_defaults_by_release(name: str, path: str, expected: list[tuple[str, str, object]]) -> None:
    spans = reference.spans(compat.load(name), path)
    assert [(span.since, span.until, span.default) for span in spans] == expected


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_matrix_counts_each_field_once(source: str, target: str) -> None:
    pair = reference.pair(compat.load(source), compat.load(target))
    counted = sum(len(pair.fare(how)) for how in How if how is not How.DEFAULTED)
    own = sum(not passage.kept for passage in pair.passages)
    assert counted + own == len(pair.passages) == len({passage.path for passage in pair.passages})
    assert all(passage.arrival.reasons for passage in pair.passages if not passage.lossless)


@pytest.mark.once
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_what_the_matrix_calls_safe_survives(source: str, target: str) -> None:
    """On generated configs no given field that arrives exactly or in other words is lost, and nothing that is dropped arrives."""
    theirs, other = compat.load(source), compat.load(target)
    passages = {passage.path: passage for passage in reference.pair(theirs, other).passages}

    @settings(
        max_examples=6,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(configs(theirs, theirs.versions[-1]))
    def check(config: Config) -> None:
        try:
            result = translate(config, other)
        except BridgeError:
            return
        lost = {
            finding.path
            for finding in result.findings
            if finding.given and finding.how in (How.DROPPED, How.APPROXIMATE)
        }
        assert [path for path in lost & passages.keys() if passages[path].lossless] == []
        for report in result.fields:
            assert [
                path
                for path in report.sources
                if path in passages and passages[path].how is How.DROPPED
            ] == []

    check()


@needs_docs
def test_counts_are_of_fields_that_arrive_with_limits() -> None:
    """What was measured is kept by pair; a pair whose rules moved since is not shown, and not looked at here."""
    kept = json.loads((DOCS / "generate" / "measured.json").read_text("utf-8"))
    assert kept.keys() == {f"{source} to {target}" for source, target in PAIRS}
    for counts in kept.values():
        assert counts["configs"] > 0
        assert all(
            0 <= lost <= given <= counts["configs"] for given, lost in counts["fields"].values()
        )
