"""A gate: findings of many files as records, the choice of findings that count, and formats that
other programs read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from bridge import __version__
from bridge.errors import BridgeError
from bridge.files.printable import clean
from bridge.files.secrets import hide
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect

REFUSED = "refused"
"""The rule id of records for files that cannot be read, and for files that the stack refuses."""
LEVELS: Mapping[Effect, str] = {
    Effect.STOPS: "error",
    Effect.NUMBERS: "warning",
    Effect.ROUNDING: "note",
    Effect.COST: "note",
    Effect.NONE: "note",
}
"""The level of findings with each effect, in SARIF's words."""
SARIF = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
GITHUB: Mapping[str, str] = {"error": "error", "warning": "warning", "note": "notice"}


@dataclass(frozen=True, slots=True)
class Record:
    """One finding or error of one file, with the id of its rule, its setting, its line (from 1) and its effect.

    `help` is a command that tells more, or empty.
    """

    rule: str
    path: str
    file: str
    line: int | None
    effect: Effect
    message: str
    help: str = ""


def record(finding: Finding, file: str, dialect: str) -> Record:
    """The record of a finding on a file of a stack."""
    # A line of a file that this one names is no line of this one.
    line = finding.origin.line if finding.origin and not finding.origin.file else None
    change = f"{finding.change}; " if finding.change and finding.message else finding.change
    command = f"stagebridge show {dialect} {finding.path}"
    return Record(
        finding.id,
        finding.path,
        file,
        line,
        finding.effect,
        hide(clean(change + finding.message)),
        command,
    )


def refusals(problems: Iterable[str], file: str) -> Iterator[Record]:
    """A record for each problem of a file that is refused."""
    for problem in problems:
        text = clean(hide(problem)).removeprefix(f"{file}: ")
        head, _, rest = text.partition(": ")
        # Problems read `FILE: line N: PATH: MESSAGE`; line and path may both be missing.
        line = (
            int(head.removeprefix("line "))
            if head.startswith("line ") and head[5:].isdecimal()
            else None
        )
        path, colon, message = (rest if line else text).partition(": ")
        has_path = bool(colon) and " " not in path
        yield Record(
            REFUSED,
            path if has_path else "",
            file,
            line,
            Effect.STOPS,
            message if has_path else rest if line else text,
        )


@dataclass(frozen=True)
class Choice:
    """The choice of findings that count. If `select` is not empty, a finding counts only if its
    rule matches a pattern in `select`. A finding does not count if its rule matches a pattern in
    `ignore`, or if `known` lists the finding.

    A pattern matches a rule if the two are equal, if the rule begins with the pattern and a slash,
    or if the pattern has a `*` that fits. `known` holds the file, rule and path of each finding of
    the baseline.
    """

    select: Sequence[str] = ()
    ignore: Sequence[str] = ()
    known: frozenset[tuple[str, str, str]] = frozenset()

    def takes(self, finding: Finding, file: str) -> bool:
        """Return whether a finding counts, by `select`, `ignore` and `known`."""
        chosen = not self.select or any(fits(finding.id, pattern) for pattern in self.select)
        ignores = any(fits(finding.id, pattern) for pattern in self.ignore)
        return (
            chosen and not ignores and (place_of(file), finding.id, finding.path) not in self.known
        )

    def of(self, findings: Iterable[Finding], file: str) -> tuple[Finding, ...]:
        """Return the findings on a file that count."""
        return tuple(finding for finding in findings if self.takes(finding, file))


def fits(rule: str, pattern: str) -> bool:
    """Return whether the id of a rule matches a pattern."""
    return (
        rule == pattern or rule.startswith(pattern.rstrip("/") + "/") or fnmatchcase(rule, pattern)
    )


def place_of(file: str) -> str:
    """Return one name for all names of a file: its absolute path. A name that is no path of a file,
    such as git:REV:PATH, is returned as it is.
    """
    # A link is a file of its own, as other files lie beside it; links to its folder are followed.
    folder, name = os.path.split(file)
    return os.path.join(os.path.realpath(folder), name) if os.path.isfile(file) else file


# Baseline


def baseline(records: Iterable[Record], where: Path) -> str:
    """Return the text of the baseline file `where`, with the findings of `records`. Paths of files are
    relative to its folder. Errors are left out, because a file that is refused always fails.
    """
    folder = os.path.realpath(where.parent)

    def relative_name(file: str) -> str:
        place = place_of(file)
        return Path(os.path.relpath(place, folder)).as_posix() if os.path.isabs(place) else place

    # By file, rule and setting, not by line: lines move with every edit above them.
    rows = sorted(
        {(relative_name(one.file), one.rule, one.path) for one in records if one.rule != REFUSED}
    )
    entries = [{"file": file, "rule": rule, "path": path} for file, rule, path in rows]
    return json.dumps({"stagebridge": 1, "known": entries}, indent=1) + "\n"


def read_baseline(text: str, where: str) -> frozenset[tuple[str, str, str]]:
    """Return file, rule and path of each finding in the baseline file `where`. Files are named as by
    `place_of`. Raises `BridgeError` if the text is not a baseline.
    """
    folder = os.path.dirname(where)
    try:
        data = json.loads(text)
        rows = data["known"] if data["stagebridge"] == 1 else None
        return frozenset(
            (_path_in_folder(folder, row["file"]), row["rule"], row["path"]) for row in rows or ()
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BridgeError(
            f"{where}: not a baseline file; write a baseline with --write-baseline"
        ) from None


def _path_in_folder(folder: str, file: str) -> str:
    place = place_of(os.path.join(folder, file))
    return place if os.path.isabs(place) else file


def is_baseline(content: bytes) -> bool:
    """Return whether `content` is that of a baseline file."""
    try:
        read_baseline(content.decode(), "")
    except (BridgeError, UnicodeDecodeError):
        return False
    return True


# Formats


def as_json(records: Sequence[Record], code: int) -> str:
    """All records as one JSON object."""
    rows = [
        {**asdict(one), "effect": str(one.effect), "level": LEVELS[one.effect]} for one in records
    ]
    return json.dumps({"findings": rows, "exit_code": code}, indent=2)


def as_github(records: Sequence[Record], code: int) -> str:
    """All records as workflow commands, which GitHub shows beside the changed lines."""
    return "\n".join(map(_command, records))


def _command(one: Record) -> str:
    place = f"file={_escape_property(one.file)}" + (f",line={one.line}" if one.line else "")
    words = _data(": ".join(filter(None, (one.path, str(one.effect), one.message))))
    return f"::{GITHUB[LEVELS[one.effect]]} {place},title={_escape_property(one.rule)}::{words}"


def _data(text: str) -> str:
    # The escapes of GitHub's workflow commands; % first, as the others bring new ones.
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    # In a property a colon or a comma would end it.
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def as_sarif(records: Sequence[Record], code: int) -> str:
    """All records as SARIF 2.1.0, for code scanning."""
    rules = list(dict.fromkeys(one.rule for one in records))
    # Reversed, so that the first record of a rule is the one that describes it.
    first = {one.rule: one for one in reversed(records)}
    driver = {
        "name": "stagebridge",
        "version": __version__,
        "rules": [_rule(first[rule]) for rule in rules],
    }
    run = {
        "tool": {"driver": driver},
        # Python counts code points; SARIF would take UTF-16 units.
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": True, "exitCode": code}],
        "results": [_result(one, rules.index(one.rule)) for one in records],
    }
    return json.dumps({"$schema": SARIF, "version": "2.1.0", "runs": [run]}, indent=2)


def _rule(one: Record) -> dict[str, Any]:
    rule = {
        "id": one.rule,
        "shortDescription": {"text": one.message or one.rule},
        "defaultConfiguration": {"level": LEVELS[one.effect]},
    }
    return {**rule, "help": {"text": one.help}} if one.help else rule


def _result(one: Record, index: int) -> dict[str, Any]:
    from urllib.parse import quote

    place: dict[str, Any] = {"artifactLocation": {"uri": quote(Path(one.file).as_posix())}}
    if one.line:
        place["region"] = {"startLine": one.line}
    return {
        "ruleId": one.rule,
        "ruleIndex": index,
        "level": LEVELS[one.effect],
        "message": {"text": ": ".join(filter(None, (one.path, one.message or str(one.effect))))},
        "locations": [{"physicalLocation": place}],
        "properties": {"effect": str(one.effect), "path": one.path},
    }


FORMATS: Mapping[str, Callable[[Sequence[Record], int], str]] = {
    "json": as_json,
    "github": as_github,
    "sarif": as_sarif,
}
"""The formats for other programs, each with the function that writes it."""
