"""Logs: statistics and samples of tensors, written to the disk at the end of each step, so that a
killed process loses at most one step.

The folder of a run has one folder for each rank. The samples and whole tensors of a step go to a
safetensors file, which is written under another name and then renamed. After that, a line about the
step is added to `steps.jsonl`. An incomplete last line is ignored.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bridge.checkpoint.digests import digest_of
from bridge.errors import BridgeError, SourceError
from bridge.files.sealed import seal
from bridge.trace.invariants.sketch import on_host
from bridge.trace.placement import Placement
from bridge.trace.record import Name, Record, Unit
from bridge.trace.schema import FORMAT, RUN, SEAL, STEPS, rank_folder, read_lines
from bridge.trace.summary import SAMPLES, STATISTICS, Summary, measure_statistics, take_samples

HEADER = 80
"""Approximate number of bytes that each tensor takes in a file in addition to its values."""
MOST_THIN = 2**20
logger = logging.getLogger("bridge.trace")


@dataclass(frozen=True, slots=True)
class Seen:
    """A record of this step, whose statistics may still be on their way from the device to the
    host.
    """

    record: Record
    unit: Unit
    measured: Tensor | None
    tensors: Mapping[str, Tensor]


class Log:
    """The log of one rank. From level 3 on, it has samples of tensors, or, if `full` is true,
    whole tensors.

    If `budget` (in bytes) is set, half of it is used for logging every step, the next quarter for
    every second step, and so on. The log ends at the first step that does not fit.
    """

    def __init__(
        self,
        run: Path,
        rank: int,
        about: Mapping[str, Any] | None = None,
        full: bool = False,
        strict: bool = False,
        budget: int | None = None,
    ) -> None:
        self.budget, self._spent, self._thin = budget, 0, 1
        self.run, self.rank, self.folder, self.full, self.strict = (
            run,
            rank,
            rank_folder(run, rank),
            full,
            strict,
        )
        self._seen: list[Seen] = []
        self._open, self._first = True, True
        with self._end_log_on_error("nothing is logged"):
            self.folder.mkdir(parents=True, exist_ok=True)
            steps = self.folder / STEPS
            content = steps.read_bytes() if steps.exists() else b""
            # A kill may leave half a line; what is added behind it could not be read.
            if content and not content.endswith(b"\n"):
                os.truncate(steps, content.rfind(b"\n") + 1)
            if rank == 0:
                _publish_text(
                    run / RUN, seal({"format": FORMAT, "ranks": 1, **(about or {})}, indent=1)
                )

    @contextmanager
    def _end_log_on_error(self, consequence: str) -> Iterator[None]:
        """Context in which an error of writing ends the log. The error becomes a warning or, in a
        strict log, a `BridgeError`; `consequence` is a part of its message.
        """
        try:
            yield
        except (OSError, SafetensorError, SourceError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            problem = f"{self.folder}: {reason}; {consequence}; name a folder that can be written to, on a disk with space left"
            self._open = False
            self._seen.clear()
            if self.strict:
                raise BridgeError(problem) from None
            warnings.warn(problem, stacklevel=2)

    def add(
        self,
        name: Name,
        tensor: Tensor,
        placement: Placement,
        level: int,
        microbatch: int | None = None,
        unit: Unit = "own",
    ) -> None:
        """Record the present values of `tensor`, if `level` is at least 1. At the end of the step,
        `write` gets a factor for each unit, and converts the values by the factor for `unit`.
        """
        if level < 1 or not self._open:
            return
        dtype, device = str(tensor.dtype).removeprefix("torch."), str(tensor.device)
        # The factor is 1 until the step ends, when it is known.
        record = Record(name, microbatch, dtype, device, level, placement, 1.0, None)
        statistics = measure_statistics(tensor) if level >= STATISTICS else None
        self._seen.append(
            Seen(record, unit, statistics, self._samples_to_store(tensor, placement, level))
        )

    def forget(self, choose: Callable[[Sequence[Seen]], Collection[int]]) -> None:
        """Drop some tensors of this step: `choose` gets all of them, and returns the indices of
        those to drop.
        """
        indices = choose(self._seen)
        self._seen = [part for at, part in enumerate(self._seen) if at not in indices]

    def _samples_to_store(
        self, tensor: Tensor, placement: Placement, level: int
    ) -> dict[str, Tensor]:
        if level < SAMPLES:
            return {}
        if self.full:
            return {"full": tensor.detach().reshape(-1).clone()}
        numbers, values = take_samples(tensor, placement, level)
        return {"numbers": numbers, "samples": values} if len(numbers) else {}

    def write(
        self,
        step: int,
        factors: Mapping[Unit, float] | None = None,
        alone: bool = False,
        loss: float | None = None,
        clip: float | None = None,
        modes: Mapping[str, list[str]] | None = None,
    ) -> None:
        """Write the records of `step` to the disk.

        `factors` has a factor for each unit, which converts gradients into those of the step's mean
        loss. `alone` is true if the step had a single microbatch. Then the names of tensors leave
        out the number of the microbatch. `loss` is the loss from which backward started, and `clip`
        the factor by which clipping multiplied all gradients, if they are known. `modes` are the
        names of modules in evaluation mode and of frozen parameters, if they have changed.
        """
        # Also once the log has ended: nothing may pile up.
        parts, self._seen = self._seen, []
        if not self._open:
            return
        tensors: dict[str, Tensor] = {}
        statistics = _measure_all(parts)
        records = [
            _finish_record(index, part, statistics.get(index), tensors, factors or {}, alone)
            for index, part in enumerate(parts)
        ]
        with self._end_log_on_error(f"the log of this rank ends before step {step}"):
            if self._first:
                # Not before the first step: only it tells where this run goes on.
                _drop_from(self.run, self.rank, step)
                self._first = False
                if self.budget:
                    self._spent = sum(path.stat().st_size for path in self.folder.iterdir())
            line: dict[str, Any] = {
                "step": step,
                "rank": self.rank,
                "records": [record.fields() for record in records],
            }
            line |= {"tensors": None, "loss": loss, "clip": clip}
            line |= {"modes": modes} if modes else {}
            substitute = self._entries_over_budget(step, line, tensors) if self.budget else {}
            if substitute:
                line |= {"records": [], **substitute}
            elif tensors:
                # Before the line: a line that is there has its tensors.
                line["tensors"] = _publish_tensors(self.folder / f"{step:08d}.safetensors", tensors)
            self._spent += _append_line(self.folder / STEPS, seal(line))
            self._open = not substitute.get("stopped", False)

    def keeps(self, step: int) -> bool:
        """Return whether the budget still allows the tensors of a step, as far as this is known
        before the step.
        """
        return self._open and step % self._thin == 0

    def _entries_over_budget(
        self, step: int, line: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """If the budget does not allow the tensors of a step, return the entries that replace the
        records in the step's line. Otherwise return an empty result.
        """
        assert self.budget is not None, "expected a budget"
        if step % self._thin:
            return {"left": "budget"}
        tensor_bytes = sum(
            tensor.numel() * tensor.element_size() for tensor in tensors.values()
        ) + HEADER * len(tensors)
        size = tensor_bytes + len(json.dumps(line)) + SEAL
        if self._spent + size > self.budget:
            self._say(
                f"the log ends: step {step} does not fit into the {self.budget} bytes that rank {self.rank} may write"
            )
            return {"left": "budget", "stopped": True}
        self._spent += tensor_bytes
        # Up to 1/2 of the budget every step, up to 3/4 every second, up to 7/8 every fourth.
        while (
            self._spent + size > self.budget * (1 - 1 / (2 * self._thin)) and self._thin < MOST_THIN
        ):
            self._thin *= 2
            self._say(
                f"after step {step}, only one of every {self._thin} steps is logged: rank "
                f"{self.rank} may write {self.budget} bytes"
            )
        return {}

    def _say(self, what: str) -> None:
        if self.rank == 0 or "ends" in what:
            logger.warning("%s: %s", self.run, what)


def _measure_all(parts: Sequence[Seen]) -> dict[int, Tensor]:
    """Return the statistics of tensors on the CPU, by position."""
    statistics = {at: part.measured for at, part in enumerate(parts) if part.measured is not None}
    return (
        dict(zip(statistics, on_host(list(statistics.values())), strict=True)) if statistics else {}
    )


def _finish_record(
    index: int,
    part: Seen,
    statistics: Tensor | None,
    tensors: dict[str, Tensor],
    factors: Mapping[Unit, float],
    alone: bool,
) -> Record:
    keys = {kind: f"{index}.{kind}" for kind in part.tensors}
    tensors.update((keys[kind], tensor.cpu()) for kind, tensor in part.tensors.items())
    name = part.record.name
    return replace(
        part.record,
        name=name._replace(microbatch=None) if alone else name,
        factor=factors.get(part.unit, 1.0),
        summary=None if statistics is None else Summary.of(statistics),
        samples=keys.get("samples"),
        full=keys.get("full"),
    )


def _publish_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors into a file that appears complete or not at all. Returns the digest of the
    file.
    """
    beside = path.with_suffix(".tmp")
    save_file(tensors, beside)
    digest = digest_of(beside)
    _replace_file(beside, path)
    return digest


def _publish_text(path: Path, text: str) -> None:
    beside = path.with_suffix(".tmp")
    beside.write_text(text)
    _replace_file(beside, path)


def _replace_file(beside: Path, path: Path) -> None:
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    beside.replace(path)


def _append_line(path: Path, line: str) -> int:
    """Append a line to a file, and wait until it is on the disk. Returns the number of bytes
    added.
    """
    with path.open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    return len(line) + 1


def _drop_from(run: Path, rank: int, step: int) -> None:
    """Delete the lines of step `step` and of later steps, which an earlier run wrote, or this run
    before it was resumed.
    """
    path = rank_folder(run, rank) / STEPS
    if path.exists():
        text = path.read_text()
        lines = zip(text.splitlines(), read_lines(run, rank, sealed=True), strict=True)
        _publish_text(path, "".join(f"{content}\n" for content, line in lines if line.step < step))
