"""Runs: the logs of all ranks of one training. The parts of a tensor that ranks logged are joined
into the whole tensor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bridge.checkpoint.digests import digest_of
from bridge.errors import SourceError
from bridge.files.contained import regular
from bridge.files.shown import show_value
from bridge.trace.filter import Filter
from bridge.trace.placement import Placement
from bridge.trace.record import PHASES, Name, Record
from bridge.trace.retention import limit_notes
from bridge.trace.schema import (
    RUN,
    STEPS,
    UNSEALED,
    LogLine,
    rank_folder,
    read_head,
    read_lines,
    read_record,
)
from bridge.trace.summary import Summary, sample_indices

MOST_MISSING = 4096
"""A tensor may have so many times more elements than the logs hold, because logs of some ranks may
be missing. If it has still more, the log is damaged.
"""


@dataclass(frozen=True)
class LoggedPart:
    """A record of a part of a tensor, with the folder of the rank that logged it, and the digest
    of the file with its values.
    """

    record: Record
    folder: Path
    digest: str | None = None

    @property
    def rank(self) -> int:
        """The rank that logged the part."""
        return int(self.folder.name.rpartition("-")[2])

    def tensor(self, key: str | None, count: int | None = None) -> Tensor | None:
        """Return the numbers that are stored under `key` in the file of the step, in fp64; None
        without a key. Raises `SourceError` if they are missing, or are not `count` numbers.
        """
        if key is None:
            return None
        path = self.folder / f"{self.record.name.step:08d}.safetensors"
        try:
            values = _open_tensors(path, path.stat().st_mtime_ns, self.digest).get(key)
        except (SafetensorError, OSError, UnicodeEncodeError) as error:
            raise SourceError(f"{path}: {error}; the file is damaged") from None
        if values is None:
            raise SourceError(
                f"{path}: found no tensor {show_value(key)} in the file; the file is damaged"
            )
        if values.dim() != 1 or (count is not None and len(values) != count):
            raise SourceError(
                f"{path}: {show_value(key)} has shape {tuple(values.shape)}, expected ({count},); the file is damaged"
            )
        return values.double()


@lru_cache(maxsize=128)
def _open_tensors(path: Path, mtime: int, digest: str | None) -> Mapping[str, Tensor]:
    """Read the tensors of a file, which are cached by the arguments. `mtime` is the time at
    which the file was modified, so that a later file with the same name is read anew.
    """
    if digest is not None and digest_of(regular(path, path.parent.parent)) != digest:
        raise SourceError(
            f"{path}: the digest of the file differs from the digest in {STEPS}; the file is damaged"
        )
    return load_file(regular(path, path.parent.parent))


def _check_room(elements: int, present: int, name: object) -> None:
    """Raise `SourceError` if a tensor would be far larger than the part of it that was logged,
    because the log is damaged then.
    """
    if elements > MOST_MISSING * max(present, 1):
        raise SourceError(
            f"{name}: found {present} numbers in the log, expected about {elements}; the file is damaged"
        )


@dataclass(frozen=True)
class LoggedTensor:
    """One tensor of a step, made of the parts that ranks logged. Values are converted by each
    record's factor, so that they do not depend on the layout.
    """

    name: Name
    parts: tuple[LoggedPart, ...]
    replicas: tuple[LoggedPart, ...] = ()
    """Copies of these parts that further ranks logged."""
    joined: bool = False
    """Whether the parts belong to several microbatches. Statistics of such parts can be merged;
    samples cannot be put together.
    """

    def copies(self) -> Iterator[tuple[LoggedPart, LoggedTensor]]:
        """Yield each copy whose statistics differ from those of the first rank's part, with the
        tensor that results if the copy replaces this part.
        """
        first = {without_replicas(part.record.placement): part for part in self.parts}
        for copy in self.replicas:
            part = first[without_replicas(copy.record.placement)]
            if (copy.record.summary, copy.record.factor) != (
                part.record.summary,
                part.record.factor,
            ):
                yield (
                    copy,
                    LoggedTensor(
                        self.name, tuple(copy if other is part else other for other in self.parts)
                    ),
                )

    @property
    def first(self) -> Record:
        """The record of the first part, for facts that are the same for all parts."""
        return self.parts[0].record

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.first.placement.whole

    @property
    def missing(self) -> int:
        """Number of elements that no rank logged."""
        return (
            0
            if self.joined
            else prod(self.shape) - sum(part.record.placement.count for part in self.parts)
        )

    @cached_property
    def summary(self) -> Summary | None:
        """The statistics of all parts, merged; None if the tensor was logged below level 2."""
        summaries = [
            _scale_summary(part.record.summary, part.record.factor)
            for part in self.parts
            if part.record.summary
        ]
        return Summary.merge_parts(summaries) if summaries else None

    @cached_property
    def samples(self) -> Tensor | None:
        """The samples of the whole tensor in fp64, with NaN for samples that no rank logged; None
        if the tensor was logged below level 3.
        """
        if self.joined:
            return None
        if self.whole is not None:
            return self.whole.reshape(-1)[sample_indices(self.shape, self.first.level)]
        parts = [part for part in self.parts if part.record.samples]
        if not parts:
            return None
        if (
            len(parts) == 1 and parts[0].record.placement.complete
        ):  # as most are: all samples, in order
            only = parts[0].tensor(
                parts[0].record.samples, len(sample_indices(self.shape, self.first.level))
            )
            return None if only is None else only * parts[0].record.factor
        values = [part.tensor(part.record.samples) for part in parts]
        # Before memory is taken: a shape that is damaged must not ask for all of it.
        _check_room(
            min(prod(self.shape), 2**self.first.level),
            sum(len(part) for part in values if part is not None),
            self.name,
        )
        samples = torch.full(
            (len(sample_indices(self.shape, self.first.level)),), math.nan, dtype=torch.float64
        )
        for part, elements in zip(parts, values, strict=True):
            assert elements is not None, "expected sampled elements for this part of the tensor"
            key = part.record.samples
            assert key is not None, "expected sampled elements for this part of the tensor"
            numbers = part.tensor(key.removesuffix("samples") + "numbers", len(elements))
            assert numbers is not None, "expected sampled elements for this part of the tensor"
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(samples):
                reason = (
                    "found an index of a sample that the tensor does not have; the file is damaged"
                )
                raise SourceError(f"{part.folder}: {self.name}: {reason}")
            samples[numbers.long()] = elements * part.record.factor
        return samples

    @cached_property
    def whole(self) -> Tensor | None:
        """The whole tensor in fp64, with NaN for parts that no rank logged; None if the log has
        samples only.
        """
        if not any(part.record.full for part in self.parts):
            return None
        _check_room(
            prod(self.shape), sum(part.record.placement.count for part in self.parts), self.name
        )
        flat = torch.full((prod(self.shape),), math.nan, dtype=torch.float64)
        for part in self.parts:
            if part.record.placement.whole != self.shape:
                raise SourceError(
                    f"{part.folder}: {self.name}: found a part that belongs to a tensor of another shape; the file is damaged"
                )
            if (values := part.tensor(part.record.full, part.record.placement.count)) is not None:
                flat[part.record.placement.places()] = values * part.record.factor
        return flat.view(self.shape)

    def microbatches(self) -> dict[int, Summary]:
        """Return the statistics of each microbatch, by the microbatch's number."""
        by_number: dict[int, list[Summary]] = defaultdict(list)
        for part in self.parts:
            if part.record.microbatch is not None and part.record.summary:
                by_number[part.record.microbatch].append(
                    _scale_summary(part.record.summary, part.record.factor)
                )
        return {
            index: Summary.merge_parts(summaries) for index, summaries in sorted(by_number.items())
        }


LOOKED = 3
"""Number of steps in which `TracedRun` looks for outputs of layers, to find the order in which layers
run.
"""


@dataclass(frozen=True)
class TracedRun:
    """A traced run, read from its folder. While the run continues, the steps that every rank has
    written completely can be read.
    """

    folder: Path
    about: Mapping[str, Any]
    lines: Mapping[Path, Mapping[int, LogLine]]

    @classmethod
    def read(cls, folder: str | Path) -> TracedRun:
        """Read which steps the run in `folder` has. Raises `SourceError` if the folder holds no
        run.
        """
        path = Path(folder)
        if not (path / RUN).exists():
            raise SourceError(f"{path}: expected the folder of a traced run, with {RUN} in it")
        about = read_head(path)
        has_digests, ranks = about["format"] != UNSEALED, range(about["ranks"])
        lines = {
            rank_folder(path, rank): {
                line.step: line for line in read_lines(path, rank, has_digests)
            }
            for rank in ranks
        }
        return cls(path, about, lines)

    @property
    def layout(self) -> str:
        """The engine, the ranks along each axis and the microbatches of a step, as text."""
        axes = [f"{axis} {size}" for axis, size in self.about.get("mesh", {}).items() if size > 1]
        count = self.about.get("accumulation")
        word = "microbatch" if count == 1 else "microbatches"
        passes = (
            "an unknown number of microbatches"
            if count is None
            else f"{count} {word} per rank and step"
        )
        return f"{self.about.get('engine')}, {', '.join(axes) or 'one rank'}, {passes}"

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Sentences that say which parts of the run its log lacks."""
        sentences, gaps = (
            [*limit_notes(self.keep), *self.filter.notes()],
            [step for step in self.steps if step not in self._complete_steps],
        )
        if gaps:
            sentences.append(
                f"the log has no tensors of {len(gaps)} of {len(self.steps)} steps, from step {gaps[0]} on, because "
                f"of its budget of {self.keep.get('budget')} bytes"
            )
        return tuple(sentences)

    def modes(self, step: int, rank: int = 0) -> Mapping[str, list[str]]:
        """Return the names of the modules in evaluation mode and of the frozen parameters of a
        rank in a step; empty if the log does not tell.
        """
        lines = self.lines.get(rank_folder(self.folder, rank), {})
        # A line has them if they changed, and most never do.
        for number in sorted((number for number in lines if number <= step), reverse=True):
            modes = lines[number].read().modes
            if modes:
                return modes
        return {}

    @cached_property
    def keep(self) -> Mapping[str, Any]:
        """The settings that limited the log (see `bridge.trace.retention.Keep`); empty if there were
        none.
        """
        settings = self.about.get("keep", {})
        return settings if isinstance(settings, Mapping) else {}

    @cached_property
    def filter(self) -> Filter:
        """The filter that selected the tensors to log."""
        return Filter.of(self.about)

    @cached_property
    def _complete_steps(self) -> frozenset[int]:
        return frozenset(
            step
            for step in self.steps
            if not any(lines[step].left for lines in self.lines.values())
        )

    @cached_property
    def formats(self) -> frozenset[str]:
        """The number formats of the weights, and of the outputs in the first step that has any: a
        script may switch autocast on after the trace was attached.
        """
        outputs: set[str] = set()
        for step in () if "bfloat16" in self.about.get("formats", ()) else self.steps:
            outputs = {one.first.dtype for one in self.entries(step) if one.name.kind == "output"}
            if outputs:
                break
        return frozenset({*self.about.get("formats", ()), *outputs})

    @cached_property
    def steps_with_all_tensors(self) -> tuple[int, ...]:
        """The steps whose tensors all ranks were set to log, and logged."""
        every = self.keep.get("every", 1)
        # The head's schema does not hold `keep`: one that was edited must not divide by 0.
        every = every if isinstance(every, int) and every > 0 else 1
        return tuple(
            step for step in self.steps if step in self._complete_steps and step % every == 0
        )

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The steps that every rank has written completely."""
        step_sets = [set(steps) for steps in self.lines.values()]
        return tuple(sorted(set.intersection(*step_sets))) if step_sets else ()

    def entries(self, step: int) -> tuple[LoggedTensor, ...]:
        """Return the tensors of a step, in the order in which one rank alone would run them."""
        return self.put_together(self.parts(step))

    def put_together(self, parts: Iterable[LoggedPart]) -> tuple[LoggedTensor, ...]:
        """Return the tensors to which these parts belong, in order of execution."""
        by_name: dict[Name, dict[Any, list[LoggedPart]]] = defaultdict(lambda: defaultdict(list))
        for part in parts:
            by_name[part.record.name][without_replicas(part.record.placement)].append(part)
        entries = (
            entry
            for name, places in by_name.items()
            for entry in _whole_entries(name, list(places.values()))
        )
        return tuple(sorted(entries, key=lambda entry: self.order(entry.name)))

    def order(self, name: Name) -> Any:
        """Return the sorting key that puts tensors in order of execution: phase, microbatch, layer
        (reversed in backward), kind and name.
        """
        place = self._layers.get(name.layer, len(self._layers))
        order = -place if name.phase == "backward" else place
        if name.kind == "input":
            order = -1  # before the first layer
        return PHASES.index(name.phase), name.microbatch or 0, order, name.kind, name.tensor

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, in the order in which they first ran if the log shows it; else
        in the model's order.
        """
        # Layers that ran change places among themselves; those that never did keep theirs.
        names, ran = self.about.get("layers", ()), iter(run_order := self._ran())
        return tuple(next(ran) if layer in run_order else layer for layer in names)

    def _ran(self) -> list[str]:
        """Return the layers of which the first rank logged an output, in the order of the first
        logged step that has outputs.
        """
        model_layers, first = set(self.about.get("layers", ())), next(iter(self.lines.values()), {})
        for step in self.steps_with_all_tensors[:LOOKED]:
            names = [
                part.record.name for part in self._of(rank_folder(self.folder, 0), first[step])
            ]
            layers = dict.fromkeys(
                name.layer for name in names if (name.phase, name.kind) == ("forward", "output")
            )
            if layers:
                return [layer for layer in layers if layer in model_layers]
        return []

    @cached_property
    def _layers(self) -> dict[str, int]:
        return {layer: place for place, layer in enumerate(self.layers)}

    def parts(self, step: int) -> Iterator[LoggedPart]:
        """Yield the parts of tensors that the ranks logged in a step, rank by rank."""
        for folder, steps in self.lines.items():
            yield from self._of(folder, steps[step])

    def _of(self, folder: Path, line: LogLine) -> Iterator[LoggedPart]:
        content, where = line.read(), f"{folder / STEPS}: step {line.step}"
        yield from (
            LoggedPart(read_record(fields, line.step, where), folder, content.tensors)
            for fields in content.records
        )


def _whole_entries(name: Name, copies: Sequence[Sequence[LoggedPart]]) -> Iterator[LoggedTensor]:
    """Yield the tensor that `name` means, made of these parts and their copies. If ranks logged
    parts of tensors with different shapes under this name, such as microbatches of unequal length,
    yield one tensor for each shape.
    """
    wholes: dict[Any, list[Sequence[LoggedPart]]] = defaultdict(list)
    for parts in copies:
        wholes[parts[0].record.placement.whole].append(parts)
    for number, group in enumerate(wholes.values()):
        own = (
            name
            if len(wholes) == 1
            else name._replace(tensor=f"{name.tensor} {APART} {number}".strip())
        )
        yield LoggedTensor(
            own,
            tuple(parts[0] for parts in group),
            tuple(part for parts in group for part in parts[1:]),
        )


APART = "part"
"""Word that is put behind a tensor's name, with a number, if ranks logged tensors of different
shapes under this name.
"""


def without_replicas(placement: Placement) -> Any:
    """Return a placement without its `replicas`, so that copies of one part have equal results."""
    return replace(placement, replicas=())


def _scale_summary(summary: Summary, factor: float) -> Summary:
    low, high = (
        sorted((summary.low * factor, summary.high * factor))
        if summary.finite
        else (math.inf, -math.inf)
    )
    # not `factor**2`, which is an error where it is beyond a float
    total, squares = summary.total * factor, summary.squares * factor * factor
    return replace(summary, total=total, squares=squares, low=low, high=high)
