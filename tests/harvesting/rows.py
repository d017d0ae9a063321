"""Rows of facts, each with the releases for which it holds, and the changes that a new release
makes.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bridge.stack.releases import Releases

Row = dict[str, Any]
WINDOW = ("since", "until")
NAMES = {"List": "list", "Dict": "dict", "Tuple": "tuple", "Set": "set", "Type": "type"}


@dataclass(frozen=True)
class FactChange:
    """A changed fact: the row before and the row after the change, each None if there is none."""

    file: str
    before: Row | None
    after: Row | None

    @property
    def both(self) -> bool:
        """Whether there is a row both before and after the change."""
        return self.before is not None and self.after is not None

    @property
    def row(self) -> Row:
        """The row after the change, or the row before it if there is none."""
        value = self.after or self.before
        assert value is not None
        return value


@dataclass(frozen=True)
class Facts:
    """The facts that were read from a release: rows by the file that lists them, names in `gathered`
    that are added to the names of other releases, and a message in `unread` for each fact that
    could not be read.
    """

    rows: dict[str, list[Row]]
    gathered: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def bare(row: Mapping[str, Any]) -> Row:
    """Return a row without the entries that name its releases."""
    return {name: value for name, value in row.items() if name not in WINDOW}


def at(rows: Iterable[Row], release: str, releases: Releases) -> list[Row]:
    """Return the rows that hold for a release, without their `since` and `until`.

    For an unknown release, these are the rows without `until`.
    """
    if release not in releases.known:
        return [bare(row) for row in rows if not row.get("until")]
    return [
        bare(row)
        for row in rows
        if releases.within(release, row.get("since", ""), row.get("until", ""))
    ]


def changes(
    file: str, before: Sequence[Row], after: Sequence[Row], keys: Sequence[str]
) -> list[FactChange]:
    """Return the changes from `before` to `after`.

    Rows with equal values for `keys` describe the same fact.
    """
    old, new = ({_key(row, keys): row for row in rows} for rows in (before, after))
    both = [key for key in {**old, **new} if _same(old.get(key)) != _same(new.get(key))]
    return [FactChange(file, old.get(key), new.get(key)) for key in both]


def update_rows(
    rows: Sequence[Row], changes: Sequence[FactChange], release: str, keys: Sequence[str]
) -> list[Row]:
    """Return the rows after a release that makes `changes`.

    Changed rows end at `release`, new rows begin there, and all other rows stay.
    """
    end_keys = {_key(change.before, keys) for change in changes if change.before}
    # A row that ended before is history, and may have the same key as the one that ends now.
    rest = [
        row if row.get("until") or _key(row, keys) not in end_keys else {**row, "until": release}
        for row in rows
    ]
    new_rows = [
        {**change.after, **({"since": release} if rows else {})}
        for change in changes
        if change.after
    ]
    return sorted((*rest, *new_rows), key=lambda row: _key(row, keys)) if new_rows else rest


def unite_names(old: Any, new: Any) -> Any:
    """Return the union of names over all releases.

    Mappings and lists are merged; of two texts, the old one is kept.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        both = {
            name: unite_names(old[name], new[name]) if name in old and name in new else None
            for name in {**old, **new}
        }
        return {
            name: value if value is not None else old.get(name, new.get(name))
            for name, value in both.items()
        }
    if isinstance(old, list) and isinstance(new, list):
        return old if {*new} <= {*old} else sorted({*old, *new})
    return old or new


def _key(row: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(row.get(name, "")) for name in keys)


def _same(row: Row | None) -> str:
    """Return a row as text for comparisons.

    Rows that differ only in the spelling of a type, or in `| None`, have equal texts.
    """
    if row is None:
        return ""
    parts = re.sub(r"[\w.]+\.(?=\w)", "", plain_type(str(row.get("type", "")))).split(" | ")
    whole = {
        # 0 and 0.0 are the same default.
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in row.items()
    }
    return json.dumps({**whole, "type": sorted({*parts} - {"None"})}, sort_keys=True)


def plain_type(text: str) -> str:
    """Return one spelling for all spellings of a type: `list[int] | None` for `Optional[List[int]]`."""
    try:
        return ast.unparse(_Plain().visit(ast.parse(text, mode="eval")))
    except SyntaxError:
        return text


class _Plain(ast.NodeTransformer):
    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        name = ast.unparse(node.value).rpartition(".")[2]
        if name == "Optional":
            return ast.BinOp(node.slice, ast.BitOr(), ast.Constant(None))
        if name == "Union" and isinstance(node.slice, ast.Tuple):
            first, *others = node.slice.elts
            for other in others:
                first = ast.BinOp(first, ast.BitOr(), other)
            return first
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(NAMES.get(node.id, node.id))

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Replace a quoted type by the type."""
        is_name = isinstance(node.value, str) and node.value.isidentifier()
        return ast.Name(NAMES.get(str(node.value), str(node.value))) if is_name else node


def text(rows: Any) -> str:
    """Return the text of a file, with one row, or one entry of a mapping, on each line."""
    if isinstance(rows, list):
        return "[\n" + ",\n".join(_line(row) for row in rows) + "\n]\n"
    entries = []
    for name, value in rows.items():
        entry = _line(value)
        if isinstance(value, Mapping):
            inside = (f"  {_line(key)}: {_line(inner)}" for key, inner in value.items())
            entry = "{\n" + ",\n".join(inside) + "\n}"
        entries.append(f"{_line(name)}: {entry}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
