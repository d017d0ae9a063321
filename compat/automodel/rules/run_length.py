"""Rules for the length, seed and intervals of a run, between AutoModel's settings and the plan's
fields.
"""

from __future__ import annotations

from bridge.stack.rules import (
    EFFECTS,
    Context,
    Effect,
    Group,
    convert,
    count_rule,
    each_only_ours,
    rename,
    scale_rule,
)
from bridge.stack.words import beyond, every, first, give, has_value, look_up, of, off
from compat.automodel.rules.pipeline import D

STEP = "step_scheduler."
SEEDS = ("seed", "rng.seed")
BACKENDS = ("dist_env.backend", D + "backend")


SEED = convert(
    SEEDS,
    "run.seed",
    # The first that is given: the training recipes read the top level, and ignore the section.
    give("run.seed", first(*SEEDS)),
    give("seed", of("run.seed")),
    effect=EFFECTS["run.seed"],
    blurs=lambda values: (
        None not in (values.get("seed"), values.get("rng.seed"))
        and values["seed"] != values["rng.seed"]
    ),
    lossy="stagebridge translates only one of the recipe's two seeds",
    source="recipes/llm/train_ft.py: StatefulRNG(seed=cfg.get('seed', 42)); the section rng is not read",
)


BACKEND = convert(
    BACKENDS,
    "run.backend",
    lambda values, context: {
        "run.backend": next((values[path] for path in BACKENDS if values.get(path)), None)
    },
    give(BACKENDS[0], of("run.backend")),
    effect=Effect.COST,
    source="components/distributed/init_utils.py: initialize_distributed",
)

EPOCHS = convert(
    STEP + "num_epochs",
    "run.epochs",
    lambda values, context: (
        {"run.epochs": float(values[STEP + "num_epochs"])}
        if values.get(STEP + "num_epochs")
        else {}
    ),
    # A plan may have parts of an epoch.
    lambda values, context: (
        {STEP + "num_epochs": int(values["run.epochs"])}
        if values.get("run.epochs") is not None and float(values["run.epochs"]).is_integer()
        else {}
    ),
    effect=EFFECTS["run.epochs"],
    lossy="AutoModel counts whole epochs",
    source="components/training/step_scheduler.py: num_epochs",
)


EVERY, SAVED = STEP + "ckpt_every_steps", "checkpoint.enabled"


def _read_saves(values: Group, context: Context) -> Group:
    # With checkpoints off the interval has no effect; a plan tells that by an interval of 0.
    every = 0 if values.get(SAVED) is False else values.get(EVERY)
    return {} if every is None else {"run.save_interval": max(0, every)}


SAVES = convert(
    (EVERY, SAVED),
    "run.save_interval",
    _read_saves,
    lambda values, context: (
        {SAVED: False}
        if values.get("run.save_interval") == 0
        else {EVERY: values.get("run.save_interval")}
    ),
    effect=EFFECTS["run.save_interval"],
    blurs=every(off(SAVED), has_value(EVERY)),
    lossy="if checkpoints are off, the interval between them is lost",
    source="components/checkpoint/checkpointing.py: save_model returns if config.enabled is off",
)

DISPATCHERS = {"deepep": "deepep", "hybridep": "hybridep"}
"""The plan's name for each token dispatcher of AutoModel."""
DISPATCHER = "model.backend.dispatcher"
WRITTEN = {ours: theirs for theirs, ours in DISPATCHERS.items()}

RULES = (
    rename("wandb.project", "run.project"),
    rename("wandb.entity", "run.entity"),
    rename("checkpoint.is_async", "run.async_save"),
    rename(
        "model.backend.gate_precision",
        "precision.router",
        source="components/models/common/utils.py: BackendConfig",
    ),
    convert(
        DISPATCHER,
        "parallel.dispatcher",
        give("parallel.dispatcher", look_up(DISPATCHERS, DISPATCHER)),
        give(DISPATCHER, look_up(WRITTEN, "parallel.dispatcher")),
        effect=EFFECTS["parallel.dispatcher"],
        blurs=beyond(DISPATCHER, *DISPATCHERS),
        lossy="stagebridge translates only two of AutoModel's token dispatchers, DeepEP and HybridEP",
        source="components/models/common/utils.py: BackendConfig.dispatcher",
    ),
    SEED,
    EPOCHS,
    BACKEND,
    rename(
        STEP + "max_steps", "run.steps", source="components/training/step_scheduler.py: max_steps"
    ),
    SAVES,
    count_rule(STEP + "val_every_steps", "run.eval_interval", never=None),
    rename(STEP + "gc_every_steps", "run.collect_interval"),
    count_rule(STEP + "log_remote_every_steps", "run.log_interval", never=None),
    count_rule("dataloader.num_workers", "run.loaders"),
    scale_rule("dist_env.timeout_minutes", "run.timeout", 60.0),
    *each_only_ours(
        "run.save_optimizer",
        "run.save_random",
        "run.load_optimizer",
        "run.load_random",
        "run.timers",
        note="AutoModel has no setting for this field",
    ),
)
