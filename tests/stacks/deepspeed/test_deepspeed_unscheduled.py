"""A file without a scheduler: DeepSpeed keeps the rate, and so does what it becomes, unless the script is said to do more."""

from __future__ import annotations

from typing import Any

import pytest

import compat
from bridge.stack.dialect import Dialect
from bridge.stack.rules import Effect
from bridge.translation.lift import lift
from bridge.translation.translate import Result, translate

FILE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
}


def to_megatron(deepspeed: Dialect, code: dict[str, Any] | None = None) -> Result:
    return translate(deepspeed.read(FILE, world_size=2, code=code), compat.load("megatron"))


def test_the_rate_stays(deepspeed: Dialect) -> None:
    result = to_megatron(deepspeed)
    assert (result.config.given["lr_decay_style"], result.config.given["lr_warmup_iters"]) == (
        "constant",
        0,
    )
    assert not [finding for finding in result.findings if finding.effect is Effect.NUMBERS]
    back = translate(result.config, deepspeed)
    meant, kept = result.plan.values().flat(), lift(back.config).values()
    assert (
        meant.pop("optimizer.decay_scope") == "all" and kept["optimizer.decay_scope"] == "matrices"
    ), "nothing decays here"
    assert {path: kept.get(path) for path in meant} == meant
    assert "lr_scheduler" not in back.written.snippet


@pytest.mark.parametrize(
    "target",
    [name for name in compat.names() if name != "deepspeed" and not compat.load(name).about],
)
def test_it_stays_in_every_dialect(deepspeed: Dialect, target: str) -> None:
    schedule = lift(
        translate(deepspeed.read(FILE, world_size=2), compat.load(target)).config
    ).optimizer.schedule
    assert (schedule.name, schedule.warmup_steps) == ("constant", 0)


def test_what_the_script_says_counts(deepspeed: Dialect) -> None:
    given = to_megatron(
        deepspeed, {"scheduler": {"name": "linear", "total_steps": 1000}}
    ).config.given
    found = {
        name: given[name]
        for name in ("lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "min_lr")
    }
    assert found == {
        "lr_decay_style": "linear",
        "lr_decay_iters": 1000,
        "lr_warmup_iters": 0,
        "min_lr": 0.0,
    }


def test_a_schedule_that_no_plan_knows_is_a_loss(deepspeed: Dialect) -> None:
    result = to_megatron(deepspeed, {"scheduler": {"name": "other"}})
    assert "lr_decay_style" not in result.config.given
    (finding,) = (finding for finding in result.findings if finding.path == "code.scheduler.name")
    assert (finding.effect, finding.after) == (Effect.NUMBERS, "linear")


def test_an_optimizer_of_the_script_leaves_it_open(deepspeed: Dialect) -> None:
    source = {name: value for name, value in FILE.items() if name != "optimizer"}
    assert lift(deepspeed.read(source, world_size=2)).optimizer.schedule.name is None


def test_a_trainer_brings_one(deepspeed: Dialect) -> None:
    config = deepspeed.read({**FILE, "gradient_clipping": "auto"}, world_size=2, auto={"clip": 1.0})
    (finding,) = (
        finding
        for finding in config.findings
        if "Trainer" in finding.message and finding.effect is Effect.NUMBERS
    )
    assert finding.path == "scheduler.type"


@pytest.mark.parametrize(
    "kind, freeze",
    [
        ("OneBitAdam", "freeze_step"),
        ("ZeroOneAdam", "var_freeze_step"),
        ("OneBitLamb", "freeze_step"),
    ],
)
@pytest.mark.parametrize("target", ["fast_llm", "megatron", "merak"])
def test_optimizers_of_one_bit_keep_rate_and_decay(
    deepspeed: Dialect, kind: str, freeze: str, target: str
) -> None:
    """They step as AdamW and LAMB do; that they send less is one row."""
    chosen = {"type": kind, "params": {"lr": 1e-4, "weight_decay": 0.1, freeze: 400}}
    result = translate(
        deepspeed.read({**FILE, "optimizer": chosen}, "0.17.0", world_size=2), compat.load(target)
    )
    kept = lift(result.config).optimizer
    assert (kept.name, kept.lr, kept.betas, kept.weight_decay) == ("adamw", 1e-4, (0.9, 0.999), 0.1)
    (row,) = (finding for finding in result.findings if finding.path == "optimizer.type")
    assert row.effect is Effect.NUMBERS and "one bit" in row.message
    assert not [finding for finding in result.findings if "leaves optimizer." in finding.message]
