"""Export of a run's log as scalars for TensorBoard, or for Weights & Biases offline."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.files.printable import clean
from bridge.trace.pages.series import Series

Step = tuple[int, dict[str, float]]


def scalars_by_step(series: Series) -> Iterator[Step]:
    """Yield for each step the loss, the norms of all gradients, outputs and weights, and each
    layer's largest norm.
    """
    for at, step in enumerate(series.steps):
        losses = series.losses[at][~np.isnan(series.losses[at])]
        values = {"loss": float(losses.mean())} if len(losses) else {}
        values |= {
            f"norm/{name}": float(norm[at])
            for name, norm in series.norms.items()
            if not np.isnan(norm[at])
        }
        for layer, sizes in zip(series.layers, series.sizes[:, :, at].T, strict=True):
            if not np.isnan(sizes).all():
                values[f"{series.mapped}/{clean(layer)}"] = float(np.nanmax(sizes))
        if values:
            yield step, values


def write_tensorboard(series: Series, folder: Path) -> int:
    """Write event files into `folder`. Returns the number of scalars.

    Raises `BridgeError` without the package `tensorboard`.
    """
    if find_spec("tensorboard") is None:
        raise BridgeError(
            "trace export: the package tensorboard is not installed; pip install tensorboard"
        )
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder))
    count = 0
    for step, values in scalars_by_step(series):
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        count += len(values)
    for number, finding in enumerate(series.findings):
        words = f"{finding.severity} {finding.id}, {finding.where or 'the run'}: {finding.evidence}; {finding.meaning}"
        writer.add_text(f"findings/{number}", clean(words), finding.step)
    writer.close()
    return count


def write_wandb(series: Series, folder: Path) -> int:
    """Write an offline run of Weights & Biases into `folder`, for `wandb sync`.

    Returns the number of scalars. Nothing is sent. Raises `BridgeError` without the package
    `wandb`.
    """
    if find_spec("wandb") is None:
        raise BridgeError("trace export: the package wandb is not installed; pip install wandb")
    # Whatever the user's own settings say, nothing is sent.
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    import wandb as client

    folder.mkdir(parents=True, exist_ok=True)
    settings = dict(series.run.about.get("settings", {})) if series.run else {}
    run = client.init(
        mode="offline",
        dir=str(folder),
        project="stagebridge",
        name=clean(series.folder.name),
        config=settings,
    )
    count = 0
    for step, values in scalars_by_step(series):
        run.log(values, step=step)
        count += len(values)
    for finding in series.findings:
        run.alert(
            clean(f"{finding.severity} {finding.id}"),
            clean(f"step {finding.step}: {finding.evidence}; {finding.meaning}"),
        )
    run.finish()
    client.teardown()  # its own process writes the file, and ends only then
    return count


TARGETS: Mapping[str, Callable[[Series, Path], int]] = {
    "tensorboard": write_tensorboard,
    "wandb": write_wandb,
}


def export_run(series: Series, target: str, out: Path) -> int:
    """Export a run to `target`, tensorboard or wandb, as the new folder `out`. Returns the number
    of scalars. Raises `BridgeError` if `out` exists, cannot be written, or a package is missing;
    then no folder is left.
    """
    if out.exists():
        raise BridgeError(f"{out}: found a file or folder, expected none; name a new folder")
    # In the same folder: a rename does not cross file systems.
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        count = TARGETS[target](series, beside)
        beside.rename(out)
    except OSError as error:
        raise BridgeError(
            f"{out}: {error.strerror}; name a folder that can be written to"
        ) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return count
