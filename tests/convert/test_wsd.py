"""Warm up, stay, decay: what each stack's own words for it mean, and that a stack which can say a decay gets it whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import bridge
import compat
from bridge.errors import ConfigError
from bridge.stack.dialect import Config
from bridge.stack.rules import How
from bridge.translation.translate import translate

MEGATRON = (
    "--micro-batch-size 2 --global-batch-size 8 --lr 0.001 --min-lr"
    " 0.0001 --lr-decay-style WSD --lr-wsd-decay-style {shape}"
)
LENGTHS = "--train-iters 100 --lr-warmup-iters 10 --lr-wsd-decay-iters 20"
TEXT = "linear,10,0.0,0.001;constant,70,0.001;{last},20,0.001,0.0001{power}"
POWERS = {"linear": ("linear", ""), "cosine": ("cosine", ""), "minus_sqrt": ("power", ",0.5")}
ALL = ("linear", "cosine", "exponential", "minus_sqrt")


def megatron(shape: str) -> Config:
    return compat.load("megatron").read(
        f"{MEGATRON} {LENGTHS}".format(shape=shape).split(), "0.16.1", 1
    )


def automodel(shape: str) -> Config:
    steps = {
        "lr_warmup_steps": 10,
        "lr_decay_steps": 100,
        "wsd_decay_steps": 20,
        "lr_wsd_decay_style": shape,
    }
    rates = {"lr_decay_style": "WSD", "init_lr": 0.0, "min_lr": 0.0001}
    return compat.load("automodel").read(
        {"optimizer": {"lr": 0.001}, "lr_scheduler": {**rates, **steps}}
    )


def fast_llm(shape: str) -> Config:
    last, power = POWERS[shape]
    rate = {"base": 0.001, "schedule": TEXT.format(last=last, power=power)}
    return compat.load("fast_llm").read(
        {"optimizer": {"learning_rate": rate}, "training": {"train_iters": 100}}
    )


def merak(shape: str) -> Config:
    kwargs = {"num_stable_steps": 70, "num_decay_steps": 20, "min_lr_ratio": 0.1}
    given = {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": kwargs,
        "warmup_steps": 10,
        "max_steps": 100,
    }
    return compat.load("merak").read({"learning_rate": 0.001, **given}, world_size=1)


SAYS = {megatron: ALL, automodel: ALL, fast_llm: tuple(POWERS), merak: ("cosine",)}
"""The decays that a stack has words for."""
CASES = [(source, shape) for source, shapes in SAYS.items() for shape in shapes]
SCHEDULE = "optimizer.schedule."


def schedule(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {
        path.removeprefix(SCHEDULE): value
        for path, value in plan.items()
        if path.startswith(SCHEDULE)
    }


@pytest.mark.parametrize(("source", "shape"), CASES)
def test_the_same_schedule_in_four_languages(source: Any, shape: str) -> None:
    lengths = {"warmup_steps": 10, "total_steps": 100, "decay_steps": 20}
    rates = {"warmup_from": 0.0, "minimum": 0.0001}
    assert schedule(bridge.lift(source(shape)).values()) == {
        "name": "wsd",
        "decay_shape": shape,
        **lengths,
        **rates,
    }


@pytest.mark.parametrize(("source", "shape"), CASES)
def test_who_can_say_a_decay_is_told_it(source: Any, shape: str) -> None:
    plan = bridge.lift(source(shape))
    for target, shapes in SAYS.items():
        dialect = compat.load(target.__name__)
        back = schedule(bridge.lift(bridge.lower(plan, dialect, world_size=1)).values())
        assert (back == schedule(plan.values())) is (shape in shapes)
    assert schedule(bridge.lift(bridge.lower(plan, compat.load("deepspeed"))).values()) == schedule(
        plan.values()
    )


def test_samples_are_steps_and_a_part_of_a_step_is_said() -> None:
    flags = MEGATRON.format(shape="linear").split()
    counted = ["--train-samples", "800", "--lr-warmup-samples", "80", "--lr-wsd-decay-samples"]
    whole, part = (
        compat.load("megatron").read([*flags, *counted, samples], "0.16.1", 1)
        for samples in ("160", "161")
    )
    assert schedule(bridge.lift(whole).values()) == schedule(
        bridge.lift(megatron("linear")).values()
    )
    fates = [fate(config, "lr_wsd_decay_samples") for config in (whole, part)]
    assert fates == [None, How.APPROXIMATE]


def fate(config: Config, path: str) -> How | None:
    findings = bridge.translate(config, compat.load("automodel")).findings
    return next((finding.how for finding in findings if finding.path == path), None)


@pytest.mark.parametrize(
    ("stack", "source", "missing"),
    [
        (
            "megatron",
            [*MEGATRON.format(shape="linear").split(), "--train-iters", "9"],
            "lr_wsd_decay_iters: missing",
        ),
        (
            "automodel",
            {"lr_scheduler": {"lr_decay_style": "WSD"}},
            "lr_scheduler.wsd_decay_steps: missing",
        ),
        (
            "automodel",
            {"lr_scheduler": {"lr_decay_style": "WSD", "wsd_decay_steps": 3}},
            "lr_scheduler.lr_wsd_decay_style: missing",
        ),
    ],
)
def test_a_decay_without_its_length_or_shape_stops_training_and_is_refused(
    stack: str, source: Any, missing: str
) -> None:
    with pytest.raises(ConfigError, match=missing):
        bridge.lift(compat.load(stack).read(source))


@pytest.mark.parametrize(
    "text",
    [
        "constant,-1,0.001",
        "linear,10,0.0,0.001;constant,70,0.002;linear,20,0.001,0.0",
        "linear,10,0.0,0.001;constant,70,0.001;power,20,0.001,0.0,3.0",
        "constant,70,0.001;linear,-1,0.001,0.0",
        "constant,70;linear",
        "",
    ],
)
def test_other_schedules_as_text_are_no_wsd(text: str) -> None:
    rate = {"base": 0.001, "schedule": text}
    config = compat.load("fast_llm").read({"optimizer": {"learning_rate": rate}})
    assert bridge.lift(config).values()[SCHEDULE + "name"] == "constant"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("linear,9,0.0,3e-4;cosine,90,3e-4,3e-5", ("cosine", 3e-4, 9, 99, 3e-5)),
        ("constant,1,0.0;linear,9,0.0,3e-4;linear,90,3e-4,0.0", ("linear", 3e-4, 9, 99, 0.0)),
        ("linear,9,0.0,3e-4;constant,70,3e-4;linear,20,3e-4,0.0", ("wsd", 3e-4, 9, 99, 0.0)),
        # Behind its last stage a schedule keeps the last rate.
        ("linear,9,0.0,3e-4;constant,70,3e-4", ("constant", 3e-4, 9, 100, 0.0)),
        ("linear,9,0.0,3e-4", ("constant", 3e-4, 9, 100, 0.0)),
        # No plan has these shapes: what is left is the highest rate.
        ("cosine,90,0.0,3e-4", ("constant", 3e-4, 0, 100, 0.0)),
        ("linear,9,0.0,1e-4;cosine,90,1e-4,3e-4", ("constant", 3e-4, 0, 100, 0.0)),
    ],
)
@pytest.mark.parametrize("base", [{}, {"base": 1.0}, {"base": 3e-4}])
def test_the_rates_of_a_text_are_those_of_the_run_whatever_the_base_is(
    text: str, expected: tuple[Any, ...], base: dict[str, float]
) -> None:
    source = {
        "training": {"train_iters": 100},
        "optimizer": {"learning_rate": {"schedule": text, **base}},
    }
    plan = bridge.lift(compat.load("fast_llm").read(source))
    course = plan.optimizer.schedule
    assert expected == (
        course.name,
        plan.optimizer.lr,
        course.warmup_steps or 0,
        course.total_steps,
        course.minimum,
    )


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_fast_llm_warms_up_from_above_0_in_a_schedule_as_text(style: str) -> None:
    lengths = "--train-iters 100 --lr-decay-iters 100 --lr-warmup-iters 10 --lr-warmup-init 1e-5 --lr 0.001 --min-lr 0.0001"
    source = compat.load("megatron").read(
        f"--micro-batch-size 2 --global-batch-size 8 {lengths} --lr-decay-style {style}".split(),
        "0.16.1",
        1,
    )
    there = translate(source, compat.load("fast_llm"))
    back = translate(there.config, source.dialect, source.version, 1)
    end = {"constant": "constant,-1,0.001"}.get(style, f"{style},90,0.001,0.0001")
    assert there.config.given["optimizer.learning_rate.schedule"] == (
        f"constant,1,1e-05;linear,10,1e-05,0.001;{end}"
    )
    assert back.config.given["lr_warmup_init"] == 1e-5
    assert schedule(bridge.lift(back.config).values()) == schedule(bridge.lift(source).values())
    assert not [finding for finding in there.findings if finding.path.startswith("lr_")]
