"""What the files of a traced run hold, checked as they are read: its head, its lines, and the records in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from bridge.config import shown
from bridge.errors import SourceError
from bridge.files.contained import inside, read_text
from bridge.files.sealed import parsed, unseal
from bridge.trace.placement import Placement
from bridge.trace.record import PHASES, Record

FORMAT = 2
UNSEALED = 1
"""The format before: lines without digests."""
RUN = "run.json"
STEPS = "steps.jsonl"
MOST_HEAD, MOST_LINES = 2**26, 2**34
MOST_LEVEL = 40
"""2^37 samples of a tensor: more than any has elements."""


class Head(BaseModel):
    """What run.json says of all ranks."""

    model_config = ConfigDict(strict=True, extra="allow")

    format: Annotated[int, Field(ge=UNSEALED, le=FORMAT)]
    ranks: Annotated[int, Field(ge=1, le=2**20)]
    layers: list[str] = []
    engine: str | None = None
    mesh: dict[str, Annotated[int, Field(ge=1)]] = {}
    accumulation: Annotated[int, Field(ge=1)] | None = None
    formats: list[str] = []
    settings: dict[str, Any] = {}


@dataclass(frozen=True)
class Line:
    """What one rank logged of one step, and the digest of the file with its tensors, where there is one."""

    step: int
    records: Sequence[Mapping[str, Any]]
    tensors: str | None


def head(run: Path) -> dict[str, Any]:
    """What run.json says. Raises `SourceError`."""
    path = run / RUN
    text = read_text(path, run, MOST_HEAD)
    found = parsed(text, path)
    sealed = found.get("format") != UNSEALED or "digest" in found
    found = unseal(text, path) if sealed else found
    try:
        Head.model_validate(found)
    except ValidationError as error:
        raise SourceError(*(_problem(path, one) for one in error.errors(include_url=False)[:5])) from None
    unknown = (name for name in found.get("formats", ()) if not _is_format(name))
    SourceError.raise_if(f"{path}: formats: found {shown(name)}, which torch does not have; it is damaged" for name in unknown)
    return found


def rank_folder(run: Path, rank: int) -> Path:
    """Where a rank writes."""
    return run / f"rank-{rank:05d}"


def lines(run: Path, rank: int, sealed: bool) -> Iterator[Line]:
    """The whole lines of a rank's log; the last one is left out if a kill cut it. None if the rank has not begun."""
    path = rank_folder(run, rank) / STEPS
    if not inside(path, run).exists():
        return
    text = read_text(path, run, MOST_LINES)
    for number, line in enumerate(text.split("\n")[:-1], 1):
        where = f"{path}:{number}"
        found = unseal(line, where) if sealed or '"digest": "' in line[-80:] else parsed(line, where)
        if sealed and found.get("rank") != rank:
            raise SourceError(f"{where}: a line of rank {shown(found.get('rank'))}, expected rank {rank}; files were mixed up")
        yield _line(found, where)


def _line(found: Mapping[str, Any], where: str) -> Line:
    step, records, tensors = found.get("step"), found.get("records"), found.get("tensors")
    if type(step) is not int or not isinstance(records, list) or not (tensors is None or isinstance(tensors, str)):
        raise SourceError(f"{where}: no line of a log, which has a step and records; it is damaged")
    return Line(step, records, tensors)


@cache
def _records() -> TypeAdapter[Record]:
    return TypeAdapter(Record)


def record(fields: Mapping[str, Any], step: int, where: object) -> Record:
    """One record of a line of that step. Raises `SourceError` that begins with `where`."""
    try:
        found = _records().validate_python(fields)
    except ValidationError as error:
        raise SourceError(_problem(where, error.errors(include_url=False)[0])) from None
    reason = _reason(found, step)
    if reason:
        raise SourceError(f"{where}: {shown(str(found.name))}: {reason}; it is damaged")
    return found


def _reason(found: Record, step: int) -> str:
    """What no log says; empty if there is nothing of that."""
    if found.name.step != step:
        return f"a record of step {found.name.step} in a line of step {step}"
    if found.name.phase not in PHASES:
        return f"found phase {shown(found.name.phase)}, expected one of {', '.join(PHASES)}"
    if not 0 <= found.level <= MOST_LEVEL:
        return f"found level {found.level}, expected 0 to {MOST_LEVEL}"
    if not _is_format(found.dtype):
        return f"found number format {shown(found.dtype)}, which torch does not have"
    return "" if _possible(found.placement) else f"found a part {shown(found.placement)} that is none of its whole"


def _is_format(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


def _possible(place: Placement) -> bool:
    if not len(place.whole) == len(place.offsets) == len(place.sizes):
        return False
    each = zip(place.offsets, place.sizes, place.whole, strict=True)
    inner = all(offset >= 0 and size >= 0 and offset + size <= length < 2**62 for offset, size, length in each)
    return inner and prod(place.whole) < 2**62 and 0 <= place.start <= place.stop <= prod(place.sizes)


def _problem(where: object, problem: Any) -> str:
    place = ".".join(map(str, problem["loc"])) or "the whole"
    return f"{where}: {place}: found {shown(problem['input'], 40)}; {problem['msg'].lower()}; it is damaged"
