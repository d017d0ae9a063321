"""Following: reading the steps and findings of a run while it trains, each exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bridge.errors import SourceError
from bridge.trace.columns import ColumnReader, Columns
from bridge.trace.findings import FILE
from bridge.trace.pages.series import CLIPPED, FindingOfFile, Reading, one_finding
from bridge.trace.run import TracedRun
from bridge.trace.schema import RUN, STEPS, UNSEALED, LogLine, rank_folder, read_head, read_lines


@dataclass(frozen=True, slots=True)
class Step:
    """A step that all ranks have written. `loss` is the mean over ranks (None: not in the log),
    and `norms` has the norm of all tensors of a kind, by kind.
    """

    number: int
    loss: float | None
    norms: dict[str, float]
    left: bool
    """Whether the step's tensors were left out because the log's budget is used up."""


@dataclass
class Follower:
    """Reader for a run in `folder`: each call of `new` yields the steps and findings that were
    added since the last call.
    """

    folder: Path
    _run: TracedRun | None = None
    _reader: ColumnReader | None = None
    _at: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """For the folder of each rank, how much of its log was read so far: the number of bytes, and
    the number of lines.
    """
    _told: int = 0
    _readings: dict[int, Reading] = field(default_factory=dict)

    def new(self) -> Iterator[Step | FindingOfFile]:
        """Yield the steps and findings that were added since the last call. The findings of a step
        come before the step.

        Raises `SourceError` if a file cannot be read or is damaged.
        """
        findings = list(self._findings())
        for step in self._steps():
            yield from (finding for finding in findings if finding.step <= step.number)
            findings = [finding for finding in findings if finding.step > step.number]
            yield step
        yield from findings

    def _findings(self) -> Iterator[FindingOfFile]:
        path = self.folder / FILE
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise SourceError(
                f"{path}: {error.strerror}; expected a file that can be read"
            ) from None
        # A line that is still being written is left for the next time.
        end = content.rfind(b"\n") + 1
        # A shorter file belongs to another run.
        self._told = self._told if end >= self._told else 0
        for line in content[self._told : end].split(b"\n")[:-1]:
            yield one_finding(line.decode(errors="replace"), str(path))
        self._told = end

    def _steps(self) -> Iterator[Step]:
        if self._run is None and not (self.folder / RUN).exists():
            return
        # A log that is shorter than what was read of it is that of another run in this folder.
        logs = {place / STEPS: read for place, (read, _) in self._at.items()}
        anew = any(read > (log.stat().st_size if log.exists() else 0) for log, read in logs.items())
        if self._run is None or anew:
            about = read_head(self.folder)
            ranks = [rank_folder(self.folder, rank) for rank in range(about["ranks"])]
            self._run = TracedRun(self.folder, about, {rank: {} for rank in ranks})
            self._reader, self._at, self._readings = (
                ColumnReader(self._run),
                dict.fromkeys(ranks, (0, 0)),
                {},
            )
        lines = {place: dict(steps) for place, steps in self._run.lines.items()}
        for rank, place in enumerate(lines):
            for line in read_lines(
                self.folder, rank, self._run.about["format"] != UNSEALED, *self._at[place]
            ):
                self._at[place] = line.begin + line.size + 1, self._at[place][1] + 1
                self._of(place)[line.step] = line
        # A step is there once all ranks have written it.
        for step in sorted(set.intersection(*(set(steps) for steps in self._run.lines.values()))):
            yield self._step(step)
            for steps in self._run.lines.values():
                # A training may run for weeks: steps that were told are forgotten.
                del steps[step]  # type: ignore[attr-defined]

    def _of(self, place: Path) -> dict[int, LogLine]:
        assert self._run is not None, "expected a folder in which a run was found"
        lines = self._run.lines[place]
        assert isinstance(lines, dict), "made by a follower"
        return lines

    def _step(self, step: int) -> Step:
        assert self._run is not None and self._reader is not None, (
            "expected a folder in which a run was found"
        )
        without_tensors = any(steps[step].left for steps in self._run.lines.values())
        columns: Columns = self._reader.columns(step)
        pattern = columns.pattern
        if id(pattern) not in self._readings:
            # Norms are asked for alone, so it maps no layer. It holds the pattern, and so its id.
            self._readings[id(pattern)] = Reading(pattern, {}, 0, ("", ""))
        losses = [loss for loss in columns.losses if loss is not None]
        norms = self._readings[id(pattern)].norms(columns)
        if columns.clip == 1:
            norms.pop(CLIPPED, None)
        return Step(step, float(np.mean(losses)) if losses else None, norms, without_tensors)


def step_text(step: Step) -> str:
    """Return a line of text about a step: its number, loss and norms."""
    parts = [] if step.loss is None else [f"loss {step.loss:.6g}"]
    parts += [
        f"norm of {name} {'NaN or infinite' if math.isnan(norm) else f'{norm:.6g}'}"
        for name, norm in step.norms.items()
    ]
    parts += (
        ["tensors of this step are not logged, because the log's budget is used up"]
        if step.left
        else []
    )
    return f"step {step.number}: {', '.join(parts) or 'no loss and no norm in the log'}"
