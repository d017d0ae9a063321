"""The demo's second half: the converted plan trained on two local ranks, saved, and resumed by new processes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bridge.engine.fit import fit
from bridge.errors import BridgeError
from bridge.layout.architecture import PRESETS
from bridge.plan.plan import Plan
from bridge.stack.extras import engine_lacks
from bridge.verify.local import run_ranks

RANKS = 2
STEPS, MORE = 20, 3
MICROBATCHES = 4
LR = 4e-4
"""The learning rate for the demo's model, which without warmup and with so few samples in a step
does not train steadily at a higher one.

The rate in the launch file is for a model a thousand times larger, with 500 steps of warmup.
"""
RUN = "run"
FALL = 0.8
"""Largest final loss that the demo accepts, as a share of the loss of the first step."""

Row = dict[str, Any]


def train_demo(
    plan: Plan,
    folder: Path,
    out: Console,
    silence: float | None = None,
    timeout: float | None = None,
) -> None:
    """Train `plan` at a size for two ranks and a small model. Raises `BridgeError` if a rank fails
    or if the losses are wrong.

    `silence` and `timeout` are the limits of `bridge.engine.comm.patient`, in seconds.
    """
    if engine_lacks():
        out.print(
            "\nTo train the plan here as well: install the extra engine, and run the demo again.",
            markup=False,
        )
        return
    small, changes = _shrink_plan(plan)
    parallel = f"data {small.parallel.data} x tensor {small.parallel.tensor}"
    out.print(
        f"\nTraining the plan on {RANKS} local ranks ({parallel}), a small GPT on bundled text. Values changed to fit:",
        markup=False,
    )
    for change in changes:
        out.print(f"  {change}", markup=False)
    # A checkpoint of an earlier demo would be resumed.
    shutil.rmtree(folder / RUN, ignore_errors=True)
    limits = json.dumps([silence, timeout])
    first = _run_ranks("train", small, folder / RUN, STEPS + MORE, limits, out)
    again = _run_ranks("resume", small, folder / RUN, MORE, limits, out)
    _check_equal(first, again)
    before, after = first[0]["loss"], first[STEPS - 1]["loss"]
    out.print(
        f"\nLoss {before:.3f} -> {after:.3f} in {STEPS} steps, saved to {folder / RUN}.",
        markup=False,
    )
    out.print(
        f"Resumed by new processes: steps {STEPS + 1} to {STEPS + MORE} gave the same losses"
        f" ({', '.join(format(row['loss'], '.6f') for row in again)}).",
        markup=False,
    )
    # Not wrapped, so that it can be copied.
    out.print(
        f"Train yourself: stagebridge train {folder / 'ds_config.json'} --fit",
        markup=False,
        soft_wrap=True,
    )


def _shrink_plan(plan: Plan) -> tuple[Plan, list[str]]:
    """Return the plan for two ranks and a small model, and a line for each changed value."""
    small, findings = fit(plan, RANKS, PRESETS["tiny"])
    values = {
        path: value
        for path, value in small.values().items()
        if not path.startswith("optimizer.schedule.")
    }
    batch = (small.batch.micro or 1) * MICROBATCHES * (small.parallel.data or 1)
    values |= {"optimizer.lr": LR, "batch.accumulation": MICROBATCHES, "batch.global_": batch}
    shrunk = [
        f"{it.path}: {it.before} -> {it.after}" for it in findings if it.path != "batch.global_"
    ]
    return Plan.of(values), [
        *shrunk,
        f"batch.global_: {plan.batch.global_} -> {batch}",
        f"optimizer.lr: {plan.optimizer.lr} -> {LR}, constant",
    ]


def _run_ranks(
    what: str, plan: Plan, folder: Path, steps: int, limits: str, out: Console
) -> list[Row]:
    """Run the ranks once and print each step when it is done. Returns all steps."""
    text = plan.model_dump_json(exclude_none=True)
    lines = run_ranks(
        RANKS, "bridge.cli.demo.rank", text, str(folder), str(STEPS), str(MORE), limits
    )
    rows = (json.loads(line) for line in lines if line.startswith("{"))
    step_rows = list(
        _show_bar(what, rows, steps, out) if sys.stdout.isatty() else _print_rows(rows, out)
    )
    if len(step_rows) != steps:
        raise BridgeError(
            f"demo: {what} made {len(step_rows)} steps, expected {steps}; this is a defect, please report it"
        )
    return step_rows


def _print_rows(rows: Iterable[Row], out: Console) -> Iterator[Row]:
    for row in rows:
        out.print(f"  {row['line']}", markup=False)
        yield row


def _show_bar(what: str, rows: Iterable[Row], steps: int, out: Console) -> Iterator[Row]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=out) as progress:
        task = progress.add_task(f"  {what:6}", total=steps, said="starting")
        for row in rows:
            progress.update(task, advance=1, said=f"step {row['step']}  loss {row['loss']:.3f}")
            yield row


def _check_equal(first: list[Row], again: list[Row]) -> None:
    losses = [row["loss"] for row in first]
    if not losses[STEPS - 1] < FALL * losses[0]:
        raise BridgeError(
            f"demo: the loss went from {losses[0]} to {losses[STEPS - 1]}, which is no clear fall; please report it"
        )
    # Bit by bit: a checkpoint that is complete leaves no room for rounding.
    if [row["loss"] for row in again] != losses[STEPS:]:
        raise BridgeError(
            "demo: the resumed run did not give the same losses; this is a defect, please report it"
        )
