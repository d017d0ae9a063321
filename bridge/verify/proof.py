"""Proves that a checkpoint was moved correctly: runs of source and target resume from their
checkpoints, and their numbers are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bridge.checkpoint.groups import Row
from bridge.checkpoint.hub import Model
from bridge.engine.interface import Backend, Workload
from bridge.errors import BridgeError
from bridge.files.progress import Course
from bridge.plan.batch import solve
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config
from bridge.verify.judge import DIGITS, finite, in_numbers
from bridge.verify.measure import (
    Distance,
    EngineRun,
    Measured,
    OtherModelError,
    distance,
    measure,
    neutral,
)
from bridge.verify.size import TWO, here

NOTHING = Distance(0.0, 0.0, 0.0, 1.0, "", 0.0)


@dataclass(frozen=True)
class Party:
    """The source or the target of a move: a small config, its engine, and the checkpoint that the
    run resumes from.

    `groups` are the parameter groups of the optimizer, if the config does not say them.
    """

    side: str
    config: Config
    backend: Backend
    start: Path
    groups: tuple[Row, ...] = ()

    @property
    def title(self) -> str:
        """The names of the side and of its engine, for messages."""
        return f"{self.side} on {self.backend.title} {self.backend.release or ''}".strip()


def changes(plan: Plan, world: int, layers: int | None) -> dict[str, Any]:
    """Return the plan fields to change for a run on `world` ranks of this machine, with their new
    values. They are the numbers of ranks, the batch, the number of layers, and fields for
    debugging, if the plan sets them. Optimizer, schedule and loss scale stay as they are, because
    the run continues with them.
    """
    batch, ranks = plan.batch, plan.parallel
    solution = solve(batch.micro, batch.accumulation, batch.global_, ranks.data)
    micro, accumulation = min(solution.micro or TWO, TWO), min(solution.accumulation or 1, TWO)
    sizes = {
        "batch.micro": micro,
        "batch.accumulation": accumulation,
        "batch.global_": micro * accumulation * world,
    }
    axes = dict.fromkeys(
        ("parallel.tensor", "parallel.pipeline", "parallel.context", "parallel.expert"), 1
    )
    edits = {
        "parallel.data": world,
        **axes,
        **sizes,
        **dict(here()),
        **({"model.layers": layers} if layers else {}),
    }
    values = plan.values()
    return {
        path: value for path, value in edits.items() if path in values and values[path] != value
    }


def small(
    config: Config, backend: Backend, world: int, layers: int | None = None
) -> tuple[Config, dict[str, Any]]:
    """Return the config for `world` ranks, and for each changed plan field the values before and
    after.
    """
    plan = backend.meaning(config)
    edits = changes(plan, world, layers)
    if not edits and config.world_size == world:
        return config, {}
    differences = {
        path: (plan.values().get(path), value)
        for path, value in edits.items()
        if not path.startswith("debug.")
    }
    result = backend.edit_config(config, edits, world)
    # Lengths in samples follow the smaller batch. They are set again to the steps that they were.
    schedule, after = (dict(it.values()) for it in (plan, backend.meaning(result)))
    lengths = {
        path: schedule[path]
        for path in LENGTHS
        if path in schedule and schedule[path] != after.get(path)
    }
    return (backend.edit_config(result, lengths, world) if lengths else result), differences


LENGTHS = tuple(
    f"optimizer.schedule.{name}" for name in ("warmup_steps", "total_steps", "decay_steps")
)
"""Plan fields with lengths that some configs count in samples. In a small run, the same number of
samples would be more steps, so these fields are set again.
"""


def prove(
    source: Party,
    target: Party,
    wider: Party | None,
    workload: Workload,
    facts: Model,
    steps: int,
    note: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Train source and target for `steps` more steps on this process group, and return a report on
    whether they agree.

    The report is the same on all ranks. `wider` is the source in a wider number format, and the
    distance between these two runs measures rounding. `facts` are what the translation of weight
    names needs to know of the model.
    """
    runs: dict[str, Measured] = {}
    problems: dict[str, str] = {}
    parties = {"source": source, "target": target, **({"wider": wider} if wider else {})}
    course = Course(len(parties))
    for key, party in parties.items():
        note(f"{party.title}: runs {steps} steps from checkpoint {party.start.name}")
        try:
            with course.part():
                ready = replace(workload, groups=party.groups)
                runs[key] = measure(
                    EngineRun(party.backend, party.config, party.start), ready, steps
                )
        except BridgeError as error:
            problems[key] = "; ".join(dict.fromkeys(error.problems))
    # Engines may name weights each in its own way. The names of the native engine are common to
    # all.
    if len({frozenset(run.weights[0]) for run in runs.values()}) > 1:
        for key, run in runs.items():
            runs[key] = replace(
                run, weights=tuple(neutral(weights, facts) for weights in run.weights)
            )
    report = partial(_fields, source, target, runs, problems, steps)
    if {"source", "target"} & problems.keys():
        return report("not run", None, None, "")
    compute = source.backend.meaning(source.config).precision.compute or "fp32"
    try:
        precision_gap = distance(runs["wider"], runs["source"]) if "wider" in runs else NOTHING
        # Another loss scale is never rounding.
        rounding = replace(precision_gap.at_least(DIGITS.get(compute, 0.0)), scale="")
        gap = distance(runs["target"], runs["source"], rounding.noise)
    except OtherModelError as error:
        return report("differs", None, None, error.problems[0])
    further = gap.beyond(rounding)
    apart = _apart(runs["source"], runs["target"])
    words = "; ".join(filter(None, (in_numbers(further, gap) if further else "", apart)))
    return report("differs" if words else "same", gap, rounding, words)


def _apart(source: Measured, target: Measured) -> str:
    """Return a text on the first difference between two runs in one of these: the number of steps
    before the start, whether a step is skipped, or the learning rate. The text is empty if there is
    none.
    """
    if source.first != target.first:
        return f"the source resumes at step {source.first}, the target at step {target.first}"
    for number, (one, two) in enumerate(
        zip(source.steps, target.steps, strict=True), source.first + 1
    ):
        if one.updated != two.updated:
            side, other = ("target", "source") if one.updated else ("source", "target")
            return f"the {side} skips the update of step {number}, but the {other} does not"
        if one.lr is not None and two.lr is not None and abs(one.lr - two.lr) > RATE * abs(one.lr):
            return (
                f"found learning rate {two.lr:g} in step {number} of the target,"
                f" expected {one.lr:g} as in the source"
            )
    return ""


RATE = 1e-6
"""Learning rates count as equal up to this relative difference."""


def _fields(
    source: Party,
    target: Party,
    runs: Mapping[str, Measured],
    problems: Mapping[str, str],
    steps: int,
    verdict: str,
    gap: Distance | None,
    rounding: Distance | None,
    cause: str,
) -> dict[str, Any]:
    rows = [
        {
            "side": party.side,
            "engine": f"{party.backend.title} {party.backend.release or ''}".strip(),
            "problem": problems.get(party.side, ""),
            "first": runs[party.side].first if party.side in runs else None,
            "losses": [finite(step.loss) for step in runs[party.side].steps]
            if party.side in runs
            else [],
            "grad_norms": [finite(step.grad_norm) for step in runs[party.side].steps]
            if party.side in runs
            else [],
            "lr": [step.lr for step in runs[party.side].steps] if party.side in runs else [],
            "loss_scale": [step.scale for step in runs[party.side].steps]
            if party.side in runs
            else [],
        }
        for party in (source, target)
    ]
    gap_fields = {**_far(gap), "tensor": gap.tensor} if gap else None
    rounding_fields = _far(rounding) if rounding else None
    return {
        "verdict": verdict,
        "steps": steps,
        "cause": cause,
        "distance": gap_fields,
        "rounding": rounding_fields,
        "runs": rows,
    }


def _far(distance: Distance) -> dict[str, float | str | None]:
    return {name: finite(getattr(distance, name)) for name in ("loss", "norm", "update")}
