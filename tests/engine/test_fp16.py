"""fp16 beside DeepSpeed, step by step: the loss scale, which steps are skipped, and the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.engine.dropin_scripts import module

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
ROWS, STEPS = 4, 20
Seen = tuple[list[float], list[int], list[Tensor]]


@contextmanager
def allowed() -> Iterator[None]:
    """DeepSpeed takes fp16 on any processor: it asks for fast products, and torch has slow ones where there are none."""
    if find_spec("deepspeed") is None:
        yield
        return
    from deepspeed.accelerator import get_accelerator

    with patch.object(type(get_accelerator()), "is_fp16_supported", lambda accelerator: True):
        yield


def trained(
    rank: int,
    world: int,
    name: str,
    level: int,
    steps: int,
    fp16: Mapping[str, Any],
    more: Mapping[str, Any],
) -> Seen:
    """Loss scale and skipped steps after each step, and the weights at the end, of a small model on data that differs by rank."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": level},
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True, **fp16},
        **more,
    }
    with allowed():
        engine, *_ = module(name).initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
    generator = torch.Generator().manual_seed(rank)
    scales, skipped = [], []
    for _ in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            inputs, targets = (
                torch.randn(ROWS, 16, generator=generator),
                torch.randn(ROWS, 4, generator=generator),
            )
            engine.backward(nn.functional.mse_loss(engine(inputs.half()).float(), targets))
            engine.step()
        scales.append(
            float(engine.optimizer.loss_scale if name == "deepspeed" else engine.cur_scale)
        )
        skipped.append(engine.skipped_steps)
    return scales, skipped, weights(name, engine)


def weights(name: str, engine: Any) -> list[Tensor]:
    """Every parameter whole, in fp32."""
    if name == "compat":
        return [whole.float().clone() for _, whole in engine.native.state_dict()]
    from deepspeed.utils import safe_get_full_fp32_param

    return [safe_get_full_fp32_param(weight) for weight in engine.module.parameters()]


def compared(run: Any, *arguments: Any) -> tuple[bool, int]:
    """Run both, hold them against each other; whether the scale ever rose, and how many steps were skipped.

    Where it rises, DeepSpeed divides that step's gradients by the new scale instead of the old one (runtime/zero/
    stage_1_and_2.py: step calls _update_scale before unscale_and_clip_grads), so they are half as large; ours are not.
    """
    theirs, ours = (run(2, trained, name, *arguments) for name in ("deepspeed", "compat"))
    rose = any(after > before for before, after in pairwise(ours[0][0]))
    for expected, found in zip(theirs, ours, strict=True):
        assert found[:2] == expected[:2]
        for mine, other in zip(found[2], () if rose else expected[2], strict=not rose):
            assert torch.allclose(mine, other, rtol=0, atol=1e-6)
    return rose, ours[0][1][-1]


@needs_deepspeed
@pytest.mark.parametrize("power", [8, 12, 16, 17, 20, 24])
def test_a_constant_scale_skips_what_deepspeed_skips(run: Any, power: int) -> None:
    level, gas = power // 4 % 3 + 1, power // 4 % 2 + 1
    rose, skipped = compared(
        run, level, 4, {"loss_scale": 2**power}, {"gradient_accumulation_steps": gas}
    )
    assert not rose and skipped == (0 if power <= 16 else 4 if power >= 20 else skipped)


@needs_deepspeed
@pytest.mark.parametrize(
    ("power", "hysteresis", "window", "rises"),
    [
        (8, 1, 3, True),
        (16, 1, 2, True),
        (20, 2, 1, True),
        (12, 1, 1000, False),
        (24, 1, 1000, False),
        (24, 3, 1000, False),
    ],
)
def test_a_dynamic_scale_follows_deepspeeds(
    run: Any, power: int, hysteresis: int, window: int, rises: bool
) -> None:
    fp16 = {"initial_scale_power": power, "hysteresis": hysteresis, "loss_scale_window": window}
    fp16["consecutive_hysteresis"] = power == 16
    rose, skipped = compared(run, power // 4 % 3 + 1, STEPS, fp16, {})
    assert rose == rises and bool(skipped) == (power > 12)


def far(rank: int, world: int, level: int) -> tuple[float, float]:
    """The gradient norm where each rank's gradients fit fp16 and their sum does not, and what it should be."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-9}},
        "zero_optimization": {"stage": level},
        "fp16": {"enabled": True, "loss_scale": 1.0},
    }
    engine = module("compat").initialize(model=model, config=config)[0]
    engine.backward((engine(torch.ones(1, 1).half()).float() * 50_000).sum())
    engine.step()
    return engine.get_global_grad_norm(), 50_000.0


@pytest.mark.parametrize("level", [0, 1, 3])
def test_ranks_sum_gradients_without_an_overflow_that_their_mean_has_not(
    run: Any, level: int
) -> None:
    for found, expected in run(2, far, level):
        assert found == pytest.approx(expected, rel=1e-3)
