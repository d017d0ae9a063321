"""Megatron's learning-rate schedule, in samples or iterations, <-> the plan's, in optimizer steps."""

from __future__ import annotations

from bridge.rules import Context, Group, convert

STYLES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}
FLAGS = {ours: theirs for theirs, ours in STYLES.items()}


def _read(values: Group, context: Context) -> Group:
    total = _steps(values, "lr_decay") or _steps(values, "train")
    return {
        "optimizer.schedule.name": STYLES.get(values.get("lr_decay_style") or ""),
        "optimizer.schedule.total_steps": total,
        "optimizer.schedule.warmup_steps": _warmup(values, total),
        "optimizer.schedule.warmup_from": values.get("lr_warmup_init"),
        "optimizer.schedule.minimum": values.get("min_lr"),
    }


def _steps(values: Group, name: str) -> int | None:
    iterations, samples = values.get(f"{name}_iters"), values.get(f"{name}_samples")
    if iterations or not samples:
        return iterations or None
    batch = values.get("global_batch_size")
    return max(1, round(samples / batch)) if batch else None


def _warmup(values: Group, total: int | None) -> int | None:
    fraction = values.get("lr_warmup_fraction")
    if fraction is None:
        return _steps(values, "lr_warmup") or 0
    return round(fraction * total) if total else None


def _write(values: Group, context: Context) -> Group:
    def schedule(name: str) -> object:
        return values.get(f"optimizer.schedule.{name}")

    return {
        "lr_decay_style": FLAGS.get(str(schedule("name"))),
        "lr_decay_iters": schedule("total_steps"),
        "lr_warmup_iters": schedule("warmup_steps"),
        "lr_warmup_init": schedule("warmup_from"),
        "min_lr": schedule("minimum"),
    }


def _blurs(values: Group) -> bool:
    """Whether a count of samples or a fraction is no whole number of steps, or the shape is Megatron's own."""
    batch, total = values.get("global_batch_size"), _steps(values, "lr_decay") or _steps(values, "train")
    samples = [values.get(name) or 0 for name in ("lr_decay_samples", "lr_warmup_samples", "train_samples")]
    fraction = (values.get("lr_warmup_fraction") or 0) * (total or 0)
    return bool(batch and any(count % batch for count in samples)) or abs(fraction - round(fraction)) > 1e-9


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
    ),
    tuple(f"optimizer.schedule.{name}" for name in ("name", "total_steps", "warmup_steps", "warmup_from", "minimum")),
    _read,
    _write,
    sees=("train_iters", "train_samples", "global_batch_size"),
    blurs=_blurs,
    carries={
        "lr_decay_style": "optimizer.schedule.name",
        "lr_decay_iters": "optimizer.schedule.total_steps",
        "lr_decay_samples": "optimizer.schedule.total_steps",
        "lr_warmup_fraction": "optimizer.schedule.warmup_steps",
        "lr_warmup_iters": "optimizer.schedule.warmup_steps",
        "lr_warmup_samples": "optimizer.schedule.warmup_steps",
        "lr_warmup_init": "optimizer.schedule.warmup_from",
        "min_lr": "optimizer.schedule.minimum",
        "train_iters": "optimizer.schedule.total_steps",
        "train_samples": "optimizer.schedule.total_steps",
    },
    lossy="counts of samples and fractions become whole optimizer steps",
    source="training.py: get_optimizer_param_scheduler; the decay ends with training unless told otherwise",
)
