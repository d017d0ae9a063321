"""Checkpoints of Trainer, accelerate, Lightning and torch, whose files are changed: read and converted, or refused."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file

from tests.fuzz.converted import TRUE, converted, weights
from tests.fuzz.exercise import Tally
from tests.fuzz.folders import Folder

TARGETS = ("native", "dcp", "deepspeed", "trainer", "bin")


def _states(held: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What torch's AdamW, with its parameters in two groups, and a scheduler say of a run of some steps."""
    rows = [number for number, weight in enumerate(held.values()) if weight.ndim > 1]
    flat = [number for number in range(len(held)) if number not in rows]
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False}
    state = {
        number: {"step": torch.tensor(3.0), "exp_avg": weight / 2, "exp_avg_sq": weight**2}
        for number, weight in enumerate(held.values())
    }
    groups = [
        {**settings, "weight_decay": decay, "params": params}
        for decay, params in ((0.1, rows), (0.0, flat))
    ]
    schedule = {"base_lrs": [0.1, 0.1], "last_epoch": 3, "_last_lr": [0.1, 0.1]}
    return {"state": state, "param_groups": groups}, schedule


def _trainer(folder: Path, ends: str) -> None:
    """A folder of the Trainer (`pt`) or of accelerate (`bin`)."""
    held = weights(1)
    optimizer, schedule = _states(held)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    torch.save(optimizer, folder / f"optimizer.{ends}")
    torch.save(schedule, folder / f"scheduler.{ends}")
    random = {"cpu": torch.get_rng_state(), "python": (3, (1, 2, 3), None)}
    torch.save(random, folder / ("rng_state.pth" if ends == "pt" else "random_states_0.pkl"))
    (folder / "config.json").write_text(json.dumps(TRUE))
    if ends == "pt":
        said = {"global_step": 3, "epoch": 0.5, "max_steps": 10, "log_history": [{"loss": 2.5}]}
        (folder / "trainer_state.json").write_text(json.dumps(said))


def _file(folder: Path, lightning: bool) -> None:
    held = weights(1)
    optimizer, schedule = _states(held)
    run: dict[str, Any] = {"model": held, "optimizer": optimizer, "scheduler": schedule, "epoch": 3}
    if lightning:
        run = {
            "state_dict": {f"model.{name}": weight for name, weight in held.items()},
            "optimizer_states": [optimizer],
            "lr_schedulers": [schedule],
            "global_step": 3,
            "pytorch-lightning_version": "2.5.5",
        }
    torch.save(run, folder / "run.ckpt")


MAKERS: dict[str, Callable[[Path], None]] = {
    "trainer": lambda folder: _trainer(folder, "pt"),
    "accelerate": lambda folder: _trainer(folder, "bin"),
    "file": lambda folder: _file(folder, False),
    "lightning": lambda folder: _file(folder, True),
}


def tools(scratch: Path) -> Callable[[Random, Tally], None]:
    """A folder with changed files is converted, or refused in words; nothing of it is executed."""
    folders = {}
    for name, make in MAKERS.items():
        root = scratch / name
        root.mkdir()
        make(root)
        folders[name] = Folder(root, scratch)
    output = scratch / "out"

    def one(random: Random, tally: Tally) -> None:
        name, to = random.choice(sorted(folders)), random.choice(TARGETS)
        folder = folders[name]
        source = folder.root / "run.ckpt" if name in ("file", "lightning") else folder.root
        start = time.process_time()
        with folder.mutated(random, lambda root: None):
            code, said = converted(source, to, output)
        assert "Traceback" not in said and said.strip()
        # A code of 2 is a conversion that loses something, and says so.
        assert output.exists() is (code != 1), f"{name} to {to}: {code}: {said}"
        tally["accepted" if code != 1 else "refused"] += 1
        if output.exists():
            shutil.rmtree(output)
        tally.took(start)

    return one
