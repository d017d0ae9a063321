"""A trace log of two ranks, all that it says, and what may come of reading one that was changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from bridge.checkpoint.digests import digest_of
from bridge.files.sealed import seal as sealed
from bridge.trace.log import Log
from bridge.trace.placement import Placement
from bridge.trace.record import Name
from bridge.trace.run import TracedRun
from bridge.trace.run_comparison import compare_runs
from tests.fuzz.exercise import Tally
from tests.fuzz.folders import Folder

ABOUT = {
    "ranks": 2,
    "engine": "native",
    "layers": ["a", "b"],
    "mesh": {"data": 2},
    "accumulation": 1,
    "formats": ["float32"],
    "settings": {
        "optimizer.name": "adamw",
        "optimizer.betas": "(0.9, 0.99)",
        "optimizer.eps": 1e-8,
    },
}


def written(root: Path) -> None:
    """A run of two ranks and two steps: samples, whole tensors, statistics."""
    for rank in range(2):
        log, whole = Log(root, rank, ABOUT), Log(root, rank, ABOUT, full=True)
        place = Placement.box((4, 3), (2 * rank, 0), (2, 3))
        for step in range(2):
            each = whole if step == 1 else log
            each.add(
                Name(step, "forward", "a", None, "output"),
                torch.arange(6.0).view(2, 3) + rank + step,
                place,
                6,
                0,
            )
            each.add(
                Name(step, "reduce", "b", None, "gradient", "w"),
                torch.ones(3) * step,
                Placement.full((3,), ("data",)),
                5,
            )
            each.add(
                Name(step, "update", "b", None, "weight", "w"),
                torch.ones(3) / 3,
                Placement.full((3,), ("data",)),
                2,
            )
            each._first = each._first and step == 0
            each.write(step)


def read(root: Path) -> dict[int, Any]:
    """All that a run says, step by step."""
    run = TracedRun.read(root)
    found: dict[int, Any] = {}
    for step in run.steps:
        found[step] = [
            (
                str(entry.name),
                entry.shape,
                entry.missing,
                entry.summary,
                _list(entry.samples),
                _list(entry.whole),
            )
            for entry in run.entries(step)
        ]
    if run.steps:
        compare_runs(run, run)
    return found


def _list(values: Any) -> Any:
    return None if values is None else repr(values.tolist())


def seal(root: Path) -> None:
    """Digests of what is there now, wherever it still is JSON."""
    for path in (root / "run.json", *root.rglob("steps.jsonl")):
        if path.is_file():
            lines = (
                [path.read_bytes()] if path.suffix == ".json" else path.read_bytes().split(b"\n")
            )
            path.write_bytes(b"\n".join(_sealed(line, path.parent) for line in lines))


def _sealed(line: bytes, folder: Path) -> bytes:
    try:
        found = json.loads(line)
        found.pop("digest")
        if isinstance(found.get("tensors"), str):
            path = folder / f"{found['step']:08d}.safetensors"
            found["tensors"] = digest_of(path) if path.is_file() else found["tensors"]
        return sealed(found).encode()
    except (ValueError, KeyError, AttributeError, TypeError, OSError):
        return line


def prepared(scratch: Path) -> Callable[[Random, Tally], None]:
    """One input below `scratch`: files changed, read as they were written or refused, and put back."""
    root = scratch / "run"
    written(root)
    expected, folder = read(root), Folder(root, scratch)

    def same(found: Any) -> bool:
        return all(entries == expected.get(step) for step, entries in found.items())

    return folder.reads(lambda: read(root), same, seal)
