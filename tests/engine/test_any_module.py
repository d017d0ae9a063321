"""ZeRO 3 of modules that are neither a list of layers nor models of Hugging Face: they are sharded by the modules that
they repeat, with the bytes of the layout and the numbers of torch alone.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bridge.engine
import compat.deepspeed as deepspeed
from bridge.engine.runner import Engine
from bridge.plan.plan import Plan
from tests.engine.pool import Run

WIDTH, BLOCKS = 8, 8


class Residual(nn.Module):
    """A block with a residual connection."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, stream: Tensor, scale: Tensor | None = None) -> Tensor:
        found: Tensor = self.outer(torch.tanh(self.inner(self.norm(stream))))
        return stream + (found if scale is None else found * scale)


class Listed(nn.Module):
    """A list of blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Residual() for _ in range(BLOCKS))

    def forward(self, inputs: Tensor) -> Tensor:
        stream = self.first(inputs)
        for block in self.blocks:
            stream = block(stream)
        found: Tensor = self.last(stream)
        return found


class Named(Listed):
    """Blocks under names of their own."""

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            self.add_module(f"block{number}", block)
        del self.blocks

    def forward(self, inputs: Tensor) -> Tensor:
        stream = self.first(inputs)
        for number in range(BLOCKS):
            stream = self.get_submodule(f"block{number}")(stream)
        found: Tensor = self.last(stream.relu())
        return found


class Nested(Listed):
    """Blocks in a Sequential, which the module calls as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks)  # type: ignore[assignment]

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.last(self.blocks(self.first(inputs)))
        return found


class Scaled(Listed):
    """Blocks that also take what the model computes from a second input, and a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.ones(WIDTH))
        self.gate = nn.Linear(2, WIDTH)

    def forward(self, inputs: Tensor, beside: Tensor) -> Tensor:
        stream, scale = self.first(inputs) + self.place, torch.sigmoid(self.gate(beside))
        for block in self.blocks:
            stream = block(stream, scale=scale)
        found: Tensor = self.last(stream)
        return found


class Skipping(Listed):
    """A model in the form of a U, whose later blocks get the outputs of earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.ModuleList(self.blocks[:4]), nn.ModuleList(self.blocks[4:])
        del self.blocks

    def forward(self, inputs: Tensor) -> Tensor:
        stream, kept = self.first(inputs), []
        for block in self.down:
            stream = block(stream)
            kept.append(stream)
        for block in self.up:
            stream = block(stream, kept.pop())
        found: Tensor = self.last(stream)
        return found


class Recurrent(nn.Module):
    """Recurrent layers, which return their state beside the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        stream = self.first(inputs)
        for layer in self.layers:
            stream, _ = layer(stream)
        found: Tensor = self.last(stream)
        return found


class Encoder(nn.Module):
    """Torch's own encoder."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.encoder = nn.TransformerEncoder(block, BLOCKS, enable_nested_tensor=False)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.last(self.encoder(self.first(inputs)))
        return found


class Translating(nn.Module):
    """An encoder and a decoder, whose blocks all take what the encoder makes."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.encoders = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, **sizes) for _ in range(4))
        self.decoders = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, **sizes) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        stream = memory = self.first(inputs)
        for block in self.encoders:
            memory = block(memory)
        for block in self.decoders:
            stream = block(stream, memory)
        found: Tensor = self.last(stream)
        return found


class Picture(nn.Module):
    """Convolutions whose norms keep running means."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(5, WIDTH, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH), nn.ReLU())
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        stream = self.stem(inputs.transpose(1, 2))
        for block in self.blocks:
            stream = stream + block(stream)
        found: Tensor = self.head(stream.transpose(1, 2))
        return found


class Tied(Listed):
    """Layers before and after the blocks that share a weight, and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.after.weight = self.before.weight

    def forward(self, inputs: Tensor) -> dict[str, Any]:  # type: ignore[override]
        stream = self.before(self.first(inputs))
        for block in self.blocks:
            stream = block(stream)
        return {"stream": self.after(stream), "beside": [self.last(stream)]}


class Reaching(Listed):
    """A model whose own forward takes a layer's weight, which no call of the layer shows."""

    def forward(self, inputs: Tensor) -> Tensor:
        stream = self.first(inputs)
        for block in self.blocks:
            stream = block(stream)
        return stream @ self.first.weight


MODULES = (
    *(Listed, Named, Nested, Scaled, Skipping, Recurrent, Encoder, Translating, Picture, Tied),
)


def build(kind: type[nn.Module]) -> nn.Module:
    """A module with the same weights every time."""
    torch.manual_seed(7)
    return kind()


def batch_of(kind: type[nn.Module], step: int, rank: int) -> tuple[Tensor, ...]:
    """Inputs of a microbatch."""
    generator = torch.Generator().manual_seed(31 * step + rank)
    inputs = torch.randn(2, 4, 5, generator=generator)
    return (inputs, inputs[..., :2]) if kind is Scaled else (inputs,)


def loss_of(output: Any) -> Tensor:
    """A loss over all outputs."""
    leaves = torch.utils._pytree.tree_leaves(output)
    return torch.stack([leaf.square().mean() for leaf in leaves]).sum()


def plainly(kind: type[nn.Module], ranks: int, steps: int = 3) -> list[list[float]]:
    """Losses of each step and rank by torch alone."""
    model, found = build(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        states = {name: buffer.clone() for name, buffer in model.named_buffers()}
        losses = []
        for rank in range(ranks):
            for name, buffer in model.named_buffers():
                buffer.copy_(states[name])  # each rank has running means of its own
            loss = loss_of(model(*batch_of(kind, step, rank)))
            (loss / ranks).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        found.append(losses)
    return found


def steps_of(engine: Any, kind: type[nn.Module], rank: int) -> list[float]:
    """Losses of a rank's steps by an engine."""
    found = []
    for step in range(3):
        loss = loss_of(engine(*batch_of(kind, step, rank)))
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    return found


def sizes_of(engine: Engine) -> tuple[dict[str, int], dict[str, int], int, list[str]]:
    """Bytes of an engine's tensors and of its layout, bytes of all weights, and the names of the layers."""
    whole = 4 * sum(math.prod(parameter.shape) for parameter in engine.parameters)
    return (
        engine.bytes(),
        engine.layout.bytes(),
        whole,
        [layer.name for layer in engine.chain.layers],
    )


def natively(rank: int, world: int) -> list[tuple[list[float], Any]]:
    """Losses and sizes of each module on the native engine, which gets a batch as a sample."""
    plan = {"zero.stage": 3, "batch.micro": 2, "optimizer.name": "sgd", "optimizer.lr": 0.05}
    found = []
    for kind in MODULES:
        engine = bridge.engine.initialize(
            build(kind), Plan.of(plan), sample=batch_of(kind, 0, 0), seed=None
        )
        found.append((steps_of(engine, kind, rank), sizes_of(engine)))
    return found


def test_ten_modules_are_sharded_by_their_blocks(run: Run) -> None:
    results = run(2, natively)
    for number, kind in enumerate(MODULES):
        expected = plainly(kind, 2)
        for rank, found in enumerate(results):
            losses, (held, planned, whole, layers) = found[number]
            assert losses == pytest.approx([step[rank] for step in expected], rel=1e-5), kind
            assert held == planned, kind
            assert len(layers) >= BLOCKS + 2, (kind, layers)
            assert held["weights"] < whole, kind


CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
    "zero_optimization": {"stage": 3},
}


def dropped(rank: int, world: int, folder: Path) -> list[Any]:
    """On the drop-in, whose first call shows what a module takes: losses, sizes after it, and the loss of a further step
    in this engine and in one that a checkpoint was loaded into before its first call.
    """
    found = list[Any]()
    for kind in (Scaled, Tied):
        engines = [deepspeed.initialize(model=build(kind), config=CONFIG)[0] for _ in range(2)]
        losses = steps_of(engines[0], kind, rank)
        engines[0].save_checkpoint(folder / kind.__name__)
        engines[1].load_checkpoint(folder / kind.__name__)
        further = [steps_of(engine, kind, rank)[0] for engine in engines]
        steps = [engine.global_steps for engine in engines]
        found.append((losses, [sizes_of(engine.native) for engine in engines], further, steps))
    return found


def test_the_drop_in_shards_a_module_at_its_first_call(run: Run, tmp_path: Path) -> None:
    results = run(2, dropped, tmp_path)
    for number, kind in enumerate((Scaled, Tied)):
        expected = plainly(kind, 2)
        for rank, found in enumerate(results):
            losses, sizes, (one, other), steps = found[number]
            assert losses == pytest.approx([step[rank] for step in expected], rel=1e-5)
            assert one == other and steps == [6, 6]
            for held, planned, whole, layers in sizes:
                assert held == planned and held["weights"] < whole and len(layers) >= BLOCKS + 2


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_first_call_that_is_interrupted_is_made_again(at: int) -> None:
    model, calls = build(Listed), 0
    engine = deepspeed.initialize(model=model, config=CONFIG)[0]
    first: Any = model.first
    usual = first.forward

    def stop(inputs: Tensor) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return usual(inputs)

    first.forward = stop
    with pytest.raises(KeyboardInterrupt):
        engine(*batch_of(Listed, 0, 0))
    first.forward = usual
    assert steps_of(engine, Listed, 0) == pytest.approx([loss for (loss,) in plainly(Listed, 1)])
    assert len(engine.native.chain.layers) == BLOCKS + 2


def test_hooks_run_once_in_the_first_call_on_one_rank() -> None:
    model, out = build(Listed), io.StringIO()
    model.last.register_forward_hook(lambda *_: print("called", file=out))  # type: ignore[union-attr]
    engine = deepspeed.initialize(model=model, config=CONFIG)[0]
    with pytest.warns(UserWarning, match="one layer.*it has hooks"):
        engine(*batch_of(Listed, 0, 0))
    assert out.getvalue() == "called\n"


def test_blocks_are_those_that_are_named() -> None:
    plan = Plan.of({"zero.stage": 3, "batch.micro": 2, "optimizer.name": "sgd"})

    def made(layers: Sequence[str]) -> Engine:
        given = build(Named), plan
        return bridge.engine.initialize(*given, sample=batch_of(Named, 0, 0), layers=layers)

    assert sizes_of(made(("block2", "block3")))[3] == ["first", "block2", "block3", "last"]
    names = [f"block{number}" for number in range(BLOCKS)]
    assert sizes_of(made(()))[3] == ["first", *names, "last"]
    (said,) = made(("block9",)).findings
    assert "layers: the model has no module 'block9'" in said.message
    reaching = bridge.engine.initialize(build(Reaching), plan, sample=batch_of(Reaching, 0, 0))
    assert "so its weights stay whole: blocks.0: " in reaching.findings[0].message
