"""The meaning of a file in two releases, as text for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from bridge.files.printable import clean
from bridge.files.shown import show_value
from bridge.report.as_text import EFFECT_STYLE, first, name, release_named, remarks
from bridge.report.tables import Grid
from bridge.translation.drift import ChangeKind, Drift, DriftChange

if TYPE_CHECKING:
    from rich.console import Console


def drift_text(drift: Drift, console: Console) -> None:
    """Print the meaning of a file in two releases: first the differences, then the edits of the
    migrated file.
    """
    before, to = drift.before, release_named(drift.before.dialect, drift.version)
    first(drift.remarks, console)
    unread = [one for one in drift.remarks if one.unknown]
    if drift.same:
        verdict = "may mean something else" if unread else "means the same"
    elif drift.after:
        verdict = "means something else"
    else:
        verdict = f"is refused by {drift.version}"
    console.print(f"[bold]{name(before)}[/] -> [bold]{to}[/]: the file {verdict}")
    if unread:
        listing = ", ".join(f"{one.path} {one.change}".rstrip() for one in unread)
        console.print(clean(f"Not known: {listing}"), markup=False, soft_wrap=True)
    if drift.changes:
        console.print(_changes("What differs", drift.changes, before.version, drift.version))
    if drift.remarks:
        console.print(remarks(f"What {drift.version} makes of the file", drift.remarks))
    for where, settings in (
        (f"only in {drift.version}", drift.new),
        (f"only in {before.version}", drift.lapsed),
    ):
        if settings:
            console.print(
                f"{len(settings)} settings exist {where}; the file sets none of these", markup=False
            )
    _print_migration(drift, console)


def _changes(title: str, changes: Iterable[DriftChange], old: str, new: str) -> Grid:
    from rich.markup import escape

    rows = Grid(title, ("setting", old, new, "why"))
    for change in sorted(
        changes, key=lambda change: (change.effect.rank, list(ChangeKind).index(change.kind))
    ):
        where = (
            f"{change.path} (line {change.origin.line})"
            if change.origin and change.origin.line
            else change.path
        )
        why = f"[{EFFECT_STYLE[change.effect]}]{change.effect}[/]: {change.kind}"
        # The messages of these two kinds repeat the values, which stand in the columns beside.
        if change.kind not in (ChangeKind.DEFAULT, ChangeKind.DERIVED):
            why += f"; {escape(change.message)}"
        rows.add_row(
            escape(where),
            escape(_value_text(change.before)),
            escape(_value_text(change.after)),
            why,
        )
    return rows


def _value_text(value: Any) -> str:
    return "-" if value is None else show_value(value, 24)


def _print_migration(drift: Drift, console: Console) -> None:
    from rich.markup import escape

    if drift.migrated is None:
        console.print(f"{drift.version} accepts no part of the file: nothing to write")
        return
    if drift.edits:
        rows = Grid(
            f"Changes that keep the meaning of the file in {drift.version}",
            ("setting", "in the file", "to write"),
        )
        for path, (old, new) in drift.edits.items():
            rows.add_row(*map(escape, (path, _value_text(old), _value_text(new))))
        console.print(rows)
    if drift.left:
        console.print(
            _changes(
                f"Settings that no file can express in {drift.version}",
                drift.left,
                drift.before.version,
                drift.version,
            )
        )
