"""Optimizer classes that recipes name, the plan's name for
each, and the defaults of their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.stack.rules import ADAM, Context, Group, Rule, convert


@dataclass(frozen=True, slots=True)
class Class_:
    """An optimizer class that recipes can name (`target`), the plan's name for the optimizer
    (`ours`), and the defaults of the class's arguments.
    """

    target: str
    ours: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _adam_defaults(decay: float) -> dict[str, Any]:
    return {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay}


CLASSES: Mapping[str, Class_] = {
    row.target: row
    for row in (
        Class_("torch.optim.Adam", "adam", _adam_defaults(0.0)),
        Class_("torch.optim.AdamW", "adamw", _adam_defaults(0.01)),
        Class_("torch.optim.SGD", "sgd", {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0}),
        Class_("torch.optim.Adagrad", "adagrad", {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
        Class_("flashoptim.FlashAdam", "adam", _adam_defaults(0.0)),
        Class_("flashoptim.FlashAdamW", "adamw", _adam_defaults(0.01)),
        Class_("transformer_engine.pytorch.optimizers.FusedAdam", "adam", _adam_defaults(0.0)),
        Class_(
            "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
            "adam",
            _adam_defaults(0.0),
        ),
    )
}
"""Known classes, with the defaults of their constructors (torch 2.13, flashoptim, Transformer
Engine).
"""

TORCH = {row.ours: target for target, row in CLASSES.items() if target.startswith("torch.optim.")}
NAMES = ("lr", "betas", "eps", "momentum", "weight_decay")
MODE, PEAK = "optimizer.adam_w_mode", "lr_scheduler.max_lr"
DECAY, STYLE = "optimizer.weight_decay", "lr_scheduler.wd_incr_style"
ENDS = ("lr_scheduler.start_wd", "lr_scheduler.end_wd")


def argument_defaults(target: str | None) -> Mapping[str, Any]:
    """Return the defaults of the arguments of an optimizer class, by path."""
    entry = CLASSES.get(target or "")
    if entry is None:
        return {}
    mode = {MODE: True} if "FusedAdam" in entry.target else {}
    return {**{f"optimizer.{name}": value for name, value in entry.defaults.items()}, **mode}


def _optimizer_name(values: Group) -> str | None:
    entry = CLASSES.get(values.get("optimizer._target_") or "")
    if entry is None:
        return None
    return "adamw" if "FusedAdam" in entry.target and values.get(MODE) else entry.ours


def _arguments_of_class(name: str | None) -> tuple[str, ...]:
    """Return the names of the arguments that AutoModel's class for the plan's optimizer `name` has.
    If `name` is not a known optimizer, return the argument names of all classes.
    """
    return tuple(CLASSES[TORCH[name]].defaults) if name in TORCH else NAMES


def _read_optimizer(values: Group, context: Context) -> Group:
    name = _optimizer_name(values)
    read = {
        f"optimizer.{part}": values.get(f"optimizer.{part}") for part in _arguments_of_class(name)
    }
    # The scheduler sets the decay at every step, to one value unless it is a ramp between two.
    first, last = map(values.get, ENDS)
    constant = values.get(STYLE) not in ("linear", "cosine") or first == last
    if DECAY in read and last is not None and constant:
        read[DECAY] = last
    return {
        "optimizer.name": name,
        **read,
        "optimizer.lr": values.get(PEAK, values.get("optimizer.lr")),
    }


def _write_optimizer(values: Group, context: Context) -> Group:
    name = values.get("optimizer.name")
    settings = {
        f"optimizer.{part}": values.get(f"optimizer.{part}") for part in _arguments_of_class(name)
    }
    if needs_fused(values):
        return {"optimizer._target_": FUSED, MODE: name == "adamw", **settings}
    return {"optimizer._target_": TORCH.get(name or ""), **settings}


MOMENTS = "precision.moments"
HALVES = ("bf16", "fp16")
SWITCHES = ("nesterov", "amsgrad", "bias_correction")
TAKING = {"nesterov": ("sgd",), "amsgrad": ("adam", "adamw"), "bias_correction": ("adam", "adamw")}
"""For each switch: the optimizers of the plan that have the switch."""
FUSED = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"


def needs_fused(values: Group) -> bool:
    """Whether a plan needs Transformer Engine's Adam, because it has no bias correction or its
    moments have their own formats.
    """
    weights = values.get("precision.master")
    usual = weights if weights in HALVES else "fp32"
    own = values.get("optimizer.bias_correction") is False or values.get(MOMENTS) not in (
        None,
        (usual, usual),
    )
    return values.get("optimizer.name") in TAKING["bias_correction"] and own


def is_fused(target: str | None) -> bool:
    """Whether a class is Transformer Engine's Adam."""
    return target in CLASSES and "FusedAdam" in str(target)


def _read_switches(values: Group, context: Context) -> Group:
    switches = {}
    for switch in SWITCHES:
        if _optimizer_name(values) in TAKING[switch]:
            value = values.get(f"optimizer.{switch}")
            # By default bias correction is on, and the others are off.
            switches[f"optimizer.{switch}"] = (
                switch == "bias_correction" if value is None else value
            )
    return switches


def _write_switches(values: Group, context: Context) -> Group:
    switches = {}
    for switch in SWITCHES:
        value = values.get(f"optimizer.{switch}")
        # A usual value is left out: torch's Adam takes no bias_correction at all.
        if values.get("optimizer.name") in TAKING[switch] and value not in (
            None,
            ADAM[f"optimizer.{switch}"],
        ):
            switches[f"optimizer.{switch}"] = value
    return switches


SWITCHED: Rule = convert(
    tuple(f"optimizer.{switch}" for switch in SWITCHES),
    tuple(f"optimizer.{switch}" for switch in SWITCHES),
    _read_switches,
    _write_switches,
    sees=("optimizer._target_", MODE, "optimizer.name"),
    carries={f"optimizer.{switch}": f"optimizer.{switch}" for switch in SWITCHES},
    lossy=(
        "only SGD has nesterov, only Adam amsgrad, and only Transformer Engine's Adam"
        " bias_correction"
    ),
    source="arguments of the class that the recipe names",
)


def _is_blurred(values: Group) -> bool:
    """Return whether a plan cannot hold an optimizer class, or not all that it does."""
    target = values.get("optimizer._target_")
    return target is not None and target not in TORCH.values() and not is_fused(target)


def _tell_class(values: Group) -> str:
    target = values.get("optimizer._target_")
    names = ", ".join(sorted(name.rpartition(".")[2] for name in TORCH.values()))
    if target in CLASSES:
        return f"{target} keeps weights and moments in formats of its own; torch's class of the same name does not"
    return (
        f"{target} updates weights by a rule that no plan has; a plan has those of torch's {names}"
    )


RULE: Rule = convert(
    ("optimizer._target_", MODE, *(f"optimizer.{name}" for name in NAMES)),
    ("optimizer.name", *(f"optimizer.{name}" for name in NAMES)),
    _read_optimizer,
    _write_optimizer,
    sees=(PEAK, STYLE, *ENDS, "optimizer.bias_correction", MOMENTS, "precision.master"),
    carries={
        "optimizer._target_": "optimizer.name",
        MODE: "optimizer.name",
        PEAK: "optimizer.lr",
        **{f"optimizer.{name}": f"optimizer.{name}" for name in NAMES},
    },
    # Transformer Engine's make the same steps as torch's; the formats of its moments have their own
    # row.
    blurs=_is_blurred,
    tells=_tell_class,
    lossy=(
        "stagebridge translates torch's Adam, AdamW, SGD and Adagrad, and Transformer Engine's"
        " FusedAdam; other classes keep their state in other formats"
    ),
    source="recipes name the optimizer class; the constructor of the class has the defaults",
)
