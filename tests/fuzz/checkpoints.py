"""A checkpoint of two ranks, all that it says, and what may come of reading one that was changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from bridge.checkpoint import digests, stored_parts
from bridge.checkpoint.folder_lock import Saving, find_folder
from bridge.checkpoint.native_format import Checkpoint, file_of
from bridge.checkpoint.stored_parts import LocalBox
from tests.fuzz.exercise import Tally
from tests.fuzz.folders import Folder

RANKS = 2
STATE = {
    "format": 2,
    "world": RANKS,
    "seed": 1,
    "progress": {
        "steps": 3,
        "skipped": 0,
        "samples": 24,
        "loss": 1.5,
        "grad_norm": float("nan"),
        "lr": 0.1,
    },
    "scaler": {
        "scale": 1.0,
        "window": None,
        "hysteresis": 1,
        "minimum": 1.0,
        "good": 0,
        "tolerated": 0,
    },
    "client": {"epoch": 3, "deepspeed": {"groups": [{"lr": 0.1}]}},
    "copies": (2, 1),
    "tensors": {
        "weights/a": (4, 3),
        "weights/b": (),
        "exp_avg/a": (4, 3),
        "generators/0": (8,),
        "generators/1": (8,),
    },
}


def held(rank: int) -> list[LocalBox]:
    """What a rank writes: rows of the one, all of what is small."""
    rows, generator = (
        torch.arange(6.0).view(2, 3) + 6 * rank,
        torch.arange(8, dtype=torch.uint8) + rank,
    )
    found = [
        LocalBox(f"{kind}/a", (4, 3), (2 * rank, 0), rows.clone())
        for kind in ("weights", "exp_avg")
    ]
    scalar = [LocalBox("weights/b", (), (), torch.tensor(2.0))] if rank == 0 else []
    return [*found, *scalar, LocalBox(f"generators/{rank}", (8,), (0,), generator)]


def written(root: Path) -> None:
    """A checkpoint of two ranks."""
    saving = Saving.begin(root, "step3")
    for rank in range(RANKS):
        stored_parts.write_parts(saving.temporary / file_of(rank), held(rank))
    text = json.dumps(STATE, indent=1)
    sums = {
        file_of(rank): digests.digest_of(saving.temporary / file_of(rank)) for rank in range(RANKS)
    }
    sums["state.json"] = digests.digest_of_text(text)
    saving.publish({"state.json": text, digests.SUMS: digests.text_of(sums)}, latest=True)


def read(root: Path) -> dict[str, Any]:
    """All that a checkpoint says."""
    checkpoint = Checkpoint.open(find_folder(root, None), root)
    checkpoint.verify()
    saved = checkpoint.tensors()
    found: dict[str, Any] = {"state": repr(checkpoint.state)}
    for name, stored in saved.items():
        for part in stored:
            whole = part.read([])
            assert tuple(whole.shape) == part.box.sizes
        shape = checkpoint.state.tensors[name]
        if stored:
            room = torch.empty(shape, dtype=whole.dtype)
            stored_parts.fill_parts([LocalBox(name, shape, (0,) * len(shape), room)], saved)
            found[name] = room.tolist()
    return found


def seal(root: Path) -> None:
    """Digests of the files as they are now."""
    folder = root / "step3"
    names = [path.name for path in folder.iterdir() if path.is_file() and path.name != digests.SUMS]
    if (folder / digests.SUMS).is_file():
        (folder / digests.SUMS).write_text(
            digests.text_of({name: digests.digest_of(folder / name) for name in names})
        )


def prepared(scratch: Path) -> Callable[[Random, Tally], None]:
    """One input below `scratch`: files changed, read as they were written or refused, and put back."""
    root = scratch / "saved"
    written(root)
    expected, folder = read(root), Folder(root, scratch)

    return folder.reads(lambda: read(root), lambda found: found == expected, seal)
