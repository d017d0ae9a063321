"""The form in which checks get a DeepSpeed config, and names of keys that several checks need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.stack import checks
from compat.deepspeed.releases import Release, Type, release

Flat = Mapping[str, Any]
MICRO, STEPS, TOTAL = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
ZERO = "zero_optimization."
OFFLOAD, PARAM = ZERO + "offload_optimizer", ZERO + "offload_param"
GATHER = ZERO + "stage3_gather_16bit_weights_on_model_save"
OLD_GATHER = ZERO + "stage3_gather_fp16_weights_on_model_save"
LEAVES = frozenset(f"{ZERO}leaf_module.{name}" for name in ("classes", "names", "name_suffixes"))
SCALE_KEYS = tuple(
    f"fp16.{name}"
    for name in (
        "initial_scale_power",
        "loss_scale_window",
        "min_loss_scale",
        "hysteresis",
        "consecutive_hysteresis",
    )
)

HALF = ("fp16", "bf16")


class Seen(checks.Seen):
    """A config of DeepSpeed in the form that the checks get."""

    @property
    def at(self) -> Release:
        """The release of DeepSpeed that the config is for."""
        return release(self.context.version)

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(self.values[ZERO + "stage"])

    @property
    def has_pipeline(self) -> bool:
        """Whether the layers are split over pipeline ranks."""
        return int(self.values["code.pipeline_stages"]) > 1

    @property
    def precision(self) -> str:
        """The training precision: fp16, bf16 or fp32."""
        return next((name for name in HALF if self[f"{name}.enabled"]), "fp32")


def offloads_optimizer(values: Flat) -> bool:
    """Return whether the config offloads the optimizer, so that its step runs on the CPU."""
    return bool(values.get(OFFLOAD + ".device", "none") != "none")


def keeps_wide_masters(values: Flat) -> bool:
    """Return whether DeepSpeed uses its BF16_Optimizer, which keeps masters and moments in fp32
    whatever the keys of bf16 say (runtime/engine.py: _do_optimizer_sanity_check).
    """
    wide = values.get("data_types.grad_accum_dtype") == "fp32" and not offloads_optimizer(values)
    return bool(values.get("bf16.enabled") and values.get(ZERO + "stage") == 1 and wide)


def steps_on_cpu(values: Flat) -> bool:
    """Return whether the optimizer is DeepSpeedCPUAdam. It is taken for one if the script brings
    the optimizer.
    """
    name = str(values.get("optimizer.type") or "adam").lower()
    return implementation_of(values) == "cpu" and name in ("adam", "adamw")


def implementation_of(values: Flat) -> str:
    """Return the implementation of an optimizer that the settings select: torch, cpu or fused."""
    return (
        "torch"
        if values.get("optimizer.params.torch_adam")
        else "cpu"
        if offloads_optimizer(values)
        else "fused"
    )


def form_of(values: Flat, at: Release, kind: str, name: str) -> Type | None:
    """Return the implementation of an optimizer or scheduler that DeepSpeed uses with these
    settings (runtime/engine.py, `get_optimizer_configuration`).
    """
    forms = at.forms(kind, name)
    fitting = [form for form in forms if form.form == implementation_of(values)]
    # Adagrad has no fused form: without offload it is torch's,
    # the first. A type with one form has that one in any case.
    return next(iter(fitting or forms), None)
