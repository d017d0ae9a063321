"""Findings: what a reader or a translation has to say about one field, with its effect on the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.files.document import Document, dotted
from bridge.rules import Effect, How

if TYPE_CHECKING:
    from bridge.files.shell import Script


UNKNOWN = "release/unknown"
"""The rule of a finding that a release is not known, which reports say before anything else."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written: a line of a file (from 1), or the option or key as spelled there."""

    line: int | None = None
    spelling: str = ""

    def __str__(self) -> str:
        return ", ".join(part for part in (f"line {self.line}" if self.line else "", self.spelling) if part)


@dataclass(frozen=True, slots=True)
class Finding:
    """One remark about one field.

    `given` tells whether the user set the field; `how` is None for a remark on reading, else what became of the value;
    `before` and `after` are the stack's own values where a value changed; `change` tells that in words, where units or rounding
    say more than the two. `rule` is the check that it comes from. `cause` is what several findings have in common, in whose stead
    a report for people says it once.
    """

    path: str
    message: str
    effect: Effect
    given: bool = False
    how: How | None = None
    before: Any = None
    after: Any = None
    origin: Origin | None = None
    rule: str = ""
    change: str = ""
    cause: str = ""

    @property
    def id(self) -> str:
        """The rule that it is an instance of, an id that never changes: by the field, where no row of checks made it."""
        return self.rule or f"{self.path}/{self.how or 'remark'}"

    @property
    def matters(self) -> bool:
        """Whether `--strict` refuses it: a set field that was lost, or anything that changes the numbers or stops the run."""
        return self.given or self.effect.reaches(Effect.NUMBERS)


def assumed(script: Script) -> Iterator[Finding]:
    """A finding for each file that a launch script sources and that is not read: what is taken of it."""
    for line, name, message in script.assumed:
        yield Finding(name, message, Effect.NONE, origin=Origin(line))


def twice(document: Document | None) -> Iterator[Finding]:
    """A finding for each key that stands twice in one mapping, of which the last counts; two that differ change the run."""
    for found in document.duplicates if document else ():
        first, last = found.lines
        message = f"written twice, on lines {first} and {last}; the last counts, drop the other"
        effect = Effect.NUMBERS if found.differs else Effect.NONE
        yield Finding(dotted(found.key), message, effect, given=found.differs, origin=Origin(last))


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Where a stack's documentation says one thing of a field and its code does another, and which releases do.

    `said` is what the documentation says, `place` where; `done` what the code does, `source` where. `since` and `until` are
    the first and the last release known to disagree; empty: the first and the newest one covered.
    """

    path: str
    said: str
    done: str
    place: str
    source: str
    since: str = ""
    until: str = ""
