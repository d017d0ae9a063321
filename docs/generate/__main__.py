"""Writes the pages made of schemas, rules and release facts, the tables inside hand-written pages, and the stubs of schemas.

python docs/generate            # into the folder above this one
python docs/generate --check    # exit code 1, and a list, where a page is out of date
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import always_page
import dialect_pages
import fidelity_pages
import guide_tables
import house_map
import measuring
import rule_examples
import stubs

HERE = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"<!-- table: (?P<name>[\w ]+) -->\n.*?<!-- end -->", re.DOTALL)
TABLES: Mapping[str, Callable[[], str]] = {
    "dialects": dialect_pages.dialects_table,
    "doors": house_map.door_table,
    **guide_tables.TABLES,
}


def main() -> int:
    """Write or check the pages; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python docs/generate", description="Write generated pages and tables."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; list what is out of date"
    )
    parser.add_argument(
        "--measure",
        type=int,
        metavar="N",
        help="first measure losses on N generated configs of each pair whose rules or releases moved",
    )
    parser.add_argument(
        "--examples",
        action="store_true",
        help="first look for an example of each rule that has none",
    )
    options = parser.parse_args()
    check = options.check
    if options.examples:
        rule_examples.find()
    if options.measure:
        measuring.measure(fidelity_pages.pairs(), options.measure)
    made = pages()
    changed = {path: text for path, text in made.items() if _current(HERE / path) != text}
    left = [path for path in _generated() if path not in made]
    for path in (*changed, *left):
        print(f"{'out of date' if check else 'writes' if path in changed else 'removes'}: {path}")
    if not check:
        for path, text in changed.items():
            (HERE / path).parent.mkdir(parents=True, exist_ok=True)
            (HERE / path).write_text(text, encoding="utf-8")
        for path in left:
            (HERE / path).unlink()
    return int(check and bool(changed or left))


def pages() -> dict[str, str]:
    """Every generated page by its path, and every hand-written one with its tables filled in."""
    return {
        **always_page.pages(),
        **dialect_pages.pages(),
        **fidelity_pages.pages(),
        **guide_tables.pages(),
        **stubs.pages(),
        **_filled(),
    }


def _generated() -> list[str]:
    """Pages of folders that hold nothing else."""
    return [
        str(path.relative_to(HERE))
        for folder in ("dialects", "fidelity", "rules")
        for path in sorted((HERE / folder).glob("*"))
    ]


def _current(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _filled() -> dict[str, str]:
    paths = [*(path.name for path in sorted(HERE.glob("*.md"))), "../CONTRIBUTING.md"]
    texts = {path: text for path in paths if (text := _current(HERE / path)) is not None}
    return {name: BLOCK.sub(_block, text) for name, text in texts.items() if BLOCK.search(text)}


def _block(match: re.Match[str]) -> str:
    return f"<!-- table: {match['name']} -->\n{TABLES[match['name']]()}\n<!-- end -->"


if __name__ == "__main__":
    sys.exit(main())
