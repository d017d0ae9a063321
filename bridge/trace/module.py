"""Any module as a source of traces: one rank, or replicas that DistributedDataParallel keeps alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bridge.comm import Comm, joined
from bridge.layout.mesh import Mesh
from bridge.plan import Parallel
from bridge.trace.placement import Placement
from bridge.trace.record import Unit
from bridge.trace.source import Held, Kind, Moment, Now
from bridge.trace.tracer import recomputing


class ModuleSource:
    """Tells traces of `module`, whose steps are those of `optimizer`, each after `accumulation` backward passes.

    Each pass's loss is expected to be a mean, divided by `accumulation`; gradients are averaged over ranks by then.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, accumulation: int = 1, comm: Comm | None = None) -> None:
        self.module, self.optimizer, self.accumulation, self.comm = module, optimizer, accumulation, comm or data_ranks()
        self._step, self._passes = 1, 0
        self._calls: dict[Moment, list[Callable[[], None]]] = {"reduced": [], "updated": [], "ended": []}
        self.layers[self.entrance].register_forward_pre_hook(self._count)
        self.watch()

    def watch(self) -> None:
        """Have `before` and `after` called around each step."""
        self.optimizer.register_step_pre_hook(lambda *_: self.before())
        self.optimizer.register_step_post_hook(lambda *_: self.after())

    def before(self) -> None:
        """Gradients are whole."""
        self._tell("reduced")

    def after(self) -> None:
        """The step is over."""
        self._tell("updated")
        self._tell("ended")
        self._step += 1
        self._passes = 0

    def _tell(self, moment: Moment) -> None:
        for call in self._calls[moment]:
            call()

    @property
    def model(self) -> nn.Module:
        """The module without a wrapper."""
        inner = getattr(self.module, "module", self.module)
        assert isinstance(inner, nn.Module), "wrappers hold their module under that name"
        return inner

    @property
    def layers(self) -> Mapping[str, nn.Module]:
        """See `Source`: the children, and those of lists among them."""
        return dict(_layers(self.model))

    @property
    def entrance(self) -> str:
        """See `Source`."""
        return next(iter(self.layers))

    @property
    def recomputes(self) -> bool:
        """See `Source`: the module's own code decides."""
        return True

    @property
    def holders(self) -> Sequence[tuple[int, ...]]:
        """See `Source`."""
        return ()

    def now(self) -> Now:
        """See `Source`."""
        ranks = self.comm.group("data")
        place = max(self._passes - 1, 0) % self.accumulation
        return Now(self._step, place * ranks.size + ranks.index, self.accumulation * ranks.size)

    def factors(self) -> Mapping[Unit, float]:
        """See `Source`."""
        return {"parameter": 1.0, "activation": 1 / self.comm.group("data").size}

    def activation(self, layer: str, tensor: Tensor, output: bool) -> Placement:
        """See `Source`."""
        return Placement.full(tuple(tensor.shape))

    def tensors(self, kind: Kind) -> Iterator[Held]:
        """See `Source`."""
        if kind == "state":
            yield self._counters()
        elif kind in ("weight", "gradient", "moment"):
            for name, parameter in self.model.named_parameters():
                for part, tensor in self.of(kind, parameter).items():
                    yield self.held(name, kind, part, tensor)

    def held(self, name: str, kind: str, part: str, tensor: Tensor, replicas: tuple[str, ...] = ("data",)) -> Held:
        """A whole tensor of that parameter, which data ranks hold alike."""
        layer = next((layer for layer in self.layers if name.startswith(f"{layer}.")), "")
        label = ".".join(word for word in (name.removeprefix(f"{layer}."), part) if word)
        return Held(layer, kind, label, tensor, Placement.full(tuple(tensor.shape), replicas))

    def of(self, kind: Kind, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """What there is of that kind of a parameter, by what it adds to its name."""
        if kind == "weight":
            return {"": parameter.detach()}
        if kind == "gradient":
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            return {"": gradient} if parameter.requires_grad else {}
        state = self.optimizer.state.get(parameter, {})
        return {name: value for name, value in state.items() if isinstance(value, Tensor) and value.shape == parameter.shape}

    def batch(self) -> Iterator[Held]:
        """See `Source`. Data ranks take different samples, so there is nothing to compare."""
        yield from ()

    def on(self, moment: Moment, call: Callable[[], None]) -> None:
        """See `Source`."""
        self._calls[moment].append(call)

    def settings(self) -> Mapping[str, object]:
        """See `Source`."""
        groups = self.optimizer.param_groups
        named = ((f"group {at}.{name}", value) for at, group in enumerate(groups) for name, value in group.items())
        values = {name: value for name, value in named if not name.endswith(".params")}
        return {"optimizer": type(self.optimizer).__name__, "accumulation": self.accumulation, **values}

    def about(self) -> Mapping[str, object]:
        """See `Source`."""
        formats = {str(parameter.dtype).removeprefix("torch.") for parameter in self.model.parameters()}
        return {
            "engine": type(self.module).__name__,
            "mesh": dict(self.comm.mesh.sizes),
            "accumulation": self.accumulation,
            "formats": sorted(formats),
            "settings": {name: str(value) for name, value in self.settings().items()},
        }

    def _counters(self) -> Held:
        numbers = torch.tensor([self._step, *(float(group["lr"]) for group in self.optimizer.param_groups)], dtype=torch.float64)
        return Held("", "state", "counters", numbers, Placement.full(tuple(numbers.shape), ("data",)))

    def _count(self, module: nn.Module, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled() and not recomputing():
            self._passes += 1


def data_ranks() -> Comm:
    """All ranks of the process group that this process is in as data ranks; one without."""
    rank, world = joined() or (0, 1)
    return Comm(Mesh.of(Parallel(data=world), world), rank)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    children = tuple(model.named_children())
    if not children:
        yield "", model
    for name, child in children:
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{part}", layer) for part, layer in child.named_children())
        else:
            yield name, child
