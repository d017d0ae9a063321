"""Decisions that a person must make about a release: fields without a rule, new defaults, checks whose source changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from bridge.config import fields, shown
from bridge.dialect import Dialect
from bridge.rules import Effect
from bridge.testing.harvest.rows import Change, Row
from bridge.translation import claims


def questions(
    dialect: Dialect, changes: Sequence[Change], path_of: Callable[[str, Row], str]
) -> Iterator[str]:
    """Yield a line for each changed fact that needs a person's decision, the most important first."""
    rows = [(path_of(change.file, change.row), change) for change in changes]
    known = fields(dialect.schema)
    for path, change in rows:
        # Its own line in the schema, a section that is kept as one mapping, or fields inside it.
        parents = path.split(".")
        starts = [".".join(parents[:size]) for size in range(1, len(parents) + 1)]
        declared = any(start in known or f"{start}.*" in known for start in starts)
        if change.before is None and not declared:
            yield f"{path}: new, {shown(change.row.get('default'))} by default; add a line to the schema and a rule"
    yield from _each(
        f"{path}: in the schema, but no rule claims it"
        for path in known
        if path not in claims(dialect)
    )
    yield from _each(_default(dialect, path, change) for path, change in rows)
    for path, change in rows:
        if change.after is None:
            yield f"{path}: removed; if a setting replaces it, add a Move"


def _each(lines: Iterator[str]) -> Iterator[str]:
    yield from (line for line in dict.fromkeys(lines) if line)


def _default(dialect: Dialect, path: str, change: Change) -> str:
    if change.before is None or change.after is None:
        return ""
    if change.after.get("refused"):
        return f"{path}: refused from now on; say what replaces it"
    was, now = change.before.get("default"), change.after.get("default")
    if was == now:
        kinds = change.before.get("type", ""), change.after.get("type", "")
        return f"{path}: type {kinds[0]} becomes {kinds[1]}" if kinds[0] != kinds[1] else ""
    rule = claims(dialect).get(path)
    effect = rule.effect if rule else Effect.NUMBERS
    effect_text = effect.value if isinstance(effect, Effect) else "the effect depends on the value"
    return f"{path}: {shown(was)} by default until now, {shown(now)} from now on ({effect_text})"


def moved(changes: Sequence[Change]) -> Iterator[str]:
    """Yield a line for each function that rules or checks name and that changed or was removed."""
    for change in changes:
        if change.before is not None:
            event = "this code changed" if change.after else "this code was removed"
            yield f"{change.row['place']}: {event}; look at the rules and checks that name this place"


def disagreements(found: Counter[str]) -> Iterator[str]:
    """Yield the differences between our reader and the release, most frequent first."""
    yield from (f"{count} times: {what}" for what, count in found.most_common())


def listed(heading: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield a heading and its lines; nothing if there are no lines."""
    if lines:
        yield f"{heading} ({len(lines)}):"
        yield from (f"  {line}" for line in lines)
