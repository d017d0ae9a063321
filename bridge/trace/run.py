"""Runs: the logs of all ranks of one training, put together to whole tensors."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from bridge.errors import SourceError
from bridge.trace.log import RUN, STEPS, lines_of, rank_folder
from bridge.trace.placement import Placement
from bridge.trace.record import PHASES, Name, Record
from bridge.trace.summary import Summary, sampled


@dataclass(frozen=True)
class Part:
    """A record with the folder of its rank."""

    record: Record
    folder: Path

    def tensor(self, key: str | None) -> Tensor | None:
        """What was kept under that key, in fp64."""
        if key is None:
            return None
        path = self.folder / f"{self.record.name.step:08d}.safetensors"
        found: Tensor = _opened(path, path.stat().st_mtime_ns).get_tensor(key)
        return found.double()


@lru_cache(maxsize=128)
def _opened(path: Path, written: int) -> Any:
    """A file whose list of tensors is read once; `written`, its time, tells it from a later one of that name."""
    return safe_open(path, "pt")


@dataclass(frozen=True)
class Entry:
    """One tensor of a step, as the parts that were logged of it, each once; values are in the unit that all layouts share."""

    name: Name
    parts: tuple[Part, ...]

    @property
    def first(self) -> Record:
        """A record of it, for what all parts have alike."""
        return self.parts[0].record

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return self.first.placement.whole

    @property
    def missing(self) -> int:
        """Elements of which no rank logged anything."""
        return prod(self.shape) - sum(part.record.placement.count for part in self.parts)

    @cached_property
    def summary(self) -> Summary | None:
        """Of all parts; None below level 2."""
        found = [_scaled(part.record.summary, part.record.factor) for part in self.parts if part.record.summary]
        return Summary.merged(found) if found else None

    @cached_property
    def samples(self) -> Tensor | None:
        """fp64 samples of the whole, NaN where a rank's are missing; None below level 3."""
        if self.whole is not None:
            return self.whole.reshape(-1)[sampled(self.shape, self.first.level)]
        found = [part for part in self.parts if part.record.samples]
        if not found:
            return None
        samples = torch.full((len(sampled(self.shape, self.first.level)),), math.nan, dtype=torch.float64)
        for part in found:
            values, numbers = part.tensor(part.record.samples), part.tensor(_numbers(part.record))
            assert values is not None and numbers is not None, "samples are written with their numbers"
            samples[numbers.long()] = values * part.record.factor
        return samples

    @cached_property
    def whole(self) -> Tensor | None:
        """All of it in fp64, NaN where a rank's part is missing; None unless whole tensors were kept."""
        if not any(part.record.full for part in self.parts):
            return None
        flat = torch.full((prod(self.shape),), math.nan, dtype=torch.float64)
        for part in self.parts:
            if (values := part.tensor(part.record.full)) is not None:
                flat[part.record.placement.places()] = values * part.record.factor
        return flat.view(self.shape)

    def microbatches(self) -> dict[int, Summary]:
        """The summary of each microbatch apart."""
        found: dict[int, list[Summary]] = defaultdict(list)
        for part in self.parts:
            if part.record.microbatch is not None and part.record.summary:
                found[part.record.microbatch].append(_scaled(part.record.summary, part.record.factor))
        return {index: Summary.merged(summaries) for index, summaries in sorted(found.items())}


@dataclass(frozen=True)
class Run:
    """A run's folder; steps whose line is whole on every rank can be read while it goes on."""

    folder: Path
    about: Mapping[str, Any]
    lines: Mapping[Path, Mapping[int, Sequence[Mapping[str, Any]]]]

    @classmethod
    def read(cls, folder: str | Path) -> Run:
        """Raises `SourceError` if that is no run."""
        path = Path(folder)
        try:
            about = json.loads((path / RUN).read_text())
        except (OSError, json.JSONDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"{RUN} is not whole"
            raise SourceError(f"{path}: {reason}; expected the folder of a traced run, with {RUN} in it") from None
        ranks = [folder / STEPS for folder in (rank_folder(path, rank) for rank in range(about["ranks"]))]
        return cls(path, about, {rank.parent: {line["step"]: line["records"] for line in lines_of(rank)} for rank in ranks})

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Steps that every rank has written."""
        written = [set(steps) for steps in self.lines.values()]
        return tuple(sorted(set.intersection(*written))) if written else ()

    def entries(self, step: int) -> tuple[Entry, ...]:
        """The tensors of a step, in the order in which a run on one rank would come across them."""
        found: dict[Name, dict[Any, Part]] = defaultdict(dict)
        for part in self._parts(step):
            found[part.record.name].setdefault(_place(part.record.placement), part)
        return tuple(Entry(name, tuple(found[name].values())) for name in sorted(found, key=self._order))

    def _order(self, name: Name) -> Any:
        """Phase, microbatch, layer (in backward from the last to the first), and then by name."""
        place = self._layers.get(name.layer, len(self._layers))
        order = -place if name.phase == "backward" else place
        return PHASES.index(name.phase), name.microbatch or 0, order, name.kind, name.tensor

    @cached_property
    def _layers(self) -> dict[str, int]:
        return {layer: place for place, layer in enumerate(self.about.get("layers", ()))}

    def _parts(self, step: int) -> Iterator[Part]:
        for folder, steps in self.lines.items():
            yield from (Part(Record.of(fields), folder) for fields in steps[step])


def _place(placement: Placement) -> Any:
    """What tells parts from replicas of them."""
    return replace(placement, replicas=())


def _scaled(summary: Summary, factor: float) -> Summary:
    low, high = sorted((summary.low * factor, summary.high * factor)) if summary.finite else (math.inf, -math.inf)
    total, squares = summary.total * factor, summary.squares * factor**2
    return replace(summary, total=total, squares=squares, low=low, high=high)


def _numbers(record: Record) -> str:
    assert record.samples is not None, "asked only where there are samples"
    return record.samples.removesuffix("samples") + "numbers"


def named(entries: Iterable[Entry]) -> dict[Name, Entry]:
    """By name."""
    return {entry.name: entry for entry in entries}
