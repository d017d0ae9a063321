"""The schedule in the code part gives, step by step, the learning rates of Megatron's own scheduler."""

from __future__ import annotations

import math
from typing import Any

import pytest

import bridge
import compat

core = pytest.importorskip("megatron.core")
torch = pytest.importorskip("torch")

STYLES = ("constant", "linear", "cosine", "inverse-square-root")
DECAYS = tuple(
    f"WSD --lr-wsd-decay-iters {steps} --lr-wsd-decay-style {shape}"
    for steps, shape in enumerate(("linear", "cosine", "exponential", "minus_sqrt"), 8)
)


def factor(snippet: str) -> Any:
    """`lr_factor` and the peak of a generated script, from its definition alone."""
    start, end = snippet.index("peak, minimum"), snippet.index("model =")
    names: dict[str, Any] = {"math": math}
    exec(snippet[start:end], names)
    return names


@pytest.mark.parametrize("style", [*STYLES, *DECAYS])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_it_equals_megatron(style: str, warmup: int) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    flags = f"--micro-batch-size 1 --lr 3e-4 --min-lr 2e-5 --lr-decay-style {style} --train-iters 40 --lr-warmup-init 1e-5"
    config = compat.load("megatron").read(
        [*flags.split(), "--lr-warmup-iters", str(warmup)], core.__version__, 1
    )
    snippet = bridge.translate(config, compat.load("deepspeed")).written.snippet
    still = style == "constant" and not warmup
    assert ("lr_scheduler" in snippet) is not still
    names = {"lr_factor": lambda step: 1.0, "peak": 3e-4} if still else factor(snippet)

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=3e-4)
    real = OptimizerParamScheduler(
        optimizer,
        init_lr=1e-5,
        max_lr=3e-4,
        min_lr=2e-5,
        lr_warmup_steps=warmup,
        lr_decay_steps=40,
        lr_decay_style=style.split()[0],
        wsd_decay_steps=config.effective.get("lr_wsd_decay_iters"),
        lr_wsd_decay_style=config.effective.get("lr_wsd_decay_style"),
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=40,
        wd_incr_style="constant",
    )
    for step in range(45):
        expected = optimizer.param_groups[0]["lr"]
        assert names["lr_factor"](step) * names["peak"] == pytest.approx(expected, rel=1e-12), step
        real.step(1)
