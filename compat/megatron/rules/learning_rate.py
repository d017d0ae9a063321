"""Rules for the learning-rate schedule. Megatron counts in samples or iterations, the plan in
optimizer steps.
"""

from __future__ import annotations

from bridge.stack.checks import Check
from bridge.stack.rules import Context, Group, convert
from compat.megatron.arguments.steps import check

STYLES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}
FLAGS = {ours: theirs for theirs, ours in STYLES.items()}
ROUNDED = "counts are rounded to whole optimizer steps"
"""The `lossy` text of all rules of counts. They have the same text, so that reports say it once."""
TENTH = 10
"""If a Plan has no length for the decay of WSD, the decay takes the number of steps in the schedule
divided by this. Megatron has no default length.
"""


def _read_schedule(values: Group, context: Context) -> Group:
    # Without a length of its own, the decay ends with training.
    total = steps(values, "lr_decay") or steps(values, "train")
    name = STYLES.get(values.get("lr_decay_style") or "")
    warmup = _warmup(values, total)
    return {
        "optimizer.schedule.name": name,
        "optimizer.schedule.total_steps": total,
        "optimizer.schedule.warmup_steps": warmup,
        # Without warmup, the rate that it starts from takes no effect; under a constant rate, the
        # minimum takes none.
        "optimizer.schedule.warmup_from": values.get("lr_warmup_init") if warmup != 0 else None,
        "optimizer.schedule.minimum": values.get("min_lr") if name != "constant" else None,
        **(_read_wsd(values) if values.get("lr_decay_style") == "WSD" else {}),
    }


def _unit(train_iters: int | None, train_samples: int | None) -> str:
    """Return the unit in which training is counted. Megatron reads only the length of the decay
    that is counted in the same unit.
    """
    return "samples" if train_samples and not train_iters else "iters"


def _lacks(unit: str) -> Check:
    """Return a check that the decay of WSD has a length in `unit`."""
    return check(
        "OptimizerParamScheduler",
        lambda a: (
            a.lr_decay_style == "WSD"
            # A run that only evaluates has no schedule.
            and not a.skip_train
            and _unit(a.train_iters, a.train_samples) == unit
            and a[f"lr_wsd_decay_{unit}"] is None
        ),
        f"lr_wsd_decay_{unit}: missing; lr_decay_style WSD needs it; set the length of the decay",
    )


SCHEDULER_STEPS = (_lacks("iters"), _lacks("samples"))
"""Checks that Megatron makes when it builds the learning-rate schedule."""


def _read_wsd(values: Group) -> Group:
    """Return the length of a WSD schedule's decay in steps, and the shape of the decay."""
    length = f"lr_wsd_decay_{_unit(values.get('train_iters'), values.get('train_samples'))}"
    lengths = {length: values.get(length), "global_batch_size": values.get("global_batch_size")}
    return {
        "optimizer.schedule.decay_steps": (
            None if lengths[length] is None else max(0, steps(lengths, "lr_wsd_decay") or 0)
        ),
        "optimizer.schedule.decay_shape": values.get("lr_wsd_decay_style"),
    }


def steps(values: Group, name: str) -> int | None:
    """Return the number of optimizer steps of a setting that has one flag in iterations and one in
    samples. None if neither flag is set.

    `name` is the common part of both flags, such as `train` or `lr_decay`.
    """
    iterations, samples = values.get(f"{name}_iters"), values.get(f"{name}_samples")
    if iterations or not samples:
        return iterations or None
    batch = values.get("global_batch_size")
    # At least one step: a plan has no schedule of 0 steps.
    return max(1, round(samples / batch)) if batch else None


def becomes(path: str, values: Group) -> str:
    """Return a text that says how a number of samples or a fraction was rounded to whole steps.
    Empty if nothing was rounded.
    """
    value, batch = values.get(path), values.get("global_batch_size")
    if not value:
        return ""
    if path.endswith("_samples") and batch:
        return _rounding_text(f"{value} samples", value / batch, max(1, round(value / batch)))
    total = steps(values, "lr_decay") or steps(values, "train")
    if path == "lr_warmup_fraction" and total:
        return _rounding_text(f"{value} of {total} steps", value * total, round(value * total))
    return ""


def _rounding_text(text: str, exact: float, whole: int) -> str:
    if exact == whole:
        return ""
    # One decimal would show 1999.98 as 2000.0, the rounded number itself.
    near = f"{exact:.1f}" if round(exact, 1) != whole else repr(exact)
    return f"{text} -> {whole} steps, rounded {'up' if whole > exact else 'down'} from {near}"


def _warmup(values: Group, total: int | None) -> int | None:
    fraction = values.get("lr_warmup_fraction")
    if fraction is None:
        return steps(values, "lr_warmup") or 0
    return round(fraction * total) if total else None


def _write_schedule(values: Group, context: Context) -> Group:
    def schedule(name: str) -> object:
        return values.get(f"optimizer.schedule.{name}")

    settings = {
        "lr_decay_style": FLAGS.get(str(schedule("name"))),
        "lr_decay_iters": schedule("total_steps"),
        "lr_warmup_iters": schedule("warmup_steps"),
        "lr_warmup_init": schedule("warmup_from"),
        "min_lr": schedule("minimum"),
        **(_write_wsd(values) if schedule("name") == "wsd" else {}),
    }
    # Megatron refuses a launch that counts some lengths in samples and others in iterations.
    return as_counted(settings, values, context)


def as_counted(settings: Group, values: Group, context: Context) -> Group:
    """Return the values in `settings`. If the original launch counts in samples, numbers of steps
    are converted to samples.
    """
    batch = values.get("batch.global_")
    if not batch or context.had.isdisjoint(SAMPLES):
        return settings
    result = {}
    for name, value in settings.items():
        if name.endswith("_iters"):
            result[name.replace("_iters", "_samples")] = None if value is None else value * batch
        else:
            result[name] = value
    return result


def _write_wsd(values: Group) -> Group:
    """Return the length and the shape of a WSD schedule's decay."""
    length = values.get("optimizer.schedule.decay_steps")
    total = values.get("optimizer.schedule.total_steps")
    if length is None and total:
        length = max(1, total // TENTH)
    return {
        "lr_wsd_decay_iters": length,
        "lr_wsd_decay_style": values.get("optimizer.schedule.decay_shape") or "linear",
    }


SAMPLES = ("lr_decay_samples", "lr_warmup_samples", "train_samples", "lr_wsd_decay_samples")


def _blurs_schedule(values: Group) -> bool:
    """Whether a number of samples, or a fraction of the run, is not a whole number of steps."""
    batch = values.get("global_batch_size")
    total = steps(values, "lr_decay") or steps(values, "train")
    samples = [values.get(name) or 0 for name in SAMPLES]
    fraction = (values.get("lr_warmup_fraction") or 0) * (total or 0)
    # 0.1 x 30 is not exactly 3 in floats, and no loss.
    return (
        bool(batch and any(count % batch for count in samples))
        or abs(fraction - round(fraction)) > 1e-9
    )


RULE = convert(
    (
        "lr_decay_style",
        "lr_decay_iters",
        "lr_decay_samples",
        "lr_warmup_fraction",
        "lr_warmup_iters",
        "lr_warmup_samples",
        "lr_warmup_init",
        "min_lr",
        "lr_wsd_decay_iters",
        "lr_wsd_decay_samples",
        "lr_wsd_decay_style",
    ),
    tuple(
        f"optimizer.schedule.{name}"
        for name in (
            "name",
            "total_steps",
            "warmup_steps",
            "warmup_from",
            "minimum",
            "decay_steps",
            "decay_shape",
        )
    ),
    _read_schedule,
    _write_schedule,
    sees=("train_iters", "train_samples", "global_batch_size", "batch.global_"),
    blurs=_blurs_schedule,
    carries={
        "lr_decay_style": "optimizer.schedule.name",
        "lr_decay_iters": "optimizer.schedule.total_steps",
        "lr_decay_samples": "optimizer.schedule.total_steps",
        "lr_warmup_fraction": "optimizer.schedule.warmup_steps",
        "lr_warmup_iters": "optimizer.schedule.warmup_steps",
        "lr_warmup_samples": "optimizer.schedule.warmup_steps",
        "lr_warmup_init": "optimizer.schedule.warmup_from",
        "min_lr": "optimizer.schedule.minimum",
        "lr_wsd_decay_iters": "optimizer.schedule.decay_steps",
        "lr_wsd_decay_samples": "optimizer.schedule.decay_steps",
        "lr_wsd_decay_style": "optimizer.schedule.decay_shape",
    },
    lossy=ROUNDED,
    becomes=becomes,
    source="training.py: get_optimizer_param_scheduler; by default, the decay ends with training",
)
