"""The learning-rate schedule of a recipe <-> the plan's; both count optimizer steps."""

from __future__ import annotations

from bridge.rules import Context, Group, convert

STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "inverse-square-root": "inverse_sqrt", "WSD": "wsd"}
FLAGS = {ours: theirs for theirs, ours in STYLES.items()}
L, S = "lr_scheduler.", "optimizer.schedule."
WSD = L + "wsd_decay_steps"


def _read(values: Group, context: Context) -> Group:
    if L + "lr_decay_style" not in values:
        return {S + "name": "constant", S + "warmup_steps": 0}
    name, warmup = STYLES.get(values.get(L + "lr_decay_style") or ""), values.get(L + "lr_warmup_steps")
    ends = name != "constant" or bool(warmup)
    return {
        S + "name": name,
        S + "warmup_steps": warmup,
        S + "warmup_from": values.get(L + "init_lr") if warmup != 0 else None,
        S + "total_steps": values.get(L + "lr_decay_steps") if ends else None,
        S + "minimum": values.get(L + "min_lr") if name != "constant" else None,
    }


def _write(values: Group, context: Context) -> Group:
    name, warmup = values.get(S + "name"), values.get(S + "warmup_steps")
    if name not in FLAGS or (name == "constant" and warmup == 0):
        return {}
    return {
        L + "lr_decay_style": FLAGS[name],
        L + "lr_warmup_steps": warmup,
        L + "init_lr": values.get(S + "warmup_from"),
        L + "lr_decay_steps": values.get(S + "total_steps"),
        L + "min_lr": values.get(S + "minimum"),
        **({WSD: max(1, (values.get(S + "total_steps") or 0) // 10)} if name == "wsd" else {}),
    }


RULE = convert(
    tuple(L + name for name in ("lr_decay_style", "lr_warmup_steps", "init_lr", "lr_decay_steps", "min_lr", "wsd_decay_steps")),
    tuple(S + name for name in ("name", "warmup_steps", "warmup_from", "total_steps", "minimum")),
    _read,
    _write,
    carries={
        L + "lr_decay_style": S + "name",
        L + "lr_warmup_steps": S + "warmup_steps",
        L + "init_lr": S + "warmup_from",
        L + "lr_decay_steps": S + "total_steps",
        L + "min_lr": S + "minimum",
        WSD: (),
    },
    blurs=lambda values: values.get(L + "lr_decay_style") == "WSD",
    lossy="a Plan does not hold the length of WSD's last decay, which becomes a tenth of the schedule",
    note="the length of the last decay is no part of a Plan",
    source="optim/optimizer.py: LRSchedulerConfig.build; optim/scheduler.py: OptimizerParamScheduler",
)
