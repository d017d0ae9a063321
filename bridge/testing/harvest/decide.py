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
    """A line for each changed fact that needs more than data, worst first."""
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
        f"{path}: in the schema, and no rule claims it"
        for path in known
        if path not in claims(dialect)
    )
    yield from _each(_default(dialect, path, change) for path, change in rows)
    for path, change in rows:
        if change.after is None:
            yield f"{path}: gone; say what took its place, if anything did"


def _each(lines: Iterator[str]) -> Iterator[str]:
    yield from (line for line in dict.fromkeys(lines) if line)


def _default(dialect: Dialect, path: str, change: Change) -> str:
    if change.before is None or change.after is None:
        return ""
    was, now = change.before.get("default"), change.after.get("default")
    if was == now:
        kinds = change.before.get("type", ""), change.after.get("type", "")
        return f"{path}: takes {kinds[1]}, before {kinds[0]}" if kinds[0] != kinds[1] else ""
    rule = claims(dialect).get(path)
    effect = rule.effect if rule else Effect.NUMBERS
    means = effect.value if isinstance(effect, Effect) else "what it does depends on its value"
    return f"{path}: {shown(was)} by default until now, {shown(now)} from now on ({means})"


def moved(changes: Sequence[Change]) -> Iterator[str]:
    """Functions that rules and checks name and whose code changed or is gone."""
    for change in changes:
        if change.before is not None:
            what = "does something else" if change.after else "not there any more"
            yield f"{change.row['place']}: {what}; read it again"


def disagreements(found: Counter[str]) -> Iterator[str]:
    """Differences between our reader and the release, most frequent first."""
    yield from (f"{count} times: {what}" for what, count in found.most_common())


def listed(heading: str, lines: Sequence[str]) -> Iterator[str]:
    """A heading with its lines."""
    if lines:
        yield f"{heading} ({len(lines)}):"
        yield from (f"  {line}" for line in lines)
