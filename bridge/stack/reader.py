"""The reader of nested configs. It collects values, the lines where they were written, findings and
problems.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.errors import SourceError
from bridge.files import Document
from bridge.files.shown import show_value
from bridge.stack.findings import UNTOLD, Finding, Origin, unknown
from bridge.stack.releases import Release
from bridge.stack.rules import Effect


@dataclass
class Reader:
    """Walks through a config for a release, and collects values by path, spellings, findings and
    problems.
    """

    release: Release
    lenient: bool
    document: Document | None
    given: dict[str, Any] = field(default_factory=dict)
    opaque: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    # The name of the document's file, if another file names it.
    file: str = ""

    def line(self, key: str) -> int | None:
        """Return the line of `key`, if the source has line numbers."""
        return self.document.line(*key.split(".")) if self.document else None

    def has_key(self, path: str) -> bool:
        """Return whether the source has the key at `path`. If not, findings on the key have no line
        number.
        """
        return True

    def problem(self, key: str, message: str) -> None:
        """Record a problem: the line of `key`, the key itself, and `message`."""
        line = self.line(key)
        file = f"{self.file}: " if self.file else ""
        self.problems.append(f"{file}{f'line {line}: ' if line else ''}{key}: {message}")

    def finding(self, path: str, message: str, effect: Effect) -> None:
        """Record a finding. With effect NONE, the finding counts as a remark and not as a loss."""
        origin = Origin(self.line(path) if self.has_key(path) else None, path, self.file)
        self.findings.append(
            Finding(path, message, effect, given=effect is not Effect.NONE, origin=origin)
        )

    def record_omission(self, path: str, message: str, end: str = UNTOLD) -> None:
        """Record that the key at `path` was left out, because no table stands for it."""
        origin = Origin(self.line(path), path, self.file)
        self.findings.append(unknown(path, message, None, origin, end))


def mapping(document: Document, expectation: str) -> Mapping[str, Any]:
    """Return the data of a document. Raises `SourceError` if the data is no mapping."""
    if not isinstance(document.data, Mapping):
        raise SourceError(
            f"{document.name}: found {show_value(document.data)}, expected {expectation}"
        )
    return document.data


def flaw(value: Any, limit: str = "no file can hold") -> str:
    """Return a message if JSON cannot express the value, or an empty string if it can. `limit`
    completes "found a value that".
    """
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return f"found a value that {limit} ({str(error).lower()}); use plain finite values"
    return ""
