"""Findings: what a reader or a translation has to say about one field, with its effect on the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridge.rules import Effect, How


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
    `before` and `after` are the stack's own values where a value changed.
    """

    path: str
    message: str
    effect: Effect
    given: bool = False
    how: How | None = None
    before: Any = None
    after: Any = None
    origin: Origin | None = None

    @property
    def matters(self) -> bool:
        """Whether `--strict` refuses it: a set field that was lost, or anything that changes the numbers or stops the run."""
        return self.given or self.effect.reaches(Effect.NUMBERS)


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
