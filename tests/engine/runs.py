"""What the ranks of a pool run: small trainings on the engine, and the same ones in one plain process."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from bridge.engine import initialize, training
from bridge.engine.data import BYTES, Text
from bridge.engine.models.gpt import GPT, Architecture, mean_cross_entropy, sum_cross_entropy
from bridge.engine.rows import IGNORED
from bridge.engine.runner import Engine
from bridge.errors import BridgeError
from bridge.layout.tensor import TensorPlan
from bridge.plan.plan import Plan

SEQUENCE = 6
SHAPE = Architecture(layers=3, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=29, sequence=SEQUENCE)
STEPS = 3


@dataclass(frozen=True)
class Case:
    """A training run: plan values by dotted path, model shape, sequences in a step, and how it is fed."""

    plan: Mapping[str, Any]
    shape: Architecture = SHAPE
    batch: int = 8
    steps: int = STEPS
    frozen: tuple[str, ...] = ()
    padded: bool = False
    dtype: torch.dtype = torch.float64
    tokens: int = SEQUENCE
    seed: int = 7
    padding: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What a run gave: loss and gradient norm of each step, change of each weight, and what one rank
    counted.
    """

    losses: list[float]
    norms: list[float]
    change: dict[str, Tensor]
    traffic: dict[str, tuple[int, int]]
    predicted: dict[str, tuple[int, int]]
    bytes: dict[str, int]
    predicted_bytes: dict[str, int]
    skipped: int = 0


def model_of(case: Case) -> GPT:
    """The case's model, the same in every process."""
    model = GPT(case.shape, seed=case.seed).to(case.dtype)
    model.embedding.tokens.padding_idx = case.padding
    for name, weight in model.named_parameters():
        weight.requires_grad_(not any(part in name for part in case.frozen))
    return model


def global_batch(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets (batch, sequence) of one step over all ranks; padding makes sequences unequal."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(case.shape.vocab, (case.batch, case.tokens + 1), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    if case.padded:
        lengths = torch.randint(1, case.tokens + 1, (case.batch,), generator=generator)
        targets[torch.arange(case.tokens) >= lengths[:, None]] = IGNORED
    return inputs, targets


def microbatches(case: Case, engine: Engine, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's part of the global batch, microbatch by microbatch."""
    inputs, targets = global_batch(case, step)
    ranks, rank, number = engine.data.size, engine.data.index, engine.accumulation
    for index in range(number):
        rows = torch.arange(case.batch).chunk(number * ranks)[index * ranks + rank]
        yield inputs[rows], targets[rows]


def trained_all(rank: int, world: int, cases: Sequence[Case]) -> list[Outcome]:
    """Several trainings, one after the other."""
    return [trained(rank, world, case) for case in cases]


def trained(rank: int, world: int, case: Case) -> Outcome:
    """Train on the engine; traffic is that of the last step."""
    model, plan = model_of(case), Plan.of(case.plan)
    initial = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    loss = sum_cross_entropy if plan.loss == "per_token" else mean_cross_entropy
    engine = initialize(model, plan, loss, seed=11)
    losses, norms = [], []
    for step in range(case.steps):
        engine.comm.ledger.clear()
        losses.append(engine.train_batch(microbatches(case, engine, step)))
        norms.append(engine.progress.grad_norm)
    traffic = {
        name: (found.count, found.bytes) for name, found in engine.comm.ledger.totals.items()
    }
    predicted = engine.traffic(case.batch * case.tokens // engine.accumulation // engine.data.size)
    return Outcome(
        losses=losses,
        norms=norms,
        change={name: weight - initial[name] for name, weight in engine.state_dict()},
        traffic=traffic,
        predicted={name: (found.count, found.bytes) for name, found in predicted.items()},
        bytes=engine.bytes(),
        predicted_bytes=engine.layout.bytes(),
        skipped=engine.progress.skipped,
    )


def plain(case: Case) -> Outcome:
    """The same training in one process with nothing but torch: one big batch, one optimizer, no buffers."""
    model, settings = model_of(case), Plan.of(case.plan).optimizer
    initial = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = _optimizer(weights, settings)
    losses, norms = [], []
    for step in range(case.steps):
        inputs, targets = global_batch(case, step)
        total, count = sum_cross_entropy(model(inputs), targets)
        loss = total / count
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        norms.append(float(nn.utils.clip_grad_norm_(weights, settings.clip or torch.inf)))
        optimizer.step()
        losses.append(loss.item())
    change = {name: weight.detach() - initial[name] for name, weight in model.named_parameters()}
    return Outcome(losses, norms, change, {}, {}, {}, {})


def _optimizer(weights: list[nn.Parameter], settings: Any) -> torch.optim.Optimizer:
    if settings.name == "sgd":
        return torch.optim.SGD(weights, settings.lr, settings.momentum or 0.0, foreach=False)
    if settings.name == "lion":
        return Lion(
            weights,
            {"lr": settings.lr, "betas": settings.betas, "weight_decay": settings.weight_decay},
        )
    return torch.optim.AdamW(
        weights, settings.lr, eps=settings.eps, weight_decay=settings.weight_decay, foreach=False
    )


class Lion(torch.optim.Optimizer):
    """As its paper has it: the sign of what momentum and gradient make together, and another share of the gradient to keep."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        (group,) = self.param_groups
        first, second = group["betas"]
        for weight in group["params"]:
            moment = self.state[weight].setdefault("moment", torch.zeros_like(weight))
            sign = torch.sign(first * moment + (1 - first) * weight.grad)
            weight.sub_(group["lr"] * (sign + group["weight_decay"] * weight))
            self.state[weight]["moment"] = second * moment + (1 - second) * weight.grad


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest distance between tensors of the same name, relative to the tensor's norm."""
    assert found.keys() == expected.keys()
    return max(_relative(found[name], expected[name]) for name in expected)


def _relative(found: Tensor, expected: Tensor) -> float:
    return float(
        (found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    )


def live_bytes(rank: int, world: int, case: Case) -> tuple[int, dict[str, int], list[int]]:
    """Bytes of all tensors that are alive after a step, less those alive before the model was made;
    the prediction; and bytes of gradients at the update and after the step.
    """
    before = set(_storages())
    engine = initialize(model_of(case), Plan.of(case.plan), mean_cross_entropy)
    gradients: list[int] = []

    def count() -> None:
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in engine.gradients.tensors()
        }
        gradients.append(sum(storages.values()))

    engine.watchers["updated"].append(count)
    engine.train_batch(list(microbatches(case, engine, 0)))
    count()
    kept = {
        tensor.untyped_storage().data_ptr() for tensor in tree_leaves(engine._last)
    }  # if data ends
    predicted = engine.layout.bytes()
    freed = gradients[0] - gradients[1]
    for _ in range(
        LOOKS
    ):  # the thread of a collective lets go of its tensors when it is given time, on a busy machine later
        found = {
            pointer: size for pointer, size in _storages().items() if pointer not in before | kept
        }
        total = sum(size for size in found.values() if size > SMALL)
        if total <= sum(predicted.values()) - freed:
            break
        time.sleep(0.1)
    return total, predicted, gradients


LOOKS = 20
SMALL = 24
"""Bytes of the largest tensor that is not counted: step counters of the optimizer and totals of the loss."""


def _storages() -> dict[int, int]:
    gc.collect()
    kinds = ((thing, type(thing)) for thing in gc.get_objects())
    # another test's compiler may have left fake tensors, which have no memory
    tensors = [
        thing
        for thing, kind in kinds
        if issubclass(kind, Tensor) and not issubclass(kind, FakeTensor)
    ]
    with torch._C.DisableTorchFunctionSubclass():  # also those of weights that are not whole now
        return {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in tensors
        }


def events(rank: int, world: int, case: Case) -> list[str]:
    """What happened, in order, in the second step."""
    engine = initialize(model_of(case), Plan.of(case.plan), mean_cross_entropy)
    engine.train_batch(list(microbatches(case, engine, 0)))
    found = engine.comm.ledger.events = []
    engine.train_batch(list(microbatches(case, engine, 1)))
    return found


def determined(
    rank: int, world: int, case: Case
) -> tuple[list[dict[str, Tensor]], list[list[float]], bool]:
    """Weights and losses of two deterministic runs in one process, and whether torch was told."""
    weights, losses = [], []
    try:
        for _ in range(2):
            engine = initialize(
                model_of(case), Plan.of(case.plan), mean_cross_entropy, seed=11, deterministic=True
            )
            losses.append(
                [engine.train_batch(microbatches(case, engine, step)) for step in range(case.steps)]
            )
            weights.append({name: weight.clone() for name, weight in engine.state_dict()})
        return weights, losses, torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def forwards_first(rank: int, world: int, case: Case, way: str) -> Outcome:
    """Train with two forward passes before backward: their losses added up, or one after the other, or one left out."""
    model, plan = model_of(case), Plan.of(case.plan)
    initial = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    engine = initialize(model, plan, mean_cross_entropy, seed=11)
    losses, norms = [], []
    for step in range(case.steps):
        inputs, targets = global_batch(case, step)
        mine = torch.arange(case.batch).chunk(2 * world)[2 * rank : 2 * rank + 2]
        first, second = (engine(inputs[rows], targets[rows]) for rows in mine)
        if way == "added":
            engine.backward((first + second) / 2)
        elif way == "in turn":
            engine.backward(first)
            engine.backward(second)
        else:
            engine.backward(second)
            engine.backward(engine(inputs[mine[0]], targets[mine[0]]))
        assert engine.step()
        losses.append(engine.progress.loss)
        norms.append(engine.progress.grad_norm)
    assert engine.progress.samples == case.steps * case.batch
    change = {name: weight - initial[name] for name, weight in engine.state_dict()}
    return Outcome(losses, norms, change, {}, {}, {}, {})


def overflowing(rank: int, world: int, case: Case) -> tuple[list[bool], list[bool], float, int]:
    """Three steps; in the second, the last rank's loss is infinite. Which steps updated, by report and by weights."""
    engine = initialize(model_of(case), Plan.of(case.plan), mean_cross_entropy)
    updated, changed = [], []
    for step in range(3):
        before = {name: weight.clone() for name, weight in engine.state_dict()}
        for inputs, targets in microbatches(case, engine, step):
            loss = engine(inputs, targets)
            engine.backward(loss * torch.inf if step == 1 and rank == world - 1 else loss)
        updated.append(engine.step())
        changed.append(
            any(not torch.equal(weight, before[name]) for name, weight in engine.state_dict())
        )
    return updated, changed, engine.scaler.scale, engine.progress.skipped


def fed(
    rank: int, world: int, case: Case, evaluate: bool
) -> tuple[list[float], list[float], Tensor]:
    """DeepSpeed's loop, with evaluation between all calls if asked; losses, evaluation losses, random state at the end."""
    torch.manual_seed(5)
    engine = initialize(model_of(case), Plan.of(case.plan), mean_cross_entropy, seed=11)
    losses, evaluated = [], []
    for step in range(case.steps):
        for batch in microbatches(case, engine, step):
            loss = engine(*batch)
            if evaluate:
                evaluated += [float(engine.eval_batch(batch)), float(engine.eval_batch(batch))]
            engine.backward(loss)
            engine.step()
        losses.append(engine.progress.loss)
    return losses, evaluated, torch.get_rng_state()


class Attention(nn.Module):
    """Attention as a user writes it, with its numbers of heads as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.inner, self.odd = 4, 2, 16, 3
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.out = nn.Linear(16, 16)

    def forward(self, stream: Tensor) -> Tensor:
        """(batch, tokens, 16) to the same."""
        shape = (*stream.shape[:2], -1, 4)
        query = self.query(stream).view(shape).transpose(1, 2)
        key, value = (layer(stream).view(shape).transpose(1, 2) for layer in (self.key, self.value))
        groups = self.num_heads // self.num_key_value_heads
        mixed = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) / 2
        joined = mixed.softmax(-1) @ value.repeat_interleave(groups, 1)
        out: Tensor = self.out(joined.transpose(1, 2).reshape(*stream.shape[:2], self.inner))
        return stream + out


class MLP(nn.Module):
    """A plain MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, stream: Tensor) -> Tensor:
        """(batch, tokens, 16) to the same."""
        out: Tensor = self.down(self.up(stream).tanh())
        return stream + out


class Scaled(nn.Module):
    """An MLP with a learned scale of its inner features."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def forward(self, stream: Tensor) -> Tensor:
        """(batch, tokens, 16) to the same."""
        out: Tensor = self.narrow(self.widen(stream).tanh() * self.scale)
        return stream + out


def users_model() -> nn.Sequential:
    """A model that knows nothing of the engine."""
    torch.manual_seed(2)
    tokens = nn.Sequential()
    tokens.add_module("tokens", nn.Embedding(19, 16))
    layers = [tokens, Attention(), MLP(), Scaled(), nn.LayerNorm(16), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double()


def split_by_names(
    rank: int, world: int, names: TensorPlan
) -> tuple[list[float], list[float], bool]:
    """Losses of a user's model split by `names` and of the same model whole; whether any parameter became smaller."""
    tokens = torch.randint(19, (4, 5), generator=torch.Generator().manual_seed(1))
    targets = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    values = {"precision.compute": "fp64", "optimizer.name": "sgd", "optimizer.lr": 0.1}
    whole, model = users_model(), users_model()
    full = sum(weight.numel() for weight in whole.parameters())
    plan = Plan.of({**values, "parallel.tensor": world})
    engine = initialize(model, plan, nn.functional.mse_loss, tensor_plan=names)
    losses = [engine.train_batch([(tokens, targets)]) for _ in range(4)]
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    expected = []
    for _ in range(4):
        loss = nn.functional.mse_loss(whole(tokens), targets)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        expected.append(loss.item())
    return losses, expected, engine.layout.parameters < full


class Dropping(nn.Module):
    """A block that drops features before its split is over, and after; it keeps both masks."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(16, 32), nn.Linear(32, 16)
        self.inner, self.outer = list[Tensor](), list[Tensor]()

    def forward(self, stream: Tensor) -> Tensor:
        """(batch, tokens, 16) to the same."""
        wide = self.widen(stream)
        self.inner.append(nn.functional.dropout(torch.ones(64), 0.5))
        narrow = self.narrow(wide)
        self.outer.append(nn.functional.dropout(torch.ones(64), 0.5))
        return narrow


def masks(rank: int, world: int, values: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Masks of two blocks that are split over all ranks, in the order of their calls: within the split, and behind it."""
    blocks = [Dropping(), Dropping()]
    plan = Plan.of(
        {"optimizer.name": "sgd", "optimizer.lr": 0.1, "parallel.tensor": world, **values}
    )
    names = TensorPlan(columns=("widen",), rows=("narrow",))
    engine = initialize(
        nn.Sequential(*blocks),
        plan,
        nn.functional.mse_loss,
        tensor_plan=names if world > 1 else None,
    )
    for _ in range(2):
        engine.train_batch([(torch.ones(2, 3, 16), torch.zeros(2, 3, 16))])
    return [mask for block in blocks for mask in block.inner], [
        mask for block in blocks for mask in block.outer
    ]


def whole_logits(rank: int, world: int, case: Case) -> tuple[Tensor, Tensor]:
    """Logits of a split model, put together, and of the whole model."""
    tokens = global_batch(case, 0)[0]
    engine = initialize(model_of(case), Plan.of(case.plan))
    engine.eval()
    return engine(tokens).whole(), model_of(case)(tokens).detach()


def save(rank: int, world: int, case: Case, folder: Path) -> list[float]:
    """Two steps, a checkpoint, and the losses of two more steps."""
    engine = _engine(case)
    for step in range(2):
        engine.train_batch(microbatches(case, engine, step))
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    return [engine.train_batch(microbatches(case, engine, step)) for step in (2, 3)]


def resume(
    rank: int, world: int, case: Case, folder: Path
) -> tuple[list[float], dict[str, Any], int, str]:
    """Losses of two more steps after loading; client state, samples consumed, and the name of what was loaded."""
    engine = _engine(replace(case, seed=99))
    path, client = engine.load_checkpoint(folder)
    samples = engine.progress.samples
    return (
        [engine.train_batch(microbatches(case, engine, step)) for step in (2, 3)],
        client,
        samples,
        path.name,
    )


def resume_without_optimizer(rank: int, world: int, case: Case, folder: Path) -> float:
    """Distance between the loaded weights and those of a model that made the same two steps."""
    engine, other = _engine(replace(case, seed=99)), _engine(case)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    for step in range(2):
        other.train_batch(microbatches(case, other, step))
    return distance(dict(engine.state_dict()), dict(other.state_dict()))


def _engine(case: Case) -> Engine:
    plan = Plan.of(case.plan)
    loss = sum_cross_entropy if plan.loss == "per_token" else mean_cross_entropy
    return initialize(model_of(case), plan, loss, seed=11 if case.seed == 7 else 12)


def largest_tensor(rank: int, world: int, case: Case, folder: Path) -> tuple[int, int]:
    """Elements of the largest tensor handed out for saving, and of the largest slice that this rank owns."""
    from bridge.engine import checkpoint

    engine = _engine(case)
    parts = [
        part.tensor.numel()
        for part in checkpoint._unique(engine, ())
        if not part.name.startswith("generators")
    ]
    return max(parts), max(flat.shard for flat in engine.layout.flats)


def save_until_killed(folder: Path, case: Case) -> None:
    """Train and save for ever, under two tags in turn."""
    torch.set_num_threads(1)
    engine = _engine(case)
    step = 0
    while True:
        engine.train_batch(microbatches(case, engine, step))
        step += 1
        engine.save_checkpoint(folder, f"turn{step % 2}")


class Shared(nn.Module):
    """Layers that share a weight, with batch norms and a buffer of its own."""

    frozen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm, self.last = (
            nn.Linear(4, 4, bias=False),
            nn.BatchNorm1d(4),
            nn.Linear(4, 4, bias=False),
        )
        self.last.weight = self.first.weight
        self.register_buffer("frozen", torch.arange(4.0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.double()

    def forward(self, rows: Tensor) -> Tensor:
        """(batch, 4) to the same."""
        found: Tensor = self.last(self.norm(self.first(rows))) + self.frozen
        return found


PLAIN = {"precision.compute": "fp64", "optimizer.name": "sgd", "optimizer.lr": 0.1}


def batch_normed(rank: int, world: int, folder: Path, level: int) -> tuple[float, float, bool]:
    """Evaluation after steps that move a BatchNorm, and after a resume; whether a buffer that does not persist was left alone."""
    plan = Plan.of({**PLAIN, "zero.stage": level, "parallel.data": world})
    engine, rows = (
        initialize(Shared(), plan, nn.functional.mse_loss),
        torch.linspace(-1, 1, 32).double().view(8, 4),
    )
    for step in range(3):
        engine.train_batch([(rows * (rank + step + 1), rows)])
    engine.save_checkpoint(folder)
    expected = engine.eval_batch((rows, rows)).item()
    other = initialize(Shared(), plan, nn.functional.mse_loss)
    other.model.get_buffer("scratch").fill_(7)
    other.load_checkpoint(folder)
    return (
        expected,
        other.eval_batch((rows, rows)).item(),
        bool((other.model.get_buffer("scratch") == 7).all()),
    )


def evaluated(rank: int, world: int, folder: Path) -> float:
    """The same evaluation, on one rank."""
    engine, rows = (
        initialize(Shared(), Plan.of(PLAIN), nn.functional.mse_loss),
        torch.linspace(-1, 1, 32).double().view(8, 4),
    )
    engine.load_checkpoint(folder)
    return float(engine.eval_batch((rows, rows)))


def left_alone(rank: int, world: int, case: Case, folder: Path, after: int) -> None:
    """A save in which the other rank ends after `after` collectives; what this one is told goes into a file."""
    from bridge.engine import checkpoint

    engine, count, real = _engine(case), [0], checkpoint._everyones
    engine.train_batch(microbatches(case, engine, 0))
    engine.save_checkpoint(folder, "before")

    def ends(*given: Any) -> Any:
        count[0] += 1
        if count[0] > after:
            os._exit(9)
        return real(*given)

    if rank == 1:
        checkpoint._everyones = ends
    try:
        engine.save_checkpoint(folder, "after")
    except BridgeError as error:
        (folder / "said").write_text(str(error))


def data_order(rank: int, world: int, case: Case) -> list[list[list[int]]]:
    """Samples that this rank sees in each of two steps."""
    text = Text.of(None, SEQUENCE)
    engine = initialize(GPT(replace(SHAPE, vocab=BYTES)), Plan.of(case.plan), mean_cross_entropy)
    seen = []
    for _ in range(2):
        batches = list(training.microbatches(text, engine, 2))
        seen.append([row.tolist() for inputs, _ in batches for row in inputs])
        engine.train_batch(batches)
    return seen
