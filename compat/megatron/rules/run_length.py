"""Rules between Megatron's arguments of run length, seed and intervals, and the plan's fields. The plan
counts in optimizer steps.
"""

from __future__ import annotations

from bridge.stack.rules import (
    EFFECTS,
    Context,
    Effect,
    Group,
    Rule,
    convert,
    count_rule,
    each_only_ours,
    opposite_switch,
    rename,
)
from bridge.stack.words import above, among, every, give, has_field, no, nonzero, of, on
from compat.megatron.rules.learning_rate import ROUNDED, as_counted, becomes, steps

EVERY = "manual_gc_interval"
MINUTES = "distributed_timeout_minutes"


LENGTH = convert(
    ("train_iters", "train_samples"),
    "run.steps",
    lambda values, context: {"run.steps": steps(values, "train")},
    lambda values, context: as_counted({"train_iters": values.get("run.steps")}, values, context),
    sees=("global_batch_size", "batch.global_"),
    blurs=lambda values: bool(
        values.get("train_samples")
        and values.get("global_batch_size")
        and values["train_samples"] % values["global_batch_size"]
    ),
    lossy=ROUNDED,
    becomes=becomes,
    source="training.py: update_train_iters",
)


COLLECTS = convert(
    ("manual_gc", EVERY),
    "run.collect_interval",
    # An interval of 0, the default, means that training collects nothing.
    give("run.collect_interval", of(EVERY), every(on("manual_gc"), above(EVERY, 0))),
    give({"manual_gc": True, EVERY: of("run.collect_interval")}, when=on("run.collect_interval")),
    effect=Effect.COST,
    blurs=every(on("manual_gc"), no(above(EVERY, 0))),
    lossy="stagebridge does not translate --manual-gc without an interval, which collects garbage only around evaluation",
    source="training.py: train, manual_gc",
)


TIMEOUT = convert(
    MINUTES,
    "run.timeout",
    lambda values, context: (
        {"run.timeout": 60.0 * max(1, values[MINUTES])} if values.get(MINUTES) is not None else {}
    ),
    # Megatron counts whole minutes; the shortest timeout that it can express is one.
    lambda values, context: (
        {MINUTES: max(1, round(values["run.timeout"] / 60))} if values.get("run.timeout") else {}
    ),
    effect=EFFECTS["run.timeout"],
    blurs=lambda values: (values.get(MINUTES) or 1) < 1,
    lossy="Megatron's timeout is a whole number of minutes",
    source="initialize.py: timedelta(minutes=args.distributed_timeout_minutes)",
)


def _on(theirs: str, ours: str) -> Rule:
    """Return a rule for a switch that has the same meaning as a boolean plan field."""
    return convert(
        theirs,
        ours,
        give(ours, on(theirs), has_field(theirs)),
        give(theirs, True, on(ours)),
        effect=EFFECTS[ours],
    )


def _rename_rule(theirs: str, ours: str) -> Rule:
    """Return a rule for an argument that is a name. An empty string means that there is no name."""
    return convert(
        theirs, ours, give(ours, nonzero(theirs)), give(theirs, nonzero(ours)), effect=EFFECTS[ours]
    )


SAVES = convert(
    ("async_save", "use_persistent_ckpt_worker"),
    "run.async_save",
    give("run.async_save", on("async_save"), has_field("async_save")),
    # Since 0.16, validate_args switches async_save off without the persistent worker.
    lambda values, context: (
        {
            "async_save": True,
            **({"use_persistent_ckpt_worker": True} if context.since("0.16.0") else {}),
        }
        if values.get("run.async_save")
        else {}
    ),
    effect=EFFECTS["run.async_save"],
    carries={"use_persistent_ckpt_worker": ()},
    note="a setting of how checkpoints are written",
    source="arguments.py: validate_args, since 0.16 only with use_persistent_ckpt_worker",
)
GIVEN, STORED, SCHEDULE = (
    "override_opt_param_scheduler",
    "use_checkpoint_opt_param_scheduler",
    "run.resumed_schedule",
)
CHOSEN = {"given": GIVEN, "checkpoint": STORED}


def _read_resumed(values: Group, context: Context) -> Group:
    if GIVEN not in values:
        return {}
    # Without either flag, Megatron stops if the checkpoint has another schedule than the launch.
    return {SCHEDULE: next((kind for kind, flag in CHOSEN.items() if values.get(flag)), "same")}


RESUMED = convert(
    (GIVEN, STORED),
    SCHEDULE,
    _read_resumed,
    lambda values, context: (
        {CHOSEN[values[SCHEDULE]]: True} if values.get(SCHEDULE) in CHOSEN else {}
    ),
    effect=EFFECTS[SCHEDULE],
    note="the learning-rate schedule that a resumed run uses",
    source="optimizer_param_scheduler.py: _check_and_set",
)

RULES = (
    LENGTH,
    rename("seed", "run.seed", source="initialize.py: _set_random_seed"),
    COLLECTS,
    TIMEOUT,
    count_rule("log_interval", "run.log_interval"),
    count_rule("save_interval", "run.save_interval", never=None),
    count_rule("eval_interval", "run.eval_interval"),
    count_rule("num_workers", "run.loaders"),
    convert(
        "distributed_backend",
        "run.backend",
        write=give("distributed_backend", of("run.backend"), among("run.backend", "nccl", "gloo")),
        effect=Effect.COST,
        lossy="Megatron runs on nccl or gloo",
    ),
    convert(
        "exit_interval",
        "run.exit_interval",
        lambda values, context: (
            {"run.exit_interval": max(0, values["exit_interval"] or 0)}
            if "exit_interval" in values
            else {}
        ),
        give("exit_interval", nonzero("run.exit_interval")),
        effect=EFFECTS["run.exit_interval"],
        source="training.py: checkpoint_and_decide_exit",
    ),
    count_rule("eval_iters", "run.eval_steps"),
    SAVES,
    _on("finetune", "run.weights_only"),
    _on("use_cpu_initialization", "run.host_init"),
    _rename_rule("wandb_project", "run.project"),
    _rename_rule("wandb_entity", "run.entity"),
    RESUMED,
    opposite_switch("no_save_optim", "run.save_optimizer"),
    opposite_switch("no_save_rng", "run.save_random"),
    opposite_switch("no_load_optim", "run.load_optimizer"),
    opposite_switch("no_load_rng", "run.load_random"),
    *each_only_ours("run.epochs", note="Megatron counts steps or samples, not epochs"),
    *each_only_ours(
        "run.timers", note="Megatron selects timers by level (--timing-log-level), not by a switch"
    ),
)
