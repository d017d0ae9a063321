"""`communication_data_type` beside DeepSpeed: what data ranks send is in that format, and losses and weights are the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from bridge.engine import initialize
from bridge.engine.formats import TORCH
from bridge.layout.shard import BYTES
from bridge.stack import registry
from bridge.translation.lift import lift
from tests.engine.dropin_scripts import module
from tests.engine.test_fp16 import allowed, weights

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
ROWS, STEPS, WEIGHTS = 4, 6, 16 * 32 + 32 + 32 * 4 + 4
REDUCTIONS = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all_single",
)


@dataclass(frozen=True)
class Seen:
    """What one rank saw: losses, weights at the end, and bytes of what it sent of gradients in a step, by format."""

    losses: list[float]
    weights: list[Tensor]
    sent: dict[str, int]
    counted: int
    said: tuple[str, ...]


@contextmanager
def listening(sent: dict[str, int]) -> Iterator[None]:
    """Count the bytes of every sum over ranks that is as long as a layer's bias or longer, whoever starts it, by format."""
    names, inside = {dtype: name for name, dtype in TORCH.items()}, [False]
    found = [name for name in REDUCTIONS if hasattr(torch.distributed, name)]

    def listen(call: Any) -> Any:
        def called(*given: Any, **named: Any) -> Any:
            whole = max(
                (one for one in (*given, *named.values()) if isinstance(one, Tensor)),
                key=Tensor.numel,
            )
            outer, inside[0] = inside[0], True
            if not outer and whole.numel() > 30:
                sent[names[whole.dtype]] = (
                    sent.get(names[whole.dtype], 0) + whole.numel() * whole.element_size()
                )
            try:
                return call(*given, **named)
            finally:
                inside[0] = outer

        return called

    with ExitStack() as stack:
        stack.enter_context(
            patch.multiple(
                torch.distributed,
                **{name: listen(getattr(torch.distributed, name)) for name in found},
            )
        )
        if (backend := getattr(sys.modules.get("deepspeed.comm.comm"), "cdb", None)) is not None:
            # DeepSpeed took hold of torch's function when it started.
            kept = backend.reduce_scatter_function
            stack.enter_context(patch.object(backend, "reduce_scatter_function", listen(kept)))
        yield


def microbatches(level: int) -> int:
    """Of a step. From ZeRO 2 on DeepSpeed exchanges after each of them, and we when a buffer is handed on: one is the same."""
    return 1 if level >= 2 else 2


def trained(rank: int, world: int, name: str, level: int, config: dict[str, Any]) -> Seen:
    """A small model on data that differs by rank; what is sent is counted in the last step."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    given = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": microbatches(level),
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": level},
        "zero_allow_untested_optimizer": True,
        **config,
    }
    with allowed():
        engine, *_ = module(name).initialize(
            model=model, model_parameters=model.parameters(), config=given
        )
    dtype, generator = next(model.parameters()).dtype, torch.Generator().manual_seed(rank)
    losses, sent, counted = list[float](), dict[str, int](), 0
    for _ in range(STEPS):
        sent.clear()
        if name == "compat":
            engine.native.comm.ledger.clear()
        with listening(sent):
            for _ in range(microbatches(level)):
                inputs, targets = (
                    torch.randn(ROWS, 16, generator=generator),
                    torch.randn(ROWS, 4, generator=generator),
                )
                loss = nn.functional.mse_loss(engine(inputs.to(dtype)).float(), targets)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
    if name == "compat":
        counted = engine.native.comm.ledger.totals["reduce gradients"].bytes
    said = tuple(finding.path for finding in engine.native.findings) if name == "compat" else ()
    whole = (
        [weight.detach().float() for weight in model.parameters()]
        if (name, level) == ("deepspeed", 0)
        else weights(name, engine)
    )
    return Seen(losses, whole, sent, counted, said)


def far(one: Seen, other: Seen) -> float:
    """The largest difference between weights."""
    return max(
        float((mine - theirs).abs().max())
        for mine, theirs in zip(one.weights, other.weights, strict=True)
    )


BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 128.0}}
WIDE = {"data_types": {"grad_accum_dtype": "fp32"}}
CASES: list[tuple[str, int, dict[str, Any], str | None]] = [
    *[("fp32", level, {}, "bf16") for level in (0, 1, 2, 3)],
    *[("fp32", level, {}, "fp16") for level in (0, 2)],
    *[("bf16", level, BF16, "fp32") for level in (0, 1, 2, 3)],
    *[("bf16", level, {**BF16, **WIDE}, None) for level in (1, 2, 3)],
    *[("bf16", level, {**BF16, **WIDE}, "fp32") for level in (1, 3)],
    *[("fp16", level, FP16, "fp32") for level in (1, 2, 3)],
]
"""Format of compute, level of ZeRO, further settings, and the format of communication (none: that of compute)."""


@needs_deepspeed
@pytest.mark.parametrize(("compute", "level", "more", "wanted"), CASES)
def test_gradients_are_exchanged_as_deepspeed_exchanges_them(
    run: Any, compute: str, level: int, more: dict[str, Any], wanted: str | None
) -> None:
    config = {**more, **({"communication_data_type": wanted} if wanted else {})}
    exchanged = wanted or compute
    for theirs, ours in zip(
        *(run(2, trained, name, level, config) for name in ("deepspeed", "compat")), strict=True
    ):
        assert set(theirs.sent) == set(ours.sent) == {exchanged}
        assert sum(ours.sent.values()) == ours.counted == BYTES[exchanged] * WEIGHTS
        assert (
            "communication_data_type" not in ours.said and "precision.communicate" not in ours.said
        )
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
        # Without ZeRO the weights that DeepSpeed shows are rounded to the format of compute; and the last bit of an fp32 gradient
        # may decide how it is rounded for its way.
        assert far(ours, theirs) <= (
            2e-3 if level == 0 and compute != "fp32" else 3e-5 if compute == "fp32" else 1e-6
        )


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_the_format_makes_a_difference(run: Any, level: int) -> None:
    fp32, bf16 = (
        run(2, trained, "compat", level, {"communication_data_type": name})[0]
        for name in ("fp32", "bf16")
    )
    assert far(fp32, bf16) > 3e-4
    alone, rounded = (
        run(1, trained, "compat", level, {"communication_data_type": name})[0]
        for name in ("fp32", "bf16")
    )
    assert far(alone, rounded) > 3e-4 and not rounded.sent


class Part(nn.Module):
    """A layer of a pipeline, which takes what it gets in the format of its weights; those begin as that format has them."""

    def __init__(self, inputs: int, outputs: int, compute: str) -> None:
        super().__init__()
        self.inner = nn.Linear(inputs, outputs).to(TORCH[compute]).float()

    def forward(self, inputs: Tensor) -> Tensor:
        """The answer, between -1 and 1."""
        return torch.tanh(self.inner(inputs.to(self.inner.weight.dtype)))


def squared(output: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error in fp32."""
    return nn.functional.mse_loss(output.float(), targets)


def piped(rank: int, world: int, name: str, compute: str, config: dict[str, Any]) -> Seen:
    """Four layers over two stages of two data ranks: DeepSpeed's PipelineModule, or the plan that its config stands for."""
    torch.manual_seed(3)
    parts = [Part(*sizes, compute) for sizes in ((16, 32), (32, 32), (32, 32), (32, 4))]
    given = {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": ROWS, **config}
    if name == "deepspeed":
        deepspeed = module(name)
        net = deepspeed.pipe.PipelineModule(
            parts, num_stages=2, loss_fn=squared, partition_method="uniform"
        )
        with allowed():
            engine, *_ = deepspeed.initialize(
                model=net, model_parameters=[*net.parameters()], config=given
            )
        data = engine.grid.get_data_parallel_rank()
    else:
        read = registry.load("deepspeed").read(given, world_size=world, code={"pipeline_stages": 2})
        engine = initialize(parts, lift(read), squared)
        data = engine.comm.mesh.coordinate(rank, "data")
    losses, sent, generator = list[float](), dict[str, int](), torch.Generator().manual_seed(data)
    for _ in range(STEPS):
        batch = [
            (torch.randn(ROWS, 16, generator=generator), torch.randn(ROWS, 4, generator=generator))
            for _ in "12"
        ]
        sent.clear()
        if name == "native":
            engine.comm.ledger.clear()
        with listening(sent):
            losses.append(float(engine.train_batch(iter(batch) if name == "deepspeed" else batch)))
    if name == "native":
        whole = [value.float().clone() for _, value in engine.state_dict()][4 * (rank // 2) :][:4]
        said = tuple(finding.path for finding in engine.findings)
        return Seen(losses, whole, sent, engine.comm.ledger.totals["reduce gradients"].bytes, said)
    if not config["zero_optimization"]["stage"]:
        return Seen(
            losses, [weight.detach().float() for weight in engine.module.parameters()], sent, 0, ()
        )
    return Seen(losses, weights(name, engine), sent, 0, ())


PIPED: list[tuple[str, int, dict[str, Any], str]] = [
    ("fp32", 0, {}, "bf16"),
    ("fp32", 1, {}, "fp16"),
    ("bf16", 0, BF16, "fp32"),
    ("bf16", 1, {**BF16, **WIDE}, "fp32"),
    ("fp16", 1, FP16, "fp32"),
]


@needs_deepspeed
@pytest.mark.parametrize(("compute", "level", "more", "wanted"), PIPED)
def test_stages_of_a_pipeline_exchange_gradients_as_deepspeeds_do(
    run: Any, compute: str, level: int, more: dict[str, Any], wanted: str
) -> None:
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": level},
        "zero_allow_untested_optimizer": True,
        "communication_data_type": wanted,
        **more,
    }
    for theirs, ours in zip(
        *(run(4, piped, name, compute, config) for name in ("deepspeed", "native")), strict=True
    ):
        assert theirs.sent == ours.sent == {wanted: ours.counted} and ours.counted
        assert "precision.communicate" not in ours.said
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
        assert far(ours, theirs) <= (2e-3 if level == 0 and compute != "fp32" else 3e-5)
