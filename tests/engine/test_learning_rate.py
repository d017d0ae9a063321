"""Learning-rate schedules: torch's, Megatron's and Hugging Face's give the same numbers, and missing lengths are said."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st
from torch.optim import lr_scheduler as torch_schedules

from bridge.engine.learning_rate import learning_rate
from bridge.errors import ConfigError
from bridge.plan.plan import LearningRate

PEAK, LOW = 0.3, 0.03
WARMUP, TOTAL = 5, 25


def ours(name: str, steps: int = 40, **more: float | str) -> list[float]:
    """Our learning rates, warmup included."""
    schedule = LearningRate.model_validate(
        {"name": name, "warmup_steps": WARMUP, "total_steps": TOTAL, "minimum": LOW, **more}
    )
    return [learning_rate(PEAK, schedule, step) for step in range(steps)]


def theirs(decay: str, steps: int = 40) -> list[float]:
    """The same shape put together from torch's schedulers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], PEAK)
    warmup = torch_schedules.LambdaLR(optimizer, lambda step: step / WARMUP)
    after: torch_schedules.LRScheduler = torch_schedules.CosineAnnealingLR(
        optimizer, TOTAL - WARMUP, LOW
    )
    if decay == "linear":
        after = torch_schedules.LinearLR(optimizer, 1.0, LOW / PEAK, TOTAL - WARMUP)
    schedule = torch_schedules.SequentialLR(optimizer, [warmup, after], [WARMUP])
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_decays_are_torchs(name: str) -> None:
    assert ours(name)[: TOTAL + 1] == pytest.approx(theirs(name)[: TOTAL + 1])
    assert ours(name)[TOTAL:] == pytest.approx([LOW] * 15)


MEGATRON = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse_sqrt": "inverse-square-root",
    "wsd": "WSD",
}
DECAYS = ("linear", "cosine", "exponential", "minus_sqrt")
SHAPES = [
    *((name, 7, "linear") for name in MEGATRON if name != "wsd"),
    *product(["wsd"], (0, 1, 7, 20, 23, 30), DECAYS),
]
"""Names with the length and the shape of a decay, which only the last looks at; longer ones reach into the warmup."""


@pytest.mark.parametrize(("name", "steps", "shape"), SHAPES)
@pytest.mark.parametrize("warmup", [0, WARMUP])
def test_every_step_is_megatrons(name: str, steps: int, shape: str, warmup: int) -> None:
    core = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], PEAK)
    decay = {"wsd_decay_steps": steps, "lr_wsd_decay_style": shape}
    lengths = {
        "lr_warmup_steps": warmup,
        "lr_decay_steps": TOTAL,
        "wd_incr_steps": 1,
        "wd_incr_style": "constant",
    }
    rates = {"init_lr": 0.01, "max_lr": PEAK, "min_lr": LOW, "start_wd": 0.0, "end_wd": 0.0}
    theirs = core.OptimizerParamScheduler(
        optimizer, lr_decay_style=MEGATRON[name], **rates, **lengths, **decay
    )

    def rates_of_theirs() -> Iterator[float]:
        for _ in range(TOTAL + 5):
            yield optimizer.param_groups[0]["lr"]
            theirs.step(1)

    found = ours(
        name, TOTAL + 5, warmup_steps=warmup, warmup_from=0.01, decay_steps=steps, decay_shape=shape
    )
    assert found == pytest.approx(list(rates_of_theirs()), rel=1e-12)


@pytest.mark.parametrize(
    ("decay", "shape"), [(1, "cosine"), (7, "cosine"), (20, "linear"), (20, "1-sqrt")]
)
def test_wsd_is_hugging_faces(decay: int, shape: str) -> None:
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], PEAK)
    lengths = {
        "num_stable_steps": TOTAL - WARMUP - decay,
        "num_decay_steps": decay,
        "min_lr_ratio": LOW / PEAK,
    }
    theirs = transformers.get_wsd_schedule(optimizer, WARMUP, decay_type=shape, **lengths)
    found = ours(
        "wsd",
        TOTAL + 5,
        warmup_from=LOW,
        decay_steps=decay,
        decay_shape=shape.replace("1-", "minus_"),
    )
    assert found == pytest.approx(
        [PEAK * theirs.lr_lambdas[0](step) for step in range(TOTAL + 5)], rel=1e-12
    )


def test_wsd_holds_the_peak_and_decays_at_the_end() -> None:
    found = ours("wsd", total_steps=100, steps=101)
    assert found[WARMUP:91] == pytest.approx([PEAK] * (91 - WARMUP))
    assert found[95] == pytest.approx((PEAK + LOW) / 2) and found[100] == pytest.approx(LOW)


def test_constant_and_inverse_root() -> None:
    assert ours("constant")[WARMUP:] == [PEAK] * 35
    assert ours("inverse_sqrt")[4 * WARMUP] == pytest.approx(PEAK / 2)


def test_warmup_starts_where_it_is_told() -> None:
    assert ours("constant", warmup_from=0.1)[:2] == pytest.approx([0.1, 0.14])


@given(
    st.sampled_from(["constant", "linear", "cosine", "inverse_sqrt", "wsd"]),
    st.integers(0, 30),
    st.integers(1, 60),
)
def test_rates_stay_between_floor_and_peak_and_never_rise_after_warmup(
    name: str, warmup: int, total: int
) -> None:
    schedule = LearningRate.model_validate(
        {"name": name, "warmup_steps": warmup, "total_steps": total, "minimum": LOW}
    )
    found = [learning_rate(PEAK, schedule, step) for step in range(80)]
    assert all(0 <= rate <= PEAK + 1e-12 for rate in found)
    assert all(
        rate >= following - 1e-12
        for rate, following in zip(found[warmup:], found[warmup + 1 :], strict=False)
    )


def test_a_decay_needs_its_length() -> None:
    with pytest.raises(
        ConfigError, match=r"total_steps: not set, but schedule cosine needs the number of steps"
    ):
        learning_rate(PEAK, LearningRate(name="cosine"), 3)
