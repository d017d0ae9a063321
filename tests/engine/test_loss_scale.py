"""Loss scaling: halves on overflow, doubles after a run of good steps, as torch's scaler does."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from bridge.engine.loss_scale import LossScaler
from bridge.plan.plan import Plan


def scaler(**values: float) -> LossScaler:
    """A scaler of an fp16 plan."""
    return LossScaler.of(
        Plan.model_validate({"precision": {"compute": "fp16", "loss_scale": values}})
    )


def test_other_formats_are_not_scaled() -> None:
    found = LossScaler.of(
        Plan.model_validate({"precision": {"compute": "bf16", "loss_scale": {"initial": 8}}})
    )
    found.update(overflow=True)
    assert found.scale == 1.0


def test_a_constant_scale_stays() -> None:
    found = scaler(static=128)
    found.update(overflow=True)
    assert found.scale == 128


def test_overflows_are_tolerated_then_halve_the_scale_down_to_its_minimum() -> None:
    found, scales = scaler(initial=16, hysteresis=2, minimum=4, window=100), []
    for _ in range(5):
        found.update(overflow=True)
        scales.append(found.scale)
    assert scales == [16, 8, 4, 4, 4]


def test_good_steps_double_the_scale_and_restore_the_tolerance() -> None:
    found = scaler(initial=16, hysteresis=2, window=3)
    for overflow in (True, False, False, True, False, False, False):
        found.update(overflow)
    assert found.scale == 16 and found.tolerated == 1


def test_a_late_doubling_divides_what_the_old_scale_multiplied() -> None:
    found, seen = scaler(initial=16, window=2, late=True), []
    for _ in range(5):
        seen.append((found.share, found.scale))
        found.update(overflow=False)
    assert seen == [(1.0, 16), (1.0, 16), (0.5, 16), (1.0, 32), (0.5, 32)]
    assert scaler(initial=16, window=1).share == 1.0


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4))
def test_torch_scales_alike(overflows: list[bool], window: int) -> None:
    scale, good = torch.tensor([2.0**10]), torch.zeros(1, dtype=torch.int32)
    ours = scaler(initial=2.0**10, window=window, hysteresis=1, minimum=0)
    for overflow in overflows:
        torch._amp_update_scale_(scale, good, torch.tensor([float(overflow)]), 2.0, 0.5, window)
        ours.update(overflow)
        assert ours.scale == scale.item()
