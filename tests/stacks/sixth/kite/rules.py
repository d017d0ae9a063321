"""The table between Kite's settings and `Plan`."""

from __future__ import annotations

from bridge.plan.plan import paths
from bridge.stack.rules import Context, Effect, Group, convert, only_ours, only_theirs, rename

DTYPES = {"full": "fp32", "half": "fp16", "brain": "bf16"}
SIDES = ("batch.micro", "batch.accumulation", "batch.global_")


def _batch(values: Group, context: Context) -> Group:
    micro, steps, data = values["feed.each"], values["feed.times"], values.get("ranks.data")
    return {
        **dict(zip(SIDES, (micro, steps), strict=False)),
        **({"batch.global_": micro * steps * data} if data else {}),
    }


def _feed(values: Group, context: Context) -> Group:
    return {"feed.each": values.get("batch.micro"), "feed.times": values.get("batch.accumulation")}


def _rate(values: Group, context: Context) -> Group:
    return {"optimizer.lr": values.get("update.rate", values.get("update.lr"))}


def _named(values: Group, context: Context) -> Group:
    return {"update.rate" if context.since("2.0") else "update.lr": values.get("optimizer.lr")}


def _spread(values: Group, context: Context) -> Group:
    """As the plan says, as far as a pipeline allows."""
    stage, pipeline = values.get("zero.stage"), values.get("parallel.pipeline") or 1
    return {
        "spread": stage
        if stage is None or pipeline == 1 or not context.since("2.0")
        else min(stage, 1)
    }


RULES = (
    rename("ranks.data", "parallel.data"),
    rename("ranks.tensor", "parallel.tensor"),
    rename("ranks.pipeline", "parallel.pipeline"),
    convert(("feed.each", "feed.times"), SIDES, _batch, _feed, sees=("ranks.data",)),
    convert(("update.lr", "update.rate"), "optimizer.lr", _rate, _named),
    rename("update.bound", "optimizer.clip"),
    convert(
        "spread",
        "zero.stage",
        lambda values, context: {"zero.stage": values["spread"]},
        _spread,
        effect=Effect.COST,
        sees=("parallel.pipeline",),
        lossy="Kite 2.0 shards no gradients with a pipeline",
    ),
    convert(
        "numbers",
        "precision.compute",
        lambda values, context: {"precision.compute": DTYPES[values["numbers"]]},
        lambda values, context: {
            "numbers": dict(map(reversed, DTYPES.items())).get(values.get("precision.compute"))
        },
        lossy="Kite has no fp64",
    ),
    only_theirs("tail", "wind", note="no Plan field for Kite's log"),
)
SAID = {path for rule in RULES for path in rule.ours}
TABLE = (
    *RULES,
    only_ours(*(path for path in paths() if path not in SAID), note="Kite has no setting for it"),
)
