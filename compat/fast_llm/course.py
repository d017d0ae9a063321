"""The course of a run: Fast-LLM's length, seed and limits <-> the plan's."""

from __future__ import annotations

from bridge.rules import EFFECTS, Context, Effect, Group, convert, counted, each_only_ours, rename
from compat.fast_llm import intervals

RANKS = "model.distributed."
TIMEOUTS = (RANKS + "timeout", RANKS + "distributed_timeout")


def _timeout(values: Group, context: Context) -> Group:
    return {TIMEOUTS[0 if context.since("0.3.0") else 1]: values.get("run.timeout")}


RULES = (
    convert(
        "training.train_iters",
        "run.steps",
        lambda values, context: {"run.steps": values.get("training.train_iters") or None},
        lambda values, context: {"training.train_iters": values.get("run.steps")},
        effect=EFFECTS["run.steps"],
        lossy="a Plan has no run of 0 steps, which is Fast-LLM's default",
        source="engine/training/config.py: train_iters",
    ),
    rename(RANKS + "seed", "run.seed", source="engine/distributed/config.py: seed"),
    counted("training.num_workers", "run.loaders"),
    convert(
        TIMEOUTS,
        "run.timeout",
        lambda values, context: {"run.timeout": next((values[path] for path in TIMEOUTS if values.get(path)), None)},
        _timeout,
        effect=EFFECTS["run.timeout"],
        source="engine/distributed/config.py: timeout",
    ),
    convert(
        RANKS + "backend",
        "run.backend",
        lambda values, context: {"run.backend": values.get(RANKS + "backend")},
        lambda values, context: {RANKS + "backend": values.get("run.backend")} if _known(values) else {},
        effect=Effect.COST,
        lossy="Fast-LLM runs on nccl or gloo",
    ),
    rename(RANKS + "force_cpu_initialization", "run.host_init", source="engine/distributed/config.py: force_cpu_initialization"),
    *intervals.RULES,
    *each_only_ours(
        "run.epochs",
        "run.save_optimizer",
        "run.save_random",
        "run.load_optimizer",
        "run.load_random",
        "run.collect_interval",
        "run.timers",
        note="Fast-LLM has no such setting",
    ),
)


def _known(values: Group) -> bool:
    return values.get("run.backend") in ("nccl", "gloo")
