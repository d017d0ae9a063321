"""Series: the data of a run's page. For each step, they are the loss, the norms of all tensors of
a kind, and the norm in each layer on each rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge.errors import SourceError
from bridge.files.contained import path_inside, read_text
from bridge.trace.columns import ColumnReader, Columns, Gathering, Pattern
from bridge.trace.findings import FILE, MEANINGS
from bridge.trace.run import TracedRun
from bridge.trace.schema import RUN
from bridge.trace.segments import Floats, Places
from bridge.trace.tensor_pairs import phase_and_kind

SECTIONS = (("reduce", "gradient"), ("forward", "output"), ("update", "weight"))
"""The phases and kinds of the tensors whose norms a page shows. The map of layers shows the first
of these kinds that was logged.
"""
WORDS: Mapping[tuple[str, str], str] = {
    ("reduce", "gradient"): "gradients",
    ("forward", "output"): "outputs",
    ("update", "weight"): "weights",
    ("init", "weight"): "weights",
}
CLIPPED, USED = "clipped gradients", "gradients in the update"
"""What gradients are called after clipping; and if it is unknown whether they were clipped."""
MOST_RANKS = 64
"""Maximum number of ranks that a page shows. Of more ranks, it shows the first ones."""
MOST_FINDINGS = 2**26
"""Maximum number of bytes in the file of findings."""


@dataclass(frozen=True)
class FindingOfFile:
    """A finding that was read from the file of findings."""

    id: str
    step: int
    where: str
    evidence: str
    ranks: tuple[int, ...]
    severity: str
    meaning: str


@dataclass(frozen=True)
class Series:
    """The data of a run's page: `losses` (steps, ranks), and for each kind of tensor (gradients,
    outputs, weights) the norms of all tensors (steps).

    `mapped` is the first of these kinds that was logged, and `sizes` are the norms of its tensors
    in each layer (ranks, layers, steps). NaN stands for values that are not in the log.
    """

    folder: Path
    run: TracedRun | None
    steps: Sequence[int]
    layers: Sequence[str]
    losses: Floats
    norms: Mapping[str, Floats]
    mapped: str
    sizes: Floats
    odd: Floats
    """How many NaNs and infinities the tensors of `sizes` have (ranks, layers, steps)."""
    findings: Sequence[FindingOfFile]


def read_findings(folder: Path) -> list[FindingOfFile]:
    """Read the findings of a run from its file `findings.jsonl`. Raises `SourceError` if the file
    is damaged.
    """
    path = folder / FILE
    if not path_inside(path, folder).exists():
        return []
    whole = read_text(path, folder, MOST_FINDINGS).split("\n")[:-1]
    return [one_finding(line, f"{path}:{number}") for number, line in enumerate(whole, 1)]


def one_finding(line: str, where: str) -> FindingOfFile:
    """Return the finding in a line of the file of findings. Raises `SourceError` if the line is
    damaged; `where` is the place in the message.
    """
    try:
        fields = json.loads(line)
        entry = MEANINGS.get(fields["id"])
        meaning, severity = (
            (entry.text, entry.severity)
            if entry
            else (str(fields["meaning"]), str(fields["severity"]))
        )
        ranks = tuple(int(rank) for rank in fields["ranks"])
        return FindingOfFile(
            str(fields["id"]),
            int(fields["step"]),
            str(fields["where"]),
            str(fields["evidence"]),
            ranks,
            severity,
            meaning,
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SourceError(
            f"{where}: expected a finding with id, step, where, evidence and ranks; the file is damaged"
        ) from None


def read_series(folder: Path) -> Series:
    """Return the data of the page of the run in `folder`. Raises `SourceError` if the folder has
    neither a log nor findings.
    """
    findings = read_findings(folder) if folder.is_dir() else []
    if not (folder / RUN).exists():
        if not findings:
            raise SourceError(
                f"{folder}: expected the folder of a traced run, with {RUN} or {FILE} in it"
            )
        none = np.zeros((0, 0))
        return Series(
            folder, None, (), (), none, {}, "", np.zeros((0, 0, 0)), np.zeros((0, 0, 0)), findings
        )
    return series_of_run(TracedRun.read(folder), findings)


def series_of_run(run: TracedRun, findings: Sequence[FindingOfFile]) -> Series:
    """Return the data of the page of a run that has a log; `findings` are its findings."""
    reader, ranks = ColumnReader(run), min(len(run.lines), MOST_RANKS)
    layers = list(run.layers)
    places = {layer: at for at, layer in enumerate(layers)}
    # The last step tells which section a map shows: the first one may have weights alone.
    last = (
        {phase_and_kind(entry.name) for entry in run.entries(run.steps[-1])} if run.steps else set()
    )
    section = next((name for name in SECTIONS if name in last), ("", ""))
    shape = ranks, len(layers), len(run.steps)
    losses, norms = (
        np.full((len(run.steps), ranks), np.nan),
        {
            name: np.full(len(run.steps), np.nan)
            for name in ("gradients", CLIPPED, USED, "outputs", "weights")
        },
    )
    sizes, odd, clips = np.full(shape, np.nan), np.zeros(shape), np.full(len(run.steps), np.nan)
    readings: dict[int, Reading] = {}
    for at, step in enumerate(run.steps):
        columns = reader.columns(step)
        # A reading holds its pattern, so that no other pattern gets its id.
        reading = readings.setdefault(
            id(columns.pattern), Reading(columns.pattern, places, ranks, section)
        )
        losses[at] = [np.nan if loss is None else loss for loss in columns.losses[:ranks]]
        for name, norm in reading.norms(columns).items():
            norms[name][at] = norm
        reading.sizes(columns, sizes[:, :, at], odd[:, :, at])
        clips[at] = columns.clip or np.nan
    curves = {name: values for name, values in norms.items() if not np.isnan(values).all()}
    if np.array_equal(norms["gradients"], norms[CLIPPED], equal_nan=True):
        curves.pop(CLIPPED, None)  # nothing was clipped
    map_name = WORDS.get(section, "")
    if map_name == "gradients":
        map_name = USED if USED in curves else map_name
        sizes /= 1.0 if USED in curves else clips
    return Series(
        run.folder, run, run.steps, layers, losses, curves, map_name, sizes, odd, findings
    )


class Reading:
    """Computes norms and cells of the map from the statistics of steps that have the same pattern."""

    def __init__(
        self, pattern: Pattern, layers: Mapping[str, int], ranks: int, section: tuple[str, str]
    ) -> None:
        self.pattern = pattern
        parts = {
            name: [entry for entry in pattern.entries if phase_and_kind(entry.name) == name]
            for name in WORDS
        }
        self._gatherings = [
            (WORDS[name], Gathering(entries, pattern)) for name, entries in parts.items() if entries
        ]
        rows = [
            (pattern.rows[id(part)], part.rank, layers[entry.name.layer])
            for entry in parts.get(section, [])
            for part in (*entry.parts, *entry.replicas)
            if part.record.summary and part.rank < ranks and entry.name.layer in layers
        ]
        self._rows, self._ranks, self._layers = (
            np.array([one[at] for one in rows], np.int64) for at in range(3)
        )

    def norms(self, columns: Columns) -> dict[str, float]:
        """Return the norm of all tensors of each kind; NaN if one of them has NaNs or infinities.

        Gradients are logged as the update gets them. Their norm before clipping follows from the
        factor of clipping, if it is known.
        """
        with np.errstate(all="ignore"):
            values = {
                name: float(np.sqrt(figures[:, 4].sum())) if not figures[:, 1:3].any() else np.nan
                for name, gathering in self._gatherings
                if gathering.told.any()
                for figures in [gathering.figures(columns)]
            }
        used, clip = values.pop("gradients", None), columns.clip
        if used is None:
            return values
        return (
            {USED: used} if clip is None else {"gradients": used / clip, CLIPPED: used}
        ) | values

    def sizes(self, columns: Columns, sizes: Any, odd: Any) -> None:
        """Write the norms of a step into `sizes` and the numbers of NaNs and infinities into
        `odd`, by rank and layer.
        """
        where: tuple[Places, Places] = (self._ranks, self._layers)
        if not len(self._rows):
            return
        squares, bad = np.zeros(sizes.shape), np.zeros(sizes.shape)
        # Several parts may go to one place, of which `squares[where] +=` would add one.
        np.add.at(squares, where, columns.figures[self._rows, 4])
        np.add.at(bad, where, columns.figures[self._rows, 1:3].sum(axis=1))
        some = np.zeros(sizes.shape, bool)
        some[where] = True
        with np.errstate(all="ignore"):
            sizes[some] = np.sqrt(squares[some])
        odd[...] = bad
