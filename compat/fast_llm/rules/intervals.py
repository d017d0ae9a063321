"""Rules that convert Fast-LLM's intervals of logs, checkpoints, stops and evaluations to the plan's
fields, and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bridge.stack.rules import EFFECTS, Context, Group, convert

LOGS, CHECKPOINT, SHUTDOWN, WANDB = (
    f"training.{name}" for name in ("logs", "checkpoint", "shutdown", "wandb")
)
EVALUATORS, VALIDATION = "training.evaluators", "training.validation"
FOLDER = "run.experiment_dir"
PLACE = "experiment"
"""Experiment folder of a written config with checkpoints. A plan does not hold the folder of the
source.
"""
NAME = "validation"
"""Name of the evaluation and of its dataset in a written config. A plan's evaluation has no name."""
LOGGED, KEPT = 100, 5
"""Defaults of Fast-LLM: the number of steps between two lines of metrics, and the number of
checkpoints that are kept (engine/training/config.py).
"""


def _section(values: Group, path: str) -> Mapping[str, Any]:
    section = values.get(path)
    return section if isinstance(section, Mapping) else {}


def _steps(section: Mapping[str, Any], name: str = "interval") -> int | None:
    steps = section.get(name)
    # `type`, not isinstance: True is an int in Python, and no number of steps.
    return steps if type(steps) is int and steps > 0 else None


def _read_logs(values: Group, context: Context) -> Group:
    section = _section(values, LOGS)
    # A null switches the log off; a missing key leaves the default.
    return {"run.log_interval": _steps(section) or (0 if "interval" in section else LOGGED)}


def _write_logs(values: Group, context: Context) -> Group:
    interval = values.get("run.log_interval")
    return {} if interval is None else {LOGS: {"interval": interval or None}}


def _read_saves(values: Group, context: Context) -> Group:
    """Read the interval of checkpoints and the interval at which the run stops. A run stops only at
    a checkpoint (TrainingConfig._validate).
    """
    checkpoint, shutdown = _section(values, CHECKPOINT), _section(values, SHUTDOWN)
    interval, keep = (
        _steps(checkpoint),
        _steps(checkpoint, "keep") if "keep" in checkpoint else KEPT,
    )
    return {
        "run.save_interval": interval,
        "run.keep_checkpoints": keep if interval else None,
        "run.exit_interval": _steps(shutdown),
    }


def _write_saves(values: Group, context: Context) -> Group:
    stop, interval = values.get("run.exit_interval"), values.get("run.save_interval")
    every = interval or stop
    if not every:
        return {}
    # A stop between two checkpoints would be refused, so it is left out and reported as lost.
    stops = {SHUTDOWN: {"interval": stop}} if stop and stop % every == 0 else {}
    return {
        CHECKPOINT: {"interval": every, "keep": values.get("run.keep_checkpoints")},
        FOLDER: PLACE,
        **stops,
    }


def _more(values: Group) -> bool:
    """Return whether the config has settings of checkpoints that a plan cannot hold: settings other
    than intervals, or a folder of the user's choice.
    """
    checkpoint, shutdown = _section(values, CHECKPOINT), _section(values, SHUTDOWN)
    rest = {*checkpoint} - {"interval", "keep"} | {*shutdown} - {"interval"}
    return bool(rest) or values.get(FOLDER) not in (None, PLACE)


def _evaluations(values: Group) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each evaluation together with the settings of its evaluator. In 0.3.0
    the evaluator's settings are in an inner section.
    """
    yield from ([_section(values, VALIDATION)] if values.get(VALIDATION) else [])
    for one in _section(values, EVALUATORS).values():
        inner = one.get("evaluator") if isinstance(one, Mapping) else None
        yield (
            {**one, **(inner if isinstance(inner, Mapping) else {})}
            if isinstance(one, Mapping)
            else {}
        )


def _read_evaluations(values: Group, context: Context) -> Group:
    first = next(_evaluations(values), {})
    interval = _steps(first)
    return {
        "run.eval_interval": interval,
        "run.eval_steps": _steps(first, "iterations") if interval else None,
    }


def _write_evaluations(values: Group, context: Context) -> Group:
    interval, steps = values.get("run.eval_interval"), values.get("run.eval_steps")
    if not interval:
        return {}
    one: dict[str, Any] = {"interval": interval}
    length = {"iterations": steps} if steps else {}
    if not context.since("0.3.0"):
        return {VALIDATION: {**one, **length}}
    if context.since("0.4.0"):
        one |= length
    elif length:
        one["evaluator"] = length
    return {EVALUATORS: {NAME: one}}


def _several(values: Group) -> bool:
    """Return whether the config has several evaluations, or one with settings other than its
    interval and length.
    """
    evaluations = list(_evaluations(values))
    has_default_name = {*_section(values, EVALUATORS)} <= {NAME}
    return (
        len(evaluations) > 1
        or not has_default_name
        or any({*one} - {"interval", "iterations", "evaluator", "type"} for one in evaluations)
    )


def _write_wandb(values: Group, context: Context) -> Group:
    names = {f"{name}_name": values.get(f"run.{name}") for name in ("project", "entity")}
    settings = {name: value for name, value in names.items() if value is not None}
    return {WANDB: settings} if settings else {}


def _read_wandb(values: Group, context: Context) -> Group:
    section = _section(values, WANDB)
    names = {f"run.{name}": section.get(f"{name}_name") for name in ("project", "entity")}
    return {path: value for path, value in names.items() if isinstance(value, str)}


RULES = (
    convert(
        LOGS,
        "run.log_interval",
        _read_logs,
        _write_logs,
        effect=EFFECTS["run.log_interval"],
        blurs=lambda values: "offset" in _section(values, LOGS),
        lossy="stagebridge does not translate an offset of the first log line",
        source="engine/training/config.py: MetricsLogsConfig",
    ),
    convert(
        (CHECKPOINT, SHUTDOWN, FOLDER),
        ("run.save_interval", "run.keep_checkpoints", "run.exit_interval"),
        _read_saves,
        _write_saves,
        effect=lambda values: EFFECTS[
            "run.exit_interval"
            if {*_section(values, SHUTDOWN)} - {"interval"}
            else "run.save_interval"
        ],
        mixed=True,
        blurs=_more,
        carries={
            CHECKPOINT: ("run.save_interval", "run.keep_checkpoints"),
            SHUTDOWN: "run.exit_interval",
            FOLDER: (),
        },
        lossy="Fast-LLM stops a run only at a checkpoint, so the exit interval must be a multiple of the save interval",
        note="the folder of checkpoints, which each stack sets in its own way",
        source="engine/training/config.py: TrainingCheckpointConfig, ShutdownConfig",
    ),
    convert(
        (EVALUATORS, VALIDATION),
        ("run.eval_interval", "run.eval_steps"),
        _read_evaluations,
        _write_evaluations,
        effect=EFFECTS["run.eval_interval"],
        blurs=_several,
        lossy="stagebridge translates one evaluation without a name; Fast-LLM has several with names",
        source="engine/evaluation/config.py: EvaluatorConfig, LossEvaluatorConfig",
    ),
    convert(
        WANDB,
        ("run.project", "run.entity"),
        _read_wandb,
        _write_wandb,
        effect=EFFECTS["run.project"],
        blurs=lambda values: bool({*_section(values, WANDB)} - {"project_name", "entity_name"}),
        lossy="stagebridge translates only the project's name and its user or team",
        source="engine/training/config.py: WandbConfig",
    ),
)
