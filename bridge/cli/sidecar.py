"""The sidecar of a converted file: what the other stack cannot say, and what it keeps in code instead of the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from bridge import carry
from bridge.dialect import Dialect, Written
from bridge.errors import SourceError
from bridge.files import load_json, read_text
from bridge.translation import Result


@dataclass(frozen=True)
class Sidecar:
    """A carry-over, and the part of the converted config that belongs into the training script."""

    carry: carry.Carry
    code: Mapping[str, Any]

    def code_for(self, dialect: Dialect) -> dict[str, Any]:
        """The code part as an argument of `dialect.read`, where it takes one."""
        return {"code": self.code} if self.code and "code" in signature(dialect.read).parameters else {}


def beside(path: Path) -> Path:
    """Where the sidecar of `path` lies."""
    return path.with_name(path.name + ".carry.json")


def text(result: Result, written: Written) -> str:
    """The sidecar of a translation that was written as `written`."""
    record = json.loads(result.carry.text(written.text))
    return json.dumps({**record, "code": written.code}, indent=1, allow_nan=False) + "\n"


def of(path: Path) -> Sidecar | None:
    """The sidecar beside `path`, or None; `SourceError` if it is damaged."""
    place = beside(path)
    if not place.exists():
        return None
    content = read_text(place)
    found = carry.parse(content, str(place))
    code = load_json(content, str(place)).data.get("code", {})
    if not isinstance(code, dict):
        raise SourceError(f"{place}: code: found {code!r}, expected a mapping; delete the file, or convert again")
    return Sidecar(found, code)
