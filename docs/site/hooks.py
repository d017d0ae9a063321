"""What the site needs beside the pages of this folder: those of the repository's top, and links that fit where they lie."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

TOP = Path(__file__).resolve().parents[2]
DOCS = "docs"
PAGES = {
    "README.md": "start.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages of the repository outside of this folder, and what they are called on the site."""
BOOSTS = {"dialects": 8, "fidelity": 0.5}
"""How much what is found in a folder counts: who searches for a setting wants its own row first."""
WIDE = ("rules",)
"""Folders of pages that are one table, which takes the place of the table of contents as well."""
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere."""
    for path, name in PAGES.items():
        text = (TOP / path).read_text(encoding="utf-8")
        files.append(
            File.generated(config, name, content=_linked(text, posixpath.dirname(path), files))
        )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The same links for pages that lie here; a link out of the site is the name of a file."""
    folder = posixpath.dirname(page.file.src_uri)
    page.meta.update(
        {
            "search": {"boost": BOOSTS.get(folder, 1)},
            **({"hide": ["toc"]} if folder in WIDE else {}),
        }
    )
    if page.file.src_uri in PAGES.values():
        return markdown
    return _linked(
        markdown,
        posixpath.join(DOCS, posixpath.dirname(page.file.src_uri)),
        files,
        page.file.src_uri,
    )


def _linked(text: str, folder: str, files: Files, of: str = "") -> str:
    """`text` of a file in `folder` of the repository, with links as the site needs them on its page `of`."""

    def link(found: re.Match[str]) -> str:
        words, target, anchor = (
            found[1],
            posixpath.normpath(posixpath.join(folder, found[2])),
            found[3] or "",
        )
        page = PAGES.get(target) or target.removeprefix(f"{DOCS}/")
        known = target in PAGES or (
            target.startswith(f"{DOCS}/") and files.get_file_from_path(page) is not None
        )
        if not known:
            return words if "`" in words else f"`{words}`"
        return f"[{words}]({posixpath.relpath(page, posixpath.dirname(of) or '.')}{anchor})"

    return LINK.sub(link, text)
