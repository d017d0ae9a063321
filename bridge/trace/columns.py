"""Columns: the statistics and samples of a step as arrays. Everything that similar steps have in
common is read and checked only once.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bridge.checkpoint.lazy import WIDTH, Span, torch_type
from bridge.checkpoint.safetensors_file import read_header
from bridge.errors import SourceError
from bridge.files.contained import regular
from bridge.trace.run import LoggedPart, LoggedTensor, TracedRun
from bridge.trace.schema import STEPS, Content
from bridge.trace.segments import Floats, Places
from bridge.trace.summary import sample_indices

FIGURES = ("count", "nans", "infs", "total", "squares", "low", "high")
"""Names of the seven statistics in a summary, in the order of the arrays' columns."""
_figures = itemgetter(*FIGURES)
_NONE = (0.0, 0.0, 0.0, 0.0, 0.0, np.inf, -np.inf)
PATTERNS = 8
"""Number of patterns that a reader remembers. A run may have several, because its steps may differ
in the tensors that are logged.
"""


@dataclass(frozen=True, eq=False)
class Stored:
    """An open file with one rank's tensors of a step: all bytes of the file, and the bytes of its
    header.
    """

    path: Path
    content: Any
    head: bytes

    @classmethod
    def open(cls, path: Path, digest: str | None) -> Stored:
        """Open the file at `path`. Raises `SourceError` if the file cannot be read, or if its
        digest is not `digest`.
        """
        try:
            with regular(path, path.parent.parent).open("rb") as file:
                # Mapped: of whole tensors a few elements are needed, and the rest must not fill the memory.
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise SourceError(f"{path}: {error}; the file is damaged") from None
        if digest is not None and hashlib.sha256(content).hexdigest() != digest:
            raise SourceError(
                f"{path}: the digest of the file differs from the digest in {STEPS}; the file is damaged"
            )
        # A safetensors file begins with 8 bytes that hold the length of its header.
        length = 8 + int.from_bytes(content[:8], "little")
        return cls(path, content, content[:length])


@dataclass(frozen=True, eq=False)
class Reading:
    """Elements to read from the file of one rank, all of one number format. `elements` are the
    indices in the file, which starts at byte `base`; `to` are the indices in the array that is
    filled; `rows` are the indices of the records that the elements belong to.
    """

    rank: int
    dtype: str
    base: int
    elements: Places
    to: Places
    rows: Places

    def take(self, file: Stored) -> Floats:
        """Return the values of these elements in a file as fp64, of shape (elements,)."""
        width = WIDTH[self.dtype]
        # numpy has no bf16: integers of that width are picked, and torch views them as they are.
        raw = np.frombuffer(
            file.content, np.dtype(f"i{width}"), (len(file.content) - self.base) // width, self.base
        )
        values: Floats = (
            torch.from_numpy(raw[self.elements]).view(torch_type(self.dtype)).double().numpy()
        )
        return values


class Readings:
    """Collects the elements to read, tensor by tensor, and joins those of one file and number
    format.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, str, int], list[tuple[Places, Places, Places]]] = {}

    def add(self, rank: int, span: Span, elements: Places, to: Places, row: int) -> None:
        """Add the `elements` of a tensor that is stored at `span` in the file of `rank`. Their
        values go to the indices `to` of the array that is filled; `row` is the index of the
        tensor's record.
        """
        width = WIDTH[span.dtype]
        # Tensors that begin at the same remainder (`base`) share one view of the file.
        key, first = (rank, span.dtype, span.begin % width), span.begin // width
        self._found.setdefault(key, []).append(
            (first + elements, to, np.full(len(to), row, np.int64))
        )

    def all(self) -> tuple[Reading, ...]:
        """Return the readings: one for each file, number format and alignment."""
        return tuple(
            Reading(*key, *(np.concatenate([one[at] for one in parts]) for at in range(3)))
            for key, parts in self._found.items()
        )


@dataclass(frozen=True, eq=False)
class Pattern:
    """Everything that similar steps of one run have in common: all of a step except its statistics
    and the values of its samples.
    """

    shapes: tuple[list[Any] | None, ...]
    heads: tuple[bytes | None, ...]
    spans: tuple[Mapping[str, Span], ...]
    entries: tuple[LoggedTensor, ...]
    """The tensors of these steps. Their names have the step 0."""
    rows: Mapping[int, int]
    """The index of a part's record among the records of all ranks. The key is Python's `id` of the
    part.
    """
    numbers: tuple[Reading, ...]
    expected: tuple[Floats, ...]
    """For each reading in `numbers`: the indices of a rank's samples among all samples of the
    whole tensor.
    """

    @classmethod
    def of(
        cls,
        run: TracedRun,
        step: int,
        shapes: Sequence[list[Any] | None],
        files: Sequence[Stored | None],
    ) -> Pattern:
        """Return the pattern of a step. All records of the step are checked. Raises `SourceError`
        if one of them is damaged.
        """
        parts = tuple(run.parts(step))
        whole = run.put_together(parts)
        for entry in whole:
            _ = entry.samples  # the check
        spans = tuple(
            {} if file is None else read_header(file.path, file.path.parent.parent)
            for file in files
        )
        places = {id(part): row for row, part in enumerate(parts)}
        numbers = Readings()
        for part in parts:
            samples = part.record.samples
            span = (
                spans[part.rank].get(samples.removesuffix("samples") + "numbers")
                if samples
                else None
            )
            if span is not None:
                each = np.arange(span.count)
                numbers.add(part.rank, span, each, each, places[id(part)])
        readings = numbers.all()
        indices = tuple(reading.take(_there(files[reading.rank])) for reading in readings)
        heads = tuple(None if file is None else file.head for file in files)
        entries = tuple(
            replace(entry, name=entry.name._replace(step=0)) for entry in whole
        )  # without what was read of it
        return cls(tuple(shapes), heads, spans, entries, places, readings, indices)

    def fits(self, shapes: Sequence[list[Any] | None], files: Sequence[Stored | None]) -> bool:
        """Return whether a step with these records and files has this pattern."""
        # None: records from which `_split_records` could not take the figures.
        if None in shapes or list(self.shapes) != list(shapes):
            return False
        if list(self.heads) != [None if file is None else file.head for file in files]:
            return False
        pairs = zip(self.numbers, self.expected, strict=True)
        # Which samples a rank has is told by tensors: the header does not show their values.
        return all(
            np.array_equal(reading.take(_there(files[reading.rank])), indices)
            for reading, indices in pairs
        )


def _there(file: Stored | None) -> Stored:
    assert file is not None, "expected tensors that are in a file"
    return file


@dataclass(frozen=True, eq=False)
class Columns:
    """The statistics of one step, one row for each record of any rank. `raw` are the statistics as
    logged. `factors` convert them into the unit that all layouts share, and `figures` are the
    converted statistics.
    """

    pattern: Pattern
    raw: Floats
    figures: Floats
    factors: Floats
    files: tuple[Stored | None, ...]
    losses: tuple[float | None, ...]
    """For each rank, the loss from which backward started; None if it is not in the log."""
    clip: float | None
    """The factor by which clipping multiplied all gradients; None if it is unknown on some rank, or ranks differ."""

    @classmethod
    def of(
        cls,
        pattern: Pattern,
        numbers: Floats,
        files: Sequence[Stored | None],
        lines: Sequence[Content],
    ) -> Columns:
        """Return the columns for `numbers`, an array (records, 8) with seven statistics and one
        factor for each record.
        """
        raw, factors = numbers[:, :7], numbers[:, 7]
        with np.errstate(all="ignore"):
            # A negative factor swaps the smallest and the largest.
            ends = np.sort(raw[:, 5:] * factors[:, None], axis=1)
            scaled = np.stack([raw[:, 3] * factors, raw[:, 4] * factors * factors], axis=1)
            some = raw[:, 0] - raw[:, 1] - raw[:, 2] != 0
        # Without a finite element, as a summary has it; infinity times 0 would be NaN.
        ends[~some] = (np.inf, -np.inf)
        return cls(
            pattern,
            raw,
            np.concatenate([raw[:, :3], scaled, ends], axis=1),
            factors,
            tuple(files),
            tuple(line.loss for line in lines),
            _common_clip([line.clip for line in lines]),
        )


class ColumnReader:
    """Reads the steps of a run as columns, and remembers the last patterns."""

    def __init__(self, run: TracedRun) -> None:
        self.run = run
        self._patterns: list[Pattern] = []

    def columns(self, step: int) -> Columns:
        """Return the columns of a step. Raises `SourceError` if the log of the step is damaged."""
        shapes: list[list[Any] | None] = []
        numbers: list[tuple[float, ...]] = []
        files: list[Stored | None] = []
        read: list[Content] = []
        for folder, steps in self.run.lines.items():
            content = steps[step].read()
            rows, has_samples = _split_records(content.records, step)
            shapes.append(content.records if rows is not None else None)
            numbers += rows or []
            read.append(content)
            files.append(
                Stored.open(folder / f"{step:08d}.safetensors", content.tensors)
                if has_samples
                else None
            )
        figures = None if None in shapes else _as_array(numbers)
        if figures is None:
            return self._loose(step, files, read)
        pattern = next(
            (candidate for candidate in self._patterns if candidate.fits(shapes, files)), None
        )
        if pattern is None:
            pattern = Pattern.of(self.run, step, shapes, files)
            # The newest first: most steps look like the one before.
            self._patterns = [pattern, *self._patterns[: PATTERNS - 1]]
        return Columns.of(pattern, figures, files, read)

    def _loose(
        self, step: int, files: Sequence[Stored | None], lines: Sequence[Content]
    ) -> Columns:
        """Return the columns of a step in which some records do not have the form that a log
        writes. The records of such a step are read one by one.
        """
        parts = tuple(self.run.parts(step))
        pattern = Pattern.of(self.run, step, [None] * len(files), files)
        rows = []
        for part in parts:
            summary = part.record.summary
            figures: tuple[float, ...] = _NONE
            if summary is not None:
                figures = tuple(float(getattr(summary, name)) for name in FIGURES)
            rows.append((*figures, part.record.factor))
        return Columns.of(pattern, np.array(rows, np.float64).reshape(-1, 8), files, lines)


def _common_clip(clips: Sequence[float | None]) -> float | None:
    factors = [clip for clip in clips if clip is not None]
    same = len(factors) == len(clips) > 0 and max(factors) <= min(factors) * (1 + 1e-3)
    return min(factors) if same else None


def _split_records(records: list[Any], step: int) -> tuple[list[tuple[float, ...]] | None, bool]:
    """Remove the statistics and the factor from each record, so that what is left is equal in
    similar steps. Returns the removed numbers, and whether some tensors are stored in a file. The
    numbers are None if a record has another form than those that a log writes.
    """
    rows, has_samples = [], False
    try:
        for fields in records:
            summary, name = fields["summary"], fields["name"]
            # Such a record goes the slow way, on which what is wrong with it is found and said.
            if (
                type(name) is not list
                or name[0] != step
                or (summary is not None and len(summary) != 7)
            ):
                return None, _has_samples(records)
            rows.append((*(_NONE if summary is None else _figures(summary)), fields["factor"]))
            has_samples = has_samples or (fields["samples"] or fields["full"]) is not None
        for fields in records:
            # What is left is equal in steps that look alike. A loop of its own: records that are
            # half emptied could not go the slow way any more.
            fields["name"][0] = fields["factor"] = None
            fields["summary"] = fields["summary"] is not None
    except (KeyError, TypeError, IndexError):
        return None, _has_samples(records)
    return rows, has_samples


def _has_samples(records: list[Any]) -> bool:
    return any(
        isinstance(fields, dict) and (fields.get("samples") or fields.get("full"))
        for fields in records
    )


def _as_array(numbers: Sequence[tuple[float, ...]]) -> Floats | None:
    """Return the numbers as an array (records, 8), or None if some of them cannot be statistics:
    NaN, or a count that is no whole number.
    """
    try:
        array = np.array(numbers, np.float64).reshape(-1, 8)
    except (ValueError, TypeError, OverflowError):
        return None
    with np.errstate(all="ignore"):
        # Counts are whole numbers, and no figure is NaN: NaNs are counted and left out.
        whole = bool((array[:, :3] % 1 == 0).all())
    return array if whole and not np.isnan(array).any() else None


class Gathering:
    """Combines the records of a step into the tensors `entries`: merges the statistics of each
    tensor, and puts its samples in order.

    For each tensor, `told` says whether it has statistics, `lengths` has the number of its samples
    (-1: none), and `begins` the index of its first sample among all samples.
    """

    def __init__(self, entries: Sequence[LoggedTensor], pattern: Pattern) -> None:
        self.pattern = pattern
        rows = [
            [pattern.rows[id(part)] for part in entry.parts if part.record.summary]
            for entry in entries
        ]
        self.told = np.array([bool(group) for group in rows], bool)
        self._rows = np.array([row for group in rows for row in group], np.int64)
        lengths = np.array([len(group) for group in rows if group], np.int64)
        self._starts, self._single = np.cumsum(lengths) - lengths, bool((lengths == 1).all())
        self.lengths = np.array([_sample_count(entry) for entry in entries], np.int64)
        sizes = np.maximum(self.lengths, 0)
        self.begins, self._size = np.cumsum(sizes) - sizes, int(sizes.sum())
        readings = Readings()
        for entry, begin, length in zip(
            entries, self.begins.tolist(), self.lengths.tolist(), strict=True
        ):
            if length >= 0:
                self._read(entry, begin, length, readings)
        self._readings = readings.all()

    def _read(self, entry: LoggedTensor, begin: int, length: int, readings: Readings) -> None:
        """Record where to read the samples of a tensor: from the logged samples, or from the whole
        tensor if it was logged.
        """
        full = any(part.record.full for part in entry.parts)
        several = [
            part for part in entry.parts if (part.record.full if full else part.record.samples)
        ]
        for part in several:
            spans, row = self.pattern.spans[part.rank], self.pattern.rows[id(part)]
            if full:
                mask, elements = part.record.placement.within(
                    sample_indices(entry.shape, entry.first.level)
                )
                readings.add(
                    part.rank,
                    spans[part.record.full or ""],
                    elements.numpy(),
                    begin + mask.nonzero().view(-1).numpy(),
                    row,
                )
                continue
            span = spans[part.record.samples or ""]
            each = np.arange(span.count)
            # Most tensors lie whole on one rank, with all samples in order: no numbers are needed.
            to = (
                each
                if len(several) == 1 and part.record.placement.complete
                else self._sample_indices(part, row)
            )
            readings.add(part.rank, span, each, begin + to, row)

    def _sample_indices(self, part: LoggedPart, row: int) -> Places:
        """Return the indices of a part's samples among all samples of the tensor, as they were
        read from the rank's file.
        """
        for reading, indices in zip(self.pattern.numbers, self.pattern.expected, strict=True):
            here = reading.rows == row
            if reading.rank == part.rank and here.any():
                return np.asarray(indices[here], np.int64)
        return np.zeros(0, np.int64)

    def figures(self, columns: Columns) -> Floats:
        """Return the merged statistics (tensors, 7) of each tensor; zeros for a tensor without
        statistics.
        """
        parts = columns.figures[self._rows]
        if not self._single and len(self._rows):
            with np.errstate(all="ignore"):
                # The records of one tensor lie next to each other.
                sums = np.add.reduceat(parts[:, :5], self._starts)
                low = np.minimum.reduceat(parts[:, 5], self._starts)
                high = np.maximum.reduceat(parts[:, 6], self._starts)
            parts = np.concatenate([sums, low[:, None], high[:, None]], axis=1)
        result = np.zeros((len(self.told), 7))
        result[self.told] = parts
        return result

    def samples(self, columns: Columns) -> Floats:
        """Return all samples, one tensor after the other. Samples of missing ranks are NaN."""
        values = np.full(self._size, np.nan)
        for reading in self._readings:
            with np.errstate(all="ignore"):
                values[reading.to] = (
                    reading.take(_there(columns.files[reading.rank]))
                    * columns.factors[reading.rows]
                )
        return values


def _sample_count(entry: LoggedTensor) -> int:
    """Return the number of samples of a tensor, or -1 if it has none."""
    if entry.joined or not any(part.record.full or part.record.samples for part in entry.parts):
        return -1
    return len(sample_indices(entry.shape, entry.first.level))
