"""The schema of the files of a traced run, by which they are checked when they are read: run.json,
the lines of steps.jsonl, and the records in these lines.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from bridge.errors import SourceError
from bridge.files.contained import path_inside, read_text, regular
from bridge.files.sealed import parse_object, unseal
from bridge.files.shown import show_value
from bridge.trace.placement import Placement
from bridge.trace.record import PHASES, Record

FORMAT = 2
UNSEALED = 1
"""The number of the previous format, in which lines have no digests."""
RUN = "run.json"
STEPS = "steps.jsonl"
MOST_HEAD = 2**26
MOST_LEVEL = 40
"""Maximum level of a record. At this level, there are 2^37 samples, more than any tensor has
elements.
"""


class Chosen(BaseModel):
    """A `bridge.trace.filter.Filter` in run.json. `steps` has the start, stop and step of its
    range.
    """

    model_config = ConfigDict(strict=True)

    layers: list[str] = []
    kinds: list[str] = []
    steps: tuple[int, int, Annotated[int, Field(ge=1)]] | None = Field(None, strict=False)


class Head(BaseModel):
    """The content of run.json: facts that hold for all ranks of a run."""

    model_config = ConfigDict(strict=True, extra="allow")

    format: Annotated[int, Field(ge=UNSEALED, le=FORMAT)]
    ranks: Annotated[int, Field(ge=1, le=2**20)]
    layers: list[str] = []
    engine: str | None = None
    mesh: dict[str, Annotated[int, Field(ge=1)]] = {}
    accumulation: Annotated[int, Field(ge=1)] | None = None
    formats: list[str] = []
    settings: dict[str, Any] = {}
    filter: Chosen = Chosen()


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a line of steps.jsonl: one rank's records of a step, the digest of the file
    with the step's tensors (None: no such file), the loss, the factor by which clipping multiplied
    all gradients (None: not known), and the modes of modules and parameters (empty: as before).
    """

    records: list[Any]
    tensors: str | None
    loss: float | None
    clip: float | None
    modes: Mapping[str, list[str]]


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of steps.jsonl, which has one step of one rank. It is read only on demand: the `size`
    bytes from byte `begin` of the file.
    """

    step: int
    path: Path
    begin: int
    size: int
    where: str
    sealed: bool
    left: bool = False
    """Whether the step's tensors were not logged because the log's budget was used up."""

    def read(self) -> Content:
        """Return the content of the line. Raises `SourceError` if the file cannot be read or is
        damaged.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.begin)
                raw = file.read(self.size)
        except OSError as error:
            raise SourceError(
                f"{self.path}: {error.strerror}; expected a file that can be read"
            ) from None
        fields = _parse_line(raw, self.where, self.sealed)
        return _line_content(fields, self.step, self.where)

    @property
    def records(self) -> list[Any]:
        """The records of the line, read from the file."""
        return self.read().records


def read_head(run: Path) -> dict[str, Any]:
    """Return the content of run.json. Raises `SourceError` if the file is missing or damaged."""
    path = run / RUN
    text = read_text(path, run, MOST_HEAD)
    fields = parse_object(text, path)
    # A digest that is there has to hold, whatever format the file says it has.
    has_digest = fields.get("format") != UNSEALED or "digest" in fields
    fields = unseal(text, path) if has_digest else fields
    try:
        Head.model_validate(fields)
    except ValidationError as error:
        raise SourceError(
            *(_problem_text(path, one) for one in error.errors(include_url=False)[:5])
        ) from None
    unknown = (name for name in fields.get("formats", ()) if not _is_format(name))
    SourceError.raise_if(
        f"{path}: formats: found {show_value(name)}, which torch does not have; the file is damaged"
        for name in unknown
    )
    return fields


def rank_folder(run: Path, rank: int) -> Path:
    """Return the folder to which a rank writes."""
    return run / f"rank-{rank:05d}"


def read_lines(
    run: Path, rank: int, sealed: bool, begin: int = 0, number: int = 0
) -> Iterator[LogLine]:
    """Yield the complete lines of a rank's log from byte `begin` on, each checked by its digest.
    `number` is the number of lines before this byte. A last line that is incomplete is left out.
    If the rank has no log, nothing is yielded.
    """
    path = rank_folder(run, rank) / STEPS
    if not path_inside(path, run).exists():
        return
    try:
        with regular(path, run).open("rb") as file:
            file.seek(begin)
            for number, raw in enumerate(file, number + 1):  # noqa: B020
                # It is being written, or a kill cut it.
                if not raw.endswith(b"\n"):
                    return
                where = f"{path}:{number}"
                # A digest stands at the end of its line.
                has_digest = sealed or b'"digest": "' in raw[-81:]
                step, owner = _read_step_and_rank(raw[:-1], where, has_digest)
                if sealed and owner != rank:
                    raise SourceError(
                        f"{where}: found a line of rank {show_value(owner)}, expected one of rank {rank}; the files of ranks"
                        " were mixed up"
                    )
                yield LogLine(
                    step, path, begin, len(raw) - 1, where, has_digest, LEFT in raw[-300:]
                )
                begin += len(raw)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; expected a file that can be read") from None


LEFT = b', "left": "budget"'
"""Bytes near the end of a line whose tensors were not logged, because the budget was used up."""
BEGINNING = re.compile(rb'\{"step": (-?\d{1,18}), "rank": (\d{1,18}), "records": \[')
"""Pattern of the beginning of a line, by which the step and the rank are found without parsing the
whole line.
"""
SEALED = re.compile(rb', "digest": "([0-9a-f]{64})"\}')
SEAL = len(', "digest": ""}') + 64
"""Number of bytes at the end of a line that its digest takes, with the text around it."""


def _read_step_and_rank(raw: bytes, where: str, has_digests: bool) -> tuple[int, Any]:
    """Return the step and the rank that wrote a line. Raises `SourceError` if the line is damaged."""
    match = BEGINNING.match(raw)
    # A line whose digest holds was written by a log: nothing else of it is needed now.
    if match and has_digests and _has_digest(raw):
        return int(match[1]), int(match[2])
    fields = _parse_line(raw, where, has_digests)
    if type(fields.get("step")) is not int:
        raise SourceError(f"{where}: {NO_LINE}")
    _line_content(fields, fields["step"], where)
    return fields["step"], fields.get("rank")


def _has_digest(raw: bytes) -> bool:
    """Return whether a line ends with the digest of its content."""
    seal = SEALED.fullmatch(raw, len(raw) - SEAL) if len(raw) > SEAL else None
    return (
        seal is not None
        and hashlib.sha256(memoryview(raw)[: seal.start()]).hexdigest() == seal[1].decode()
    )


def _parse_line(raw: bytes, where: str, has_digests: bool) -> dict[str, Any]:
    """Return the content of a line. Raises `SourceError` if the line is damaged; `where` is the
    place in the message.
    """
    if not has_digests or _has_digest(raw):
        try:
            fields = from_json(raw)
        except ValueError:
            fields = None
        if isinstance(fields, dict):
            return fields
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{where}: expected UTF-8, found another byte at position {error.start} of the line; the file is damaged"
        ) from None
    return unseal(text, where) if has_digests else parse_object(text, where)


NO_LINE = "expected a line of a log, with `step` and `records`; the file is damaged"


def _line_content(fields: Mapping[str, Any], step: int, where: str) -> Content:
    records, tensors, loss, clip = map(fields.get, ("records", "tensors", "loss", "clip"))
    modes = fields.get("modes", {})
    right = (
        fields.get("step") == step
        and isinstance(modes, dict)
        and all(isinstance(names, list) for names in modes.values())
        and isinstance(tensors, str | None)
        and isinstance(loss, float | int | None)
        and isinstance(clip, float | int | None)
        and (clip is None or clip > 0)
    )
    if not right or not isinstance(records, list):
        raise SourceError(f"{where}: {NO_LINE}")
    return Content(records, tensors, loss, clip, modes)


@cache
def _record_adapter() -> TypeAdapter[Record]:
    return TypeAdapter(Record)


def read_record(fields: Mapping[str, Any], step: int, where: object) -> Record:
    """Return one record of a line about `step`, from its JSON values. Raises `SourceError` if no
    log can contain such a record; `where` is the place in the message.
    """
    try:
        record = _record_adapter().validate_python(fields)
    except ValidationError as error:
        raise SourceError(_problem_text(where, error.errors(include_url=False)[0])) from None
    reason = _impossible_reason(record, step)
    if reason:
        raise SourceError(f"{where}: {show_value(str(record.name))}: {reason}; the file is damaged")
    return record


def _impossible_reason(record: Record, step: int) -> str:
    """Return the reason why no log can contain such a record, or an empty text if a log can."""
    if record.name.step != step:
        return f"found a record of step {record.name.step} in a line of step {step}"
    if record.name.phase not in PHASES:
        return f"found phase {show_value(record.name.phase)}, expected one of {', '.join(PHASES)}"
    if not 0 <= record.level <= MOST_LEVEL:
        return f"found level {record.level}, expected 0 to {MOST_LEVEL}"
    if not _is_format(record.dtype):
        return f"found number format {show_value(record.dtype)}, which torch does not have"
    return (
        ""
        if _is_possible(record.placement)
        else f"found a part {show_value(record.placement)} that is not within the whole tensor"
    )


def _is_format(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


def _is_possible(place: Placement) -> bool:
    if not len(place.whole) == len(place.offsets) == len(place.sizes):
        return False
    each = zip(place.offsets, place.sizes, place.whole, strict=True)
    # Below 2^62, so that what is worked out with them stays within 64 bits.
    inner = all(
        offset >= 0 and size >= 0 and offset + size <= length < 2**62
        for offset, size, length in each
    )
    return (
        inner and prod(place.whole) < 2**62 and 0 <= place.start <= place.stop <= prod(place.sizes)
    )


def _problem_text(where: object, problem: Any) -> str:
    place = ".".join(map(str, problem["loc"])) or "the whole"
    return f"{where}: {place}: found {show_value(problem['input'], 40)}; {problem['msg'].lower()}; the file is damaged"
