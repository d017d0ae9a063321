"""Findings: remarks of a reader or a translation about one field, each with the effect on the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bridge.files.document import Document, key_with_dots
from bridge.files.shown import brief
from bridge.shell import Launch, Script
from bridge.stack.rules import Effect, How

UNKNOWN = "release/unknown"
"""The rule id of the finding that a release is not known. Reports print this finding before all
others.
"""

DIFFERENCE = "difference"
"""Prefix of the id of every finding on a difference; the name of the field follows."""
LEFT_OUT = "; this value is left out"
"""The end of the message about a setting whose value is known only when the script runs."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where a value was written: a line of a file (from 1), and the option or key as it
    is spelled in the file. `file` is empty if this is the file that the user gave.
    """

    line: int | None = None
    spelling: str = ""
    file: str = ""

    def __str__(self) -> str:
        line = f"{self.file} line {self.line}".strip() if self.line else ""
        return ", ".join(part for part in (line, self.spelling) if part)


@dataclass(frozen=True, slots=True)
class Finding:
    """One remark about one field.

    `given` is true if the user set the field. `how` is the fate of the value in a translation, or
    None for a remark on reading. `before` and `after` are the values in the stack's own form if a
    value changed. `change` describes the change in words, if units or rounding make this necessary.
    `rule` is the id of the check that made the finding. `cause` is the reason that several findings
    share; reports for people print it once for all of them. `unknown` is true for a setting that was
    left out and that no table stands for: nobody knows what it does to the run. `surprising` is
    true if the stack does something else than the setting says: `effect` is the effect of that, and
    no difference between two runs of the stack. `about` are the plan fields that the finding reports
    on if it compares two meanings, and further settings that stand for them.
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
    unknown: bool = False
    surprising: bool = False
    about: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The id of the finding's rule, which never changes. Without a rule, the id is made of the
        field and `how`.
        """
        return self.rule or f"{self.path}/{'unknown' if self.unknown else self.how or 'remark'}"

    @property
    def matters(self) -> bool:
        """Whether `--strict` refuses the finding: true if it is about a field that was given, changes
        the numbers, or stops the run.
        """
        return self.given or self.effect.reaches(Effect.NUMBERS)


UNTOLD = "; left out, and nothing tells what it does to the run"


def unknown(
    path: str, message: str, value: Any = None, origin: Origin | None = None, end: str = UNTOLD
) -> Finding:
    """Return the finding on a flag, key or value that no table stands for and that is left out.

    Its name is no evidence of what it does, so it counts as one that changes the numbers. `value` is
    what the source gives to it, as text. The message ends with `end`.
    """
    return Finding(
        brief(path),
        message + end,
        Effect.NUMBERS,
        True,
        before=value,
        origin=origin,
        change="" if value is None else brief(str(value)),
        unknown=True,
    )


def find_assumptions(script: Script, launch: Launch) -> Iterator[Finding]:
    """A finding for each assumption about a launch script: for each file that it sources (by `source
    FILE`) and that is not read, for each variable that decides a branch and is not set, for each
    option that the launcher of `launch` does not know, and one if the script's variables leave the
    number of ranks unknown.
    """
    for line, name, message in (*script.unread_sources, *script.unset_variables):
        yield Finding(name, message, Effect.NONE, origin=Origin(line))
    for launcher, option in launch.unknown_options:
        message = f"{launcher} has no such option, in no release that stagebridge knows"
        yield unknown(option, message, origin=Origin(launch.line), end="; correct or delete it")
    if launch.unranked:
        message = f"not known: {launch.unranked}; or set --world-size"
        yield Finding("world_size", message, Effect.NUMBERS, origin=Origin(launch.line))


def twice(document: Document | None) -> Iterator[Finding]:
    """Yield a finding for each key that is written twice in one mapping. Parsers use the last
    value, so two different values change the run.
    """
    for duplicate in document.duplicates if document else ():
        first, last = duplicate.lines
        message = (
            f"written twice, on lines {first} and {last}; the last value takes effect; "
            "delete the other line"
        )
        effect = Effect.NUMBERS if duplicate.differs else Effect.NONE
        yield Finding(
            key_with_dots(duplicate.key),
            message,
            effect,
            given=duplicate.differs,
            origin=Origin(last),
        )


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A field of which a stack's documentation says one thing while its code does another.

    `said` is the statement of the documentation, and `place` is the page. `done` is the behaviour
    of the code, and `source` is the function. `since` and `until` are the first and the last
    release in which the disagreement is known. An empty text stands for the oldest or the newest
    release that stagebridge covers.
    """

    path: str
    said: str
    done: str
    place: str
    source: str
    since: str = ""
    until: str = ""
