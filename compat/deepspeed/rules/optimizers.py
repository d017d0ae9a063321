"""Rules that convert DeepSpeed's sections `optimizer` and `scheduler` to the plan's optimizer and
learning-rate schedule, and back.
"""

from __future__ import annotations

from typing import Any

from bridge.stack.rules import ADAM, Context, Effect, Group, convert, lacks, only_theirs
from bridge.stack.words import (
    among,
    beyond,
    effect_if,
    either,
    every,
    give,
    has_value,
    no,
    of,
    on,
    some,
)
from compat.deepspeed.schedule import OTHER

PARAMS = "optimizer.params"
ADAM_LIKE = ("adam", "adamw")

DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "lamb": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "lion": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
    "adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
    "muon": {"betas": (0.9, 0.95), "eps": 1e-10, "momentum": 0.95, "weight_decay": 0.0},
}
"""DeepSpeed's default arguments for each optimizer (ops/adam/fused_adam.py, ops/lamb, ops/lion,
torch.optim, zero/muon). Muon has separate learning rates for matrices and for other parameters, so
it has no default for `lr`.
"""

TYPES = {
    "adamw": "AdamW",
    "adam": "Adam",
    "lamb": "Lamb",
    "lion": "Lion",
    "adagrad": "Adagrad",
    "sgd": "SGD",
    "muon": "Muon",
}
TAKES = {name: tuple(values) for name, values in DEFAULTS.items()} | {
    "muon": ("lr", "betas", "eps", "momentum", "weight_decay")
}
"""The plan's hyperparameters that each optimizer takes."""

COMPRESSED = {"onebitadam": "adamw", "zerooneadam": "adamw", "onebitlamb": "lamb"}
"""Maps each optimizer that communicates one bit for each element to the ordinary optimizer with the
same update rule. All of these optimizers decouple weight decay (runtime/fp16/onebit/adam.py,
zoadam.py, lamb.py: step).
"""

HYPER = ("lr", "betas", "eps", "weight_decay", "momentum")
SCHEDULE_LR = ("scheduler.type", "scheduler.params.warmup_max_lr")
"""Keys of a scheduler that can override the optimizer's learning rate."""


def _plan_name(values: Group) -> str | None:
    """Return the plan's name of the optimizer; None if the plan has no name for it. DeepSpeed's
    Adam is AdamW unless `adam_w_mode` is off (runtime/engine.py: _configure_basic_optimizer).
    """
    name = (values.get("optimizer.type") or "").lower()
    if name == "adam":
        return "adam" if values.get(f"{PARAMS}.adam_w_mode") is False else "adamw"
    return name if name in TYPES else COMPRESSED.get(name)


def _compresses(values: Group) -> bool:
    return (values.get("optimizer.type") or "").lower() in COMPRESSED


def _read_optimizer(values: Group, context: Context) -> Group:
    name = _plan_name(values)
    if name is None:
        return {}
    defaults = dict(DEFAULTS[name])
    # PyTorch's AdamW has another default of weight_decay than DeepSpeed's own Adam.
    if name == "adamw" and values.get(f"{PARAMS}.torch_adam"):
        defaults["weight_decay"] = 1e-2
    arguments = {
        key: values[f"{PARAMS}.{key}"] for key in HYPER if values.get(f"{PARAMS}.{key}") is not None
    }
    hyper = {key: value for key, value in {**defaults, **arguments}.items() if key in TAKES[name]}
    if (values.get("scheduler.type") or "") in ("WarmupLR", "WarmupDecayLR"):
        hyper["lr"] = _peak_rate(values, hyper.get("lr"), context)
    return {"optimizer.name": name, **{f"optimizer.{key}": value for key, value in hyper.items()}}


def _peak_rate(values: Group, lr: float | None, context: Context) -> float | None:
    """Return the peak learning rate under WarmupLR or WarmupDecayLR. A single warmup_max_lr in the
    config is the peak. If the config has a list of peaks, the optimizer's rate `lr` is returned.
    Without warmup_max_lr, the peak is `lr` for WarmupLR from 0.17.2 on, and 0.001 otherwise.
    """
    peak = values.get("scheduler.params.warmup_max_lr")
    if isinstance(peak, int | float):
        return peak
    # A list of peaks is one for each group of parameters. A plan
    # has one rate, so the optimizer's stays.
    keeps = values.get("scheduler.type") == "WarmupLR" and context.since(KEEPS_LR_SINCE)
    return lr if keeps or isinstance(peak, tuple) else 1e-3


def _write_optimizer(values: Group, context: Context) -> Group:
    name = values.get("optimizer.name")
    if name not in TYPES:
        return {}
    hyper = {key: values.get(f"optimizer.{key}") for key in TAKES[name]}
    arguments = {f"{PARAMS}.{key}": value for key, value in hyper.items() if value is not None}
    if name in ADAM_LIKE:
        arguments[f"{PARAMS}.adam_w_mode"] = name == "adamw"
        # DeepSpeed's FusedAdam refuses amsgrad; torch's Adam has it.
        if values.get("optimizer.amsgrad"):
            arguments[f"{PARAMS}.torch_adam"] = True
    else:
        # ZeRO refuses optimizers outside of its list without this switch.
        arguments["zero_allow_untested_optimizer"] = True
    return {"optimizer.type": TYPES[name], **arguments}


OPTIMIZER = convert(
    (
        "optimizer.type",
        *(f"{PARAMS}.{key}" for key in HYPER),
        f"{PARAMS}.adam_w_mode",
        f"{PARAMS}.torch_adam",
        "zero_allow_untested_optimizer",
    ),
    ("optimizer.name", *(f"optimizer.{key}" for key in HYPER)),
    _read_optimizer,
    _write_optimizer,
    sees=(*SCHEDULE_LR, "optimizer.amsgrad"),
    carries={
        "optimizer.type": "optimizer.name",
        **{f"{PARAMS}.{key}": f"optimizer.{key}" for key in HYPER},
        f"{PARAMS}.adam_w_mode": "optimizer.name",
        f"{PARAMS}.torch_adam": "optimizer.weight_decay",
        "zero_allow_untested_optimizer": "optimizer.name",
        "scheduler.params.warmup_max_lr": "optimizer.lr",
    },
    blurs=every(on("optimizer.type"), some(no(_plan_name), _compresses)),
    tells=either(
        _compresses,
        "the optimizer communicates one bit for each element, and has no bias correction",
        "",
    ),
    lossy=(
        "stagebridge translates only optimizers that several stacks have; others stay in the training"
        " script"
    ),
    source="runtime/engine.py: _configure_basic_optimizer",
    kernels=(f"{PARAMS}.torch_adam",),
)

SCHEDULE = (
    "name",
    "warmup_steps",
    "warmup_from",
    "total_steps",
    "minimum",
    "decay_steps",
    "decay_shape",
)
SHAPES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""Maps each of DeepSpeed's schedulers to the plan's name for its shape after warmup."""
WARMUP_STEPS = 1000
"""DeepSpeed's default for the scheduler argument warmup_num_steps (runtime/lr_schedules.py)."""
COSINE_FLOOR = 0.0001
"""DeepSpeed's default for the scheduler argument cos_min_ratio: the last learning rate as a share
of the peak.
"""
KEEPS_LR_SINCE = "0.17.2"
"""First release in which WarmupLR without warmup_max_lr rises to the optimizer's learning rate
instead of 0.001.
"""


def _read_schedule(values: Group, context: Context) -> Group:
    shape = SHAPES.get(values.get("scheduler.type") or "")
    if shape is None:
        return _schedule_of_code(values)
    start, end = _end_rates(values, shape)
    return {
        "optimizer.schedule.name": shape,
        # DeepSpeed's warmup has at least two steps (runtime/lr_schedules.py: max(2, warmup_num_steps)).
        "optimizer.schedule.warmup_steps": max(
            2, values.get("scheduler.params.warmup_num_steps") or WARMUP_STEPS
        ),
        "optimizer.schedule.warmup_from": start,
        "optimizer.schedule.total_steps": values.get("scheduler.params.total_num_steps"),
        "optimizer.schedule.minimum": end,
    }


def _schedule_of_code(values: Group) -> Group:
    """Return the plan's schedule from the code part. A file with an optimizer has a constant
    learning rate if neither the file nor the code part has a scheduler.
    """
    paths = {name: f"code.scheduler.{name}" for name in SCHEDULE}
    schedule = {name: values[path] for name, path in paths.items() if values.get(path) is not None}
    if schedule.get("name") == OTHER:
        return {}
    # Without any scheduler the rate stays as it is. A scheduler
    # that no plan has leaves the plan's schedule open.
    if schedule or (values.get("optimizer.type") and not values.get("scheduler.type")):
        schedule = {"name": "constant", "warmup_steps": 0} | schedule
        if schedule["warmup_steps"]:
            schedule.setdefault("warmup_from", 0.0)
        if schedule["name"] != "constant":
            schedule.setdefault("minimum", 0.0)
    return {f"optimizer.schedule.{name}": value for name, value in schedule.items()}


def _end_rates(values: Group, shape: str) -> tuple[float | None, float | None]:
    """Return the learning rate at the start of warmup, and the learning rate at the end of the
    decay (None without a decay).
    """
    if shape == "cosine":
        # WarmupCosineLR takes shares of the optimizer's rate; the other two take rates.
        peak = values.get(f"{PARAMS}.lr") or 1e-3
        floor = values.get("scheduler.params.cos_min_ratio")
        start = peak * (values.get("scheduler.params.warmup_min_ratio") or 0.0)
        return start, peak * (COSINE_FLOOR if floor is None else floor)
    low = values.get("scheduler.params.warmup_min_lr") or 0.0
    # A list has one rate for each group of parameters; a plan has one for all.
    low = low[0] if isinstance(low, tuple) else low
    # WarmupDecayLR decays to the rate at which the warmup starts.
    return low, low if shape == "linear" else None


def _write_schedule(values: Group, context: Context) -> Group:
    schedule = {name: values.get(f"optimizer.schedule.{name}") for name in SCHEDULE}
    # Without this the config would read as a constant rate, which is more than the plan tells.
    if values.get("optimizer.name") in TYPES and all(value is None for value in schedule.values()):
        schedule["name"] = OTHER
    return {f"code.scheduler.{name}": value for name, value in schedule.items()}


SCHEDULER = convert(
    (
        "scheduler.type",
        *(
            f"scheduler.params.{name}"
            for name in (
                "warmup_min_lr",
                "warmup_max_lr",
                "warmup_num_steps",
                "warmup_type",
                "total_num_steps",
                "warmup_min_ratio",
                "cos_min_ratio",
            )
        ),
        *(f"code.scheduler.{name}" for name in SCHEDULE),
    ),
    tuple(f"optimizer.schedule.{name}" for name in SCHEDULE),
    _read_schedule,
    _write_schedule,
    sees=(f"{PARAMS}.lr", "optimizer.type", "optimizer.name"),
    carries={
        "scheduler.type": "optimizer.schedule.name",
        "scheduler.params.warmup_num_steps": "optimizer.schedule.warmup_steps",
        "scheduler.params.warmup_min_lr": (
            "optimizer.schedule.warmup_from",
            "optimizer.schedule.minimum",
        ),
        "scheduler.params.total_num_steps": "optimizer.schedule.total_steps",
        "scheduler.params.warmup_min_ratio": "optimizer.schedule.warmup_from",
        "scheduler.params.cos_min_ratio": "optimizer.schedule.minimum",
        **{f"code.scheduler.{name}": f"optimizer.schedule.{name}" for name in SCHEDULE},
    },
    blurs=has_value("scheduler.type"),
    tells=lambda values: (
        ""
        if values["scheduler.type"] in SHAPES
        else f"stagebridge does not translate the schedule {values['scheduler.type']}"
    ),
    lossy="DeepSpeed's own schedulers lag one step behind and warm up over at least two steps, by default logarithmically",
    note=(
        "the script builds the schedule, because DeepSpeed's own schedulers lag one step behind and"
        " warm up over at least two steps"
    ),
    source="runtime/lr_schedules.py",
)

SWITCHES = ("nesterov", "amsgrad", "bias_correction")
TAKING = {
    "nesterov": ("sgd",),
    "amsgrad": ("adam", "adamw"),
    "bias_correction": ("adam", "adamw", "lamb"),
}
"""Maps each switch to the optimizers that take it."""
MUON = {"optimizer.nesterov": True, "optimizer.update_scale": "shape_scaling"}
"""Plan fields that have a fixed value in DeepSpeed's Muon (runtime/zero/muon/original_muon.py:
muon_update, _aspect_ratio_scale).
"""


def _read_switches(values: Group, context: Context) -> Group:
    name = _plan_name(values)
    switches = {
        switch: values.get(f"{PARAMS}.{switch}") for switch in SWITCHES if name in TAKING[switch]
    }
    if values.get("optimizer.type") in COMPRESSED and "amsgrad" in switches:
        switches["amsgrad"] = False  # the 1-bit optimizers have no amsgrad variant and stop at it
    fields = {
        f"optimizer.{switch}": value for switch, value in switches.items() if value is not None
    }
    return MUON if name == "muon" else fields


def _write_switches(values: Group, context: Context) -> Group:
    switches: dict[str, Any] = {}
    for switch in SWITCHES:
        value = values.get(f"optimizer.{switch}")
        # A usual value is left out: not every implementation of a type takes the argument at all.
        if values.get("optimizer.name") in TAKING[switch] and value not in (
            None,
            ADAM[f"optimizer.{switch}"],
        ):
            switches[f"{PARAMS}.{switch}"] = value
    return switches


SWITCHED = convert(
    tuple(f"{PARAMS}.{switch}" for switch in SWITCHES),
    (*(f"optimizer.{switch}" for switch in SWITCHES), "optimizer.update_scale"),
    _read_switches,
    _write_switches,
    sees=("optimizer.type", f"{PARAMS}.adam_w_mode", "optimizer.name"),
    carries={f"{PARAMS}.{switch}": f"optimizer.{switch}" for switch in SWITCHES},
    lossy=(
        "only SGD has a switch for nesterov; Muon always uses nesterov, and scales updates by"
        " shape; amsgrad exists only in PyTorch's Adam, bias_correction only in DeepSpeed's own"
        " Adam and LAMB"
    ),
    source="runtime/engine.py: _configure_basic_optimizer hands all parameters to the class",
)

SCOPE, FLAT = "code.decay_scope", "all"

DECAYED = (
    convert(
        SCOPE,
        "optimizer.decay_scope",
        give("optimizer.decay_scope", of(SCOPE, FLAT), _plan_name),
        # The script makes groups for every scope but "all". An
        # optimizer that DeepSpeed lacks is the script's altogether.
        give(
            SCOPE,
            "matrices",
            every(among("optimizer.name", *TYPES), beyond("optimizer.decay_scope", FLAT)),
        ),
        effect=effect_if(on(f"{PARAMS}.weight_decay"), Effect.NUMBERS),
        sees=(
            "optimizer.type",
            f"{PARAMS}.adam_w_mode",
            "optimizer.name",
            f"{PARAMS}.weight_decay",
        ),
        carries={f"{PARAMS}.weight_decay": "optimizer.decay_scope"},
        note=(
            "the script builds parameter groups that exclude biases and norms from decay;"
            " without such groups all parameters decay"
        ),
        source="runtime/engine.py: _configure_basic_optimizer takes model_parameters as they are",
    ),
    lacks("optimizer.decay_ramp", "DeepSpeed's weight decay is constant"),
    only_theirs(
        "code.parameter_groups",
        note=(
            "stagebridge does not translate names of parameters; `stagebridge move` reads the groups from the"
            " checkpoint"
        ),
        effect=Effect.NUMBERS,
    ),
)


RULES = (OPTIMIZER, SWITCHED, *DECAYED, SCHEDULER)
