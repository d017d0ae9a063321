"""The engine: runs a plan's steps over the stages of a model, with DeepSpeed's interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bridge.comm import Comm, leave
from bridge.engine.fields import accumulation_of
from bridge.engine.formats import TORCH
from bridge.engine.gradients import Gradients
from bridge.engine.layers import Arguments, facts, layers_of, parameter_facts
from bridge.engine.learning_rate import learning_rate
from bridge.engine.loss_scale import LossScaler
from bridge.engine.optimizer import Group, ShardOptimizer, clip_factor, setting, squared_norm
from bridge.engine.stage import Draw, Stage, detached, differentiable, recompute_parts
from bridge.engine.tensor_parallel import Conversion, Mark, Split, joined
from bridge.engine.weights import EXPORT, Weights
from bridge.errors import BridgeError, ConfigError
from bridge.findings import Finding
from bridge.layout.partition import partition
from bridge.layout.recompute import chunks
from bridge.layout.residency import visits
from bridge.layout.shard import Flat, Layout
from bridge.layout.tensor import Site, TensorPlan
from bridge.layout.traffic import AGREE, Traffic, computed_again, whole_traffic
from bridge.plan import Plan
from bridge.trace.source import Moment

Loss = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor | int]]
"""Takes the model's output and targets; returns a microbatch's mean loss, or its sum and the count to divide
by.
"""


INITIAL = "initial weights"


@dataclass(eq=False)
class Pass:
    """A forward pass that waits for backward: its samples, how much its loss counts among the others, for each stage the
    tensors by which gradients leave and enter it, and whether any came back yet.
    """

    rows: int
    weight: Tensor | float = 1.0
    ends: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list)
    reached: bool = False

    def watch(self, output: Any) -> None:
        """Take note when a gradient of `output` comes back."""
        for tensor in differentiable(output):
            tensor.register_hook(self._reach)  # type: ignore[no-untyped-call]

    def _reach(self, gradient: Tensor) -> None:
        self.reached = True


@dataclass
class Progress:
    """Where training stands, and what the last step gave: mean loss over all ranks, gradient norm before
    clipping.
    """

    steps: int = 0
    skipped: int = 0
    samples: int = 0
    loss: float = math.nan
    grad_norm: float = math.nan
    lr: float = 0.0


class Engine:
    """Trains a model as a plan says: `train_batch`, or `engine(...)`, `backward` and `step` for each
    microbatch.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        comm: Comm,
        device: torch.device,
        loss_fn: Loss | None = None,
        seed: int = 1234,
        findings: Iterable[Finding] = (),
        tensor_plan: TensorPlan | None = None,
        groups: Sequence[Group] = (),
    ) -> None:
        self._module, self.plan, self.comm, self.device = model, plan, comm, device
        self.loss_fn, self.seed = loss_fn, seed
        self.findings = (*findings, *recompute_parts(model, plan.recompute))
        self.data = comm.group("data")
        self.accumulation = accumulation_of(plan, self.data.size)
        self.tensor = comm.group("tensor")
        ranges = partition(plan.stages, facts(model, layers_of(model)))
        marks, self.sites = _split(model, plan, comm, tensor_plan)
        layers = layers_of(model)
        self._whole = layers[0].only
        parts, early_stop = chunks(plan.recompute, ranges), self.tensor.size == 1
        self.stages = [Stage(layers, part, device, early_stop) for part in parts]
        self._again = computed_again(self.sites, [layer.name for layer in layers], parts)
        parameters = dict(model.named_parameters())
        self.layout = Layout.of(plan, parameter_facts(parameters, layers, ranges, marks), len(ranges), self.data.size)
        self.weights = Weights(self.layout, parameters, comm, device)
        self.gradients = Gradients(self.layout, parameters, comm, device)
        self.optimizer = ShardOptimizer(plan.optimizer, self.weights.masters(), self.weights.pieces(), groups)
        self.scaler, self.progress = LossScaler.of(plan), Progress()
        self._micro = self._rows = 0
        self._passes: list[Pass] = []
        self.unit = 1.0
        self.batch: Any = ()
        self.watchers: dict[Moment, list[Callable[[], None]]] = {"reduced": [], "updated": [], "ended": []}
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)

    @property
    def model(self) -> nn.Module:
        """The model as it is between steps: under ZeRO 3, parameters of other stages' buffers hold anything."""
        return self._module

    @property
    def started(self) -> int:
        """Number of the step that runs, from 1; skipped ones count."""
        return self.progress.steps + self.progress.skipped + 1

    @property
    def place(self) -> int:
        """The open microbatch's place among those of all data ranks in this step."""
        return self._micro * self.data.size + self.data.index

    @property
    def module(self) -> nn.Module:
        """The model; parameters with a buffer to themselves are whole in it, others while their
        stage runs.
        """
        self.weights.settle()
        return self._module

    def train(self, mode: bool = True) -> Engine:
        """Set training mode."""
        self._module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set evaluation mode: `engine(...)` then keeps nothing for backward."""
        return self.train(False)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run one microbatch: its loss if the engine has a loss function (the last input is then the
        targets), else the output. `named` are for a model that is one layer.
        """
        return self._train_pass(inputs, named) if self._module.training else self._eval_pass(inputs, named)

    def backward(self, loss: Tensor) -> Tensor:
        """Accumulate the gradients of `loss`, which comes from one or several `engine(...)`, as one microbatch, and reduce
        what is due.
        """
        self._refuse_more()
        weight = self._weight()
        self._count(loss, weight)
        done = self._backward(loss * weight * self.scaler.scale)
        self._passes = [other for other in self._passes if other not in done]
        self._micro += 1
        self._rows += sum(current.rows for current in done)
        return loss

    def step(self) -> bool:
        """Update once all microbatches of a step are in; before that, do nothing. Returns whether weights
        changed.
        """
        if not self.is_gradient_accumulation_boundary():
            return False
        self.gradients.finish()
        self._tell("reduced")
        squares, loss, weight = self._agree()
        updated = math.isfinite(squares)
        self._note(squares, loss, weight, updated)
        if updated:
            self._update(weight)
        self._tell("updated")
        self._tell("ended")
        self.scaler.update(overflow=not updated)
        self._begin(updated)
        return updated

    @property
    def microbatch(self) -> int:
        """How many microbatches of the step have run backward."""
        return self._micro

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether all microbatches of the step have run backward."""
        return self._micro == self.accumulation

    def train_batch(self, batches: Iterable[Any] | Iterator[Any]) -> float:
        """One step over the next `accumulation` of `batches`, each (inputs, targets); the mean loss over all
        ranks.
        """
        self.train()
        source = iter(batches)
        for _ in range(self.accumulation):
            self.backward(self(*self._next(source)))
        self.step()
        return self.progress.loss

    @torch.no_grad()
    def eval_batch(self, batch: Any) -> Any:
        """Loss (or output, without a loss function) of one batch on this rank; moves neither random state nor
        progress.
        """
        training = self._module.training
        self.eval()
        try:
            return self._eval_pass(tuple(batch), {})
        finally:
            self.train(training)

    def state_dict(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, by global name, in the master format, one flat at a time. All ranks must
        take part.
        """
        for index, flat in enumerate(self.layout.flats):
            whole = self.weights.whole_master(index)
            for slot in flat.slots:
                local = whole[slot.start : slot.stop].view(slot.parameter.shape)
                split = slot.parameter.split is not None
                yield slot.parameter.name, joined(self.comm, EXPORT, local, slot.parameter) if split else local

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> Path:
        """Write everything that a resume needs into `save_dir`/`tag`; see `checkpoint.save`. All ranks must take part."""
        from bridge.engine import checkpoint

        return checkpoint.save(self, Path(save_dir), tag, client_state or {}, save_latest)

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, load_optimizer_states: bool = True
    ) -> tuple[Path, dict[str, Any]]:
        """Continue from `load_dir`/`tag` (default: the latest), written on any layout; see `checkpoint.load`."""
        from bridge.engine import checkpoint

        return checkpoint.load(self, Path(load_dir), tag, load_optimizer_states)

    def close(self) -> None:
        """End in good order: wait for what is under way and for all ranks, then leave the process group."""
        self.weights.settle()
        leave()

    def bytes(self) -> dict[str, int]:
        """Bytes of the tensors that are kept on this rank, by kind."""
        kinds = {
            "weights": self.weights.stored(),
            "gradients": self.gradients.tensors(),
            "master": self.weights.masters_apart(),
            "moments": self.optimizer.tensors(),
        }
        return {kind: sum(tensor.numel() * tensor.element_size() for tensor in tensors) for kind, tensors in kinds.items()}

    def traffic(self, tokens: int) -> dict[str, Traffic]:
        """The collectives that a step should make on this rank, with `tokens` tokens in each of its microbatches."""
        sequence, world = bool(self.plan.parallel.sequence), self.comm.world.size
        return whole_traffic(self.layout, self.sites, self._again, sequence, self.accumulation, tokens, world, self.data.index)

    def _next(self, source: Iterator[Any]) -> tuple[Any, ...]:
        try:
            return tuple(next(source))
        except StopIteration:
            raise BridgeError(
                f"train_batch: data ended after {self._micro} microbatches of a step, expected"
                f" {self.accumulation}; give more data"
            ) from None

    def _refuse_more(self) -> None:
        if self.is_gradient_accumulation_boundary():
            raise BridgeError(
                f"backward: all {self.accumulation} microbatches of this step have run; call engine.step(),"
                " or set batch.accumulation to the number wanted"
            )

    def _weight(self) -> Tensor | float:
        """How much the loss of the open passes counts among the others."""
        if not self._passes:
            raise BridgeError("backward: no forward pass is open; call engine(...) in training mode first")
        if len(self._passes) > 1 and self.plan.loss == "per_token":
            raise BridgeError(
                f"backward: {len(self._passes)} forward passes are open, and plan.loss is per_token, so that each counts by"
                " its tokens; call backward after each, and eval_batch for losses that are not trained on"
            )
        return self._passes[0].weight

    def _train_pass(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        draw = Draw(self.seed, self.started - 1, self.place, len(self._passes))
        path = visits(self.layout)
        self.batch = (inputs, named)
        output = self._cast(self._inputs(inputs, named))
        current = Pass(_rows(output))
        for place, stage in enumerate(self.stages):
            self.weights.require(place, path[place + 1 :])
            entered = detached(output)
            output = self._run(place, stage, entered, draw)
            current.ends.append((differentiable(entered), differentiable(output)))
        if torch.is_grad_enabled():
            current.watch(output)
            self._passes.append(current)
        if self.loss_fn is None:
            return output
        loss, current.weight = self._loss(output, inputs[-1])
        return loss

    def _eval_pass(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        path = visits(self.layout, training=False)
        output = self._cast(self._inputs(inputs, named))
        with torch.no_grad():
            for place, stage in enumerate(self.stages):
                self.weights.require(place, path[place + 1 :])
                output = self._run(place, stage, output, None)
            return output if self.loss_fn is None else self._loss(output, inputs[-1])[0]

    def _run(self, place: int, stage: Stage, inputs: Any, draw: Draw | None) -> Any:
        self.comm.ledger.note(f"forward {place} starts")
        output = stage.forward(inputs, draw)
        self.comm.ledger.note(f"forward {place} ends")
        return output

    def _inputs(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What the first layer takes: everything but the targets; into one of several layers, one input goes in bare."""
        given = inputs[:-1] if self.loss_fn is not None else inputs
        if not (given or named):
            raise BridgeError("engine(...): found no inputs beside the targets, expected inputs and targets; pass both")
        if self._whole:
            return Arguments(given, named)
        BridgeError.raise_if(
            f"engine({name}=...): a model that is a list of layers takes no named inputs; pass them in order" for name in named
        )
        return given[0] if len(given) == 1 else given

    def _cast(self, inputs: Any) -> Any:
        compute = self.plan.precision.compute

        def cast(tensor: Tensor) -> Tensor:
            wanted = TORCH[compute] if compute and tensor.is_floating_point() else tensor.dtype
            return tensor.to(self.device, wanted)

        return tree_map_only(Tensor, cast, inputs)

    def _loss(self, output: Any, targets: Any) -> tuple[Tensor, Tensor | float]:
        """The microbatch's mean loss, and how much it counts among the others."""
        assert self.loss_fn is not None
        found = self.loss_fn(output, tree_map_only(Tensor, lambda tensor: tensor.to(self.device), targets))
        per_token = self.plan.loss == "per_token"
        if isinstance(found, tuple):
            count = torch.as_tensor(found[1], dtype=torch.float64, device=self.device)
            return found[0] / count.clamp(min=1).to(found[0].dtype), count if per_token else 1.0
        if per_token:
            raise BridgeError("loss_fn: found a mean, but plan.loss is per_token; return a sum and its count")
        return found, 1.0

    def _backward(self, loss: Tensor) -> list[Pass]:
        """Backward through the last stage from `loss`, then stage by stage, of the passes that it comes from; returns these,
        emptied on the way.
        """
        last = self._micro == self.accumulation - 1
        path = range(len(self.stages) - 1, self.layout.first_trained - 1, -1)
        after = () if last else visits(self.layout)
        roots: list[Tensor] = [loss]
        gradients: list[Tensor | None] = [None]
        for place in path:
            self.weights.require(place, (*path[len(self.stages) - place :], *after))
            self.gradients.acquire(place)
            self.comm.ledger.note(f"backward {place} starts")
            torch.autograd.backward(roots, gradients)
            self.comm.ledger.note(f"backward {place} ends")
            self.gradients.reduce(place, last)
            pairs = [pair for current in self._reached() for pair in _handed_down(current)]
            roots = [output for output, _ in pairs]
            gradients = [gradient for _, gradient in pairs]
        return self._reached()

    def _reached(self) -> list[Pass]:
        """The passes that the loss in backward comes from: all, where their outputs do not show it."""
        return [current for current in self._passes if current.reached] or list(self._passes)

    def _count(self, loss: Tensor, weight: Tensor | float) -> None:
        self._totals[0] += loss.detach().double() * weight
        self._totals[1] += weight

    def _agree(self) -> tuple[float, float, float]:
        """Sum over all ranks of squared gradients, losses and what losses count, in one collective."""
        own = [part for flat, shard in self.gradients.parts() for part in self._counted(flat, shard)]
        squares = squared_norm(own) if own else self._totals.new_zeros(())
        totals = self._totals if self.tensor.index == 0 else torch.zeros_like(self._totals)
        vector = torch.cat([squares.view(1), totals])
        self.comm.all_reduce(AGREE, vector, self.comm.world)()
        first, second, third = vector.tolist()
        return first, second, third

    def _counted(self, flat: Flat, shard: Tensor) -> Iterator[Tensor]:
        """What of this rank's slice enters the global norm: every element of the model does so once."""
        if not flat.sharded and self.data.index > 0:
            return
        place = flat.own(flat.split, self.data.index)
        part = shard if self.tensor.index == 0 else shard[place.start : place.stop]
        if len(part):
            yield part

    def _note(self, squares: float, loss: float, weight: float, updated: bool) -> None:
        progress, divisor = self.progress, max(weight, 1.0)
        self.unit = 1 / (divisor * self.scaler.scale)
        progress.loss = loss / divisor
        progress.grad_norm = math.sqrt(squares) / (divisor * self.scaler.scale) if updated else math.inf
        lr = learning_rate(setting(self.plan.optimizer, "lr"), self.plan.optimizer.schedule, progress.steps)
        progress.lr = self.optimizer.lr(lr)

    def _update(self, weight: float) -> None:
        clip = clip_factor(self.progress.grad_norm, setting(self.plan.optimizer, "clip"))
        factor = clip / (max(weight, 1.0) * self.scaler.scale)
        gradients = [part.to(TORCH[flat.master]) for flat, part in self.gradients.parts()]
        if gradients:
            torch._foreach_mul_(gradients, factor)
        self.optimizer.step(gradients, self.progress.lr)
        self.weights.refresh()

    def _begin(self, updated: bool) -> None:
        """Leave the step that ended behind."""
        self.progress.steps += updated
        self.progress.skipped += not updated
        self.progress.samples += self._rows * self.data.size
        self.gradients.clear()
        self._totals.zero_()
        self._micro = self._rows = 0
        self._passes = []

    def _tell(self, moment: Moment) -> None:
        for call in self.watchers[moment]:
            call()


def _split(model: nn.Module, plan: Plan, comm: Comm, names: TensorPlan | None) -> tuple[Mapping[int, Mark], list[Site]]:
    """Give all ranks the first one's weights, then split the model over tensor ranks.

    Returns what became of each parameter, and where activations pass between ranks.
    """
    for weight in model.parameters():
        comm.broadcast(INITIAL, weight.data, comm.world)()
    group = comm.group("tensor")
    if group.size == 1:
        return {}, []
    names = names or _own_plan(model, group.size)
    found = Conversion(model, names, Split(comm, group, bool(plan.parallel.sequence)))
    return found.marks, found.sites


def _own_plan(model: nn.Module, ranks: int) -> TensorPlan:
    own: Callable[[int], TensorPlan] | None = getattr(model, "tensor_plan", None)
    if own is None:
        raise ConfigError("parallel.tensor: this model does not say how to split it; pass `tensor_plan` to initialize")
    return own(ranks)


def _rows(inputs: Any) -> int:
    """Samples in a microbatch: the first dimension of its first tensor."""
    return next((len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()), 0)


def _handed_down(current: Pass) -> list[tuple[Tensor, Tensor]]:
    """The outputs of the stage before, with the gradients that the stage after them left at its inputs."""
    entered, _ = current.ends.pop()
    outputs = current.ends[-1][1] if current.ends else []
    return [(output, leaf.grad) for output, leaf in zip(outputs, entered, strict=True) if leaf.grad is not None]
