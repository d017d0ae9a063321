"""Rules that convert the length, seed and intervals of a Merak run to the plan's fields, and back."""

from __future__ import annotations

from bridge.stack.rules import (
    EFFECTS,
    Context,
    Group,
    Rule,
    convert,
    each_only_ours,
    opposite_switch,
    rename,
)
from bridge.stack.words import above, either, give, nonzero, of

STEPS, EPOCHS = "args.max_steps", "args.num_train_epochs"


def _read_length(values: Group, context: Context) -> Group:
    """Read the length of the run: the number of steps if it is set, else the number of epochs."""
    steps = values.get(STEPS) or 0
    return {"run.steps": steps} if steps > 0 else {"run.epochs": values.get(EPOCHS)}


def _write_length(values: Group, context: Context) -> Group:
    """Write the length of the run. If the plan does not set it, the run ends at the end of the
    learning-rate schedule.
    """
    steps, epochs = values.get("run.steps"), values.get("run.epochs")
    if steps is None and epochs is None:
        steps = values.get("optimizer.schedule.total_steps")
    return {STEPS: steps} if steps else {EPOCHS: epochs}


LENGTH = convert(
    (STEPS, EPOCHS),
    ("run.steps", "run.epochs"),
    _read_length,
    _write_length,
    effect=EFFECTS["run.steps"],
    sees=("optimizer.schedule.total_steps",),
    carries={STEPS: "run.steps", EPOCHS: "run.epochs"},
    lossy="Merak uses the number of epochs only if no number of steps is given",
    source="utils/parameters.py: max_steps; merak_trainer.py: num_train_epochs",
)


def _interval(theirs: str, ours: str) -> Rule:
    """Return the rule for an interval in steps. Merak also accepts a number below 1, which is a
    share of the run.
    """
    return convert(
        theirs,
        ours,
        # A share of the run becomes 1 step: its length in steps may not be known, and the loss is
        # reported.
        lambda values, context: (
            {ours: max(1, round(values[theirs]))} if values.get(theirs) is not None else {}
        ),
        give(theirs, nonzero(ours)),
        effect=EFFECTS[ours],
        blurs=lambda values: (
            values.get(theirs) is not None and values[theirs] != max(1, round(values[theirs]))
        ),
        lossy="stagebridge translates only intervals in whole steps",
    )


KEPT, FINETUNE, TP = "args.save_total_limit", "args.finetune", "init.tp"


def split(theirs: str, ours: str, source: str) -> Rule:
    """Return a rule for a setting of tensor-parallel layers. Such a setting has no effect with one
    tensor rank.
    """
    return convert(
        theirs,
        ours,
        give(ours, of(theirs), above(TP)),
        give(theirs, of(ours), above("parallel.tensor")),
        effect=EFFECTS[ours],
        sees=(TP, "parallel.tensor"),
        lossy="Merak uses this setting only if tensor ranks split layers",
        source=source,
    )


RULES = (
    LENGTH,
    _interval("args.eval_steps", "run.eval_steps"),
    convert(
        KEPT,
        "run.keep_checkpoints",
        give("run.keep_checkpoints", either(above(KEPT, 0), of(KEPT), None)),
        effect=EFFECTS["run.keep_checkpoints"],
        source="core/checkpoint/checkpoint.py: save_total_limit",
    ),
    rename(FINETUNE, "run.weights_only", source="core/checkpoint/checkpoint.py: finetune"),
    split("args.parallel_vocab", "parallel.vocabulary", "merak_args/args.py: parallel_vocab"),
    convert(
        "args.seed",
        "run.seed",
        write=lambda values, context: (
            {"args.seed": values["run.seed"]} if values.get("run.seed", -1) >= 0 else {}
        ),
        effect=EFFECTS["run.seed"],
        lossy="Merak accepts no negative seed",
        source="core/tensor_parallel/model_parallel.py: seeds of ranks",
    ),
    _interval("args.logging_steps", "run.log_interval"),
    _interval("args.save_steps", "run.save_interval"),
    rename("args.dataloader_num_workers", "run.loaders"),
    rename("args.wall_clock_breakdown", "run.timers"),
    opposite_switch("args.no_save_optim", "run.save_optimizer"),
    opposite_switch("args.no_save_rng", "run.save_random"),
    opposite_switch("args.no_load_optim", "run.load_optimizer"),
    opposite_switch("args.no_load_rng", "run.load_random"),
    *each_only_ours(
        "run.eval_interval",
        "run.collect_interval",
        "run.backend",
        "run.timeout",
        note="Merak has no setting for this field",
    ),
)
