"""Rules that convert the length, seed and time limits of a Fast-LLM run to the plan's fields, and
back.
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
)
from bridge.stack.words import first, give, nonzero
from compat.fast_llm.rules import intervals

RANKS = "model.distributed."
TIMEOUTS = (RANKS + "timeout", RANKS + "distributed_timeout")
"""Paths of the time limit of a collective: the path since 0.3.0, then the path before 0.3.0."""


def _timeout(values: Group, context: Context) -> Group:
    newer, older = TIMEOUTS
    return {newer if context.since("0.3.0") else older: values.get("run.timeout")}


def _backend(values: Group, context: Context) -> Group:
    # Another library would be refused, so the setting is left to its default and the loss is
    # reported.
    backend = values.get("run.backend")
    return {RANKS + "backend": backend} if backend in ("nccl", "gloo") else {}


RULES = (
    convert(
        "training.train_iters",
        "run.steps",
        give("run.steps", nonzero("training.train_iters")),
        effect=EFFECTS["run.steps"],
        lossy="Fast-LLM has a default of 0 steps; stagebridge does not translate runs without steps",
        source="engine/training/config.py: train_iters",
    ),
    rename(RANKS + "seed", "run.seed", source="engine/distributed/config.py: seed"),
    count_rule("training.num_workers", "run.loaders"),
    convert(
        TIMEOUTS,
        "run.timeout",
        give("run.timeout", first(*TIMEOUTS)),
        _timeout,
        effect=EFFECTS["run.timeout"],
        source="engine/distributed/config.py: timeout",
    ),
    convert(
        RANKS + "backend",
        "run.backend",
        write=_backend,
        effect=Effect.COST,
        lossy="Fast-LLM runs on nccl or gloo",
    ),
    rename(
        RANKS + "force_cpu_initialization",
        "run.host_init",
        source="engine/distributed/config.py: force_cpu_initialization",
    ),
    *intervals.RULES,
    *each_only_ours(
        "run.epochs",
        "run.save_optimizer",
        "run.save_random",
        "run.load_optimizer",
        "run.load_random",
        "run.collect_interval",
        "run.timers",
        note="Fast-LLM has no setting for this field",
    ),
)
