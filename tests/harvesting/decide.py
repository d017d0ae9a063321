"""Decisions that a person must make about a release: fields without a rule, new defaults, checks whose source changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bridge.files.shown import show_value
from bridge.plan.section import fields
from bridge.stack.dialect import Dialect
from bridge.stack.rules import Effect
from bridge.translation.lift import claims
from tests.harvesting.rows import FactChange, Row

WIDTH = 400
"""Number of characters that are printed of a changed fact, which may be a whole class."""


def questions(
    dialect: Dialect, changes: Sequence[FactChange], path_of: Callable[[str, Row], str]
) -> Iterator[str]:
    """Yield a line for each changed fact that needs a person's decision, the most important first."""
    rows = [(path_of(change.file, change.row), change) for change in changes]
    leaves = fields(dialect.schema)
    for path, change in rows:
        # Its own line in the schema, a section that is kept as one mapping, or fields inside it.
        parents = path.split(".")
        starts = [".".join(parents[:size]) for size in range(1, len(parents) + 1)]
        in_schema = any(start in leaves or f"{start}.*" in leaves for start in starts)
        if change.before is None and not in_schema:
            yield f"{path}: new, {show_value(change.row.get('default'))} by default; add a line to the schema and a rule"
    yield from _each(
        f"{path}: in the schema, but no rule claims it"
        for path in leaves
        if path not in claims(dialect)
    )
    yield from _each(
        line for path, change in rows for line in _describe_change(dialect, path, change)
    )
    for path, change in rows:
        if change.after is None:
            yield f"{path}: removed; if a setting replaces it, add a Move"


def _each(lines: Iterator[str]) -> Iterator[str]:
    yield from dict.fromkeys(lines)


def _describe_change(dialect: Dialect, path: str, change: FactChange) -> Iterator[str]:
    if change.before is None or change.after is None:
        return
    if change.after.get("refused"):
        yield f"{path}: refused from now on; say what replaces it"
        return
    for column in {**change.before, **change.after}:
        was, now = _unlike(change.before.get(column), change.after.get(column))
        if was == now:
            continue
        if column != "default":
            yield f"{path}: {column} {show_value(was, WIDTH)} becomes {show_value(now, WIDTH)}"
            continue
        rule = claims(dialect).get(path)
        effect = rule.effect if rule else Effect.NUMBERS
        effect_text = (
            effect.value if isinstance(effect, Effect) else "the effect depends on the value"
        )
        yield f"{path}: {show_value(was)} by default until now, {show_value(now)} from now on ({effect_text})"


def _unlike(was: Any, now: Any) -> tuple[Any, Any]:
    """Return both values; of two mappings only the entries that differ."""
    if not (isinstance(was, Mapping) and isinstance(now, Mapping)):
        return was, now
    unlike = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    first, second = ({name: one[name] for name in unlike if name in one} for one in (was, now))
    return first, second


def functions_that_changed(changes: Sequence[FactChange]) -> Iterator[str]:
    """Yield a line for each function that rules or checks name and that changed or was removed."""
    for change in changes:
        if change.before is not None:
            event = "this code changed" if change.after else "this code was removed"
            yield f"{change.row['place']}: {event}; look at the rules and checks that name this place"


def disagreements(counts: Counter[str]) -> Iterator[str]:
    """Yield the differences between our reader and the release, most frequent first."""
    yield from (f"{count} times: {what}" for what, count in counts.most_common())


def heading_and_lines(heading: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield a heading and its lines; nothing if there are no lines."""
    if lines:
        yield f"{heading} ({len(lines)}):"
        yield from (f"  {line}" for line in lines)
