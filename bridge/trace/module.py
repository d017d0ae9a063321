"""Any module as a source of traces: one rank, replicas, or what torch itself distributes, under whatever wraps it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from bridge.comm import Comm, Group, joined
from bridge.errors import BridgeError
from bridge.trace import naming
from bridge.trace.meeting import Meeting
from bridge.trace.placement import Placement
from bridge.trace.record import Unit
from bridge.trace.sharding import flat_pieces, fully_sharded, in_boxes, is_split, mesh_of, whole
from bridge.trace.source import Held, Kind, Moment, Now
from bridge.trace.tracer import recomputing

logger = logging.getLogger("bridge.trace")
INSIDE = ("tensor", "pipeline")
"""Axes whose ranks work on the same samples."""
Pass = Callable[[tuple[Any, ...], Mapping[str, Any]], None]
"""What is called with the inputs of a forward pass."""


class ModuleSource:
    """Tells traces of `module`, whose steps are those of `optimizer` (several: once all have stepped).

    The module may be wrapped by DistributedDataParallel, FullyShardedDataParallel, `fully_shard`, `parallelize_module`,
    torch.compile or accelerate. With `accumulation` told, each pass's loss is expected to be a mean, divided by it; without,
    the passes of a step are logged each under its number. Gradients are averaged over ranks by the time of a step.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Any,
        accumulation: int | None = None,
        comm: Comm | None = None,
    ) -> None:
        self.module, self.accumulation, self.comm = module, accumulation, comm or ranks_of(module)
        self.optimizers = tuple(
            map(bare_optimizer, optimizer if isinstance(optimizer, list | tuple) else [optimizer])
        )
        self._step, self._passes = 1, 0
        self._stepped: set[int] = set()
        self._whole = False
        """Whether it was told that the step's gradients are whole."""
        self.replaced = ""
        """Which optimizer took the place of another in this step; empty: none."""
        self._foreign: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers that hold nothing of the module."""
        self._hooks: dict[int, tuple[Any, Any]] = {}
        self._watched: Callable[[int], None] = lambda number: None
        self._open: dict[int, tuple[int, int]] = {}
        """By optimizer, how many calls of its step() are under way, one within the other, and how many forward passes had begun
        then: one that ended with an error does not count once others have.
        """
        self._entered = 0
        """Forward passes that have begun."""
        self.late = False
        """Whether weights were updated before anybody looked at the gradients: it was attached within the step."""
        self._ready: set[int] = set()
        """The optimizers whose gradients are."""
        self.stepping: list[Callable[[int], None]] = []
        """What is called as an optimizer is about to step, with its number."""
        self.quiet, self.evaluating = False, 0
        """Whether a forward pass runs that is not for training."""
        self._calls: dict[Moment, list[Callable[[], None]]] = {
            "reduced": [],
            "updated": [],
            "ended": [],
        }
        self.passing: list[Pass] = []
        self.resumed = any(optimizer.state for optimizer in self.optimizers)
        self._given: tuple[Tensor, ...] = ()
        self.meeting: Meeting | None = None
        """Where ranks wait for each other before a step."""
        self.last_gradient = 0.0
        """When this rank computed a gradient last, on the host's clock."""
        self.done = 0
        """Steps of the run that this one goes on from, as far as whoever trains says."""
        self._said = False
        self._enter()
        self.watch()

    @property
    def together(self) -> bool:
        """Whether ranks still step together, so that what they hold can be compared."""
        return not self.uneven and (self.meeting is None or not self.meeting.over)

    @property
    def uneven(self) -> bool:
        """Whether torch's `Join` lets ranks take other numbers of steps; said once, as no rank may wait for another then."""
        found = any(part._join_config.enable for part in self._joinable)
        if found and not self._said:
            self._said = True
            logger.warning("trace: under torch's Join ranks step apart; tensors are logged, nothing is checked")
        return found

    @cached_property
    def _joinable(self) -> Sequence[Any]:
        return [part for part in self.module.modules() if hasattr(part, "_join_config")]

    @property
    def optimizer(self) -> Any:
        """The first optimizer."""
        return self.optimizers[0]

    def _enter(self) -> None:
        """Have `begin` called with what each forward pass is given."""
        # `Module.compile` compiles `_call_impl`, which runs the hooks: one that is put in here
        # would become part of the graph.
        compiled = getattr(self.module, "_compiled_call_impl", None)
        if compiled is None:
            hook: Any = lambda _, given, named: self.begin(given, named)  # noqa: E731
            self.module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
            return

        def entered(*given: Any, **named: Any) -> Any:
            self.begin(given, named)
            return compiled(*given, **named)

        self.module._compiled_call_impl = entered

    def watch(self) -> None:
        """Have `before` and `after` called around each step."""

        def stepped(number: int) -> None:
            depth, began = self._open.get(number, (1, 0))
            self._open[number] = max(0, depth - 1), began
            if depth != 1:
                return
            self.late = number not in self._ready
            self.before(number)
            self._stepped.add(number)
            if len(self._stepped) == len(self.optimizers):
                self.after()

        def watched(number: int) -> None:
            optimizer = self.optimizers[number]
            before = optimizer.register_step_pre_hook(
                lambda _, given, named: self._begun(number, given, named)
            )
            after = optimizer.register_step_post_hook(lambda *_: stepped(number))
            self._hooks[number] = before, after

        self._watched = watched
        for number in range(len(self.optimizers)):
            watched(number)
        # Torch keeps this hook for good: it must not keep the model.
        source = weakref.ref(self)

        def other(optimizer: Any, given: Any, named: Any) -> None:
            watching = source()
            if watching is not None:
                watching._meet(optimizer)

        weakref.finalize(self, register_optimizer_step_pre_hook(other).remove)

    def _meet(self, optimizer: Any) -> None:
        """An optimizer steps. One that nobody told of, and that holds parameters of the module, takes the place of one that holds
        some of these, or steps beside the others.
        """
        inside = any(depth and began == self._entered for depth, began in self._open.values())
        if inside or optimizer in self._foreign or any(optimizer is one for one in self.optimizers):
            return
        own = {id(weight) for weight in self.module.parameters()}
        new = {id(weight) for group in optimizer.param_groups for weight in group["params"]} & own
        if not new:
            self._foreign.add(optimizer)
            return
        held = [set(self.owned([number])) for number in range(len(self.optimizers))]
        number = next((at for at, old in enumerate(held) if old & new), len(self.optimizers))
        if number < len(self.optimizers):
            for hook in self._hooks[number]:
                hook.remove()
            self.replaced = f"{type(self.optimizers[number]).__name__} by {type(optimizer).__name__}"
        optimizers = list(self.optimizers)
        optimizers[number:number + 1] = [optimizer]
        self.optimizers = tuple(optimizers)
        self._watched(number)

    def _begun(self, number: int, given: Any, named: Any) -> Any:
        """A step begins. Where it is given a closure, that runs forward and backward, and gradients are whole after it."""
        place = 1 if len(given) > 1 else None
        closure = given[1] if place else named.get("closure")
        # A class that has its own step() and calls that of its base has hooks around both.
        depth, began = self._open.get(number, (0, 0))
        inner = depth > 0 and began == self._entered
        self._open[number] = (depth + 1 if inner else 1), self._entered
        if inner:
            return None
        if number in self._stepped:
            self.after()  # the others left this one out
        if not callable(closure):
            self.before(number)
            return None

        def computed() -> Any:
            result = closure()
            self.before(number)
            return result

        if place:
            return (given[0], computed, *given[2:]), named
        return given, {**named, "closure": computed}

    def before(self, number: int = 0) -> None:
        """Gradients are whole, of the optimizer with that number at least."""
        if number not in self._ready:
            self._ready.add(number)
            for call in self.stepping:
                call(number)
        if self._whole:
            return
        self._whole = True
        if self.meeting is not None and not self.uneven:
            self.meeting.met()
        self._tell("reduced")

    def after(self) -> None:
        """The step is over."""
        self._tell("updated")
        self._tell("ended")
        self._step += 1
        self._passes = self.evaluating = 0
        self._stepped.clear()
        self._ready.clear()
        self._whole = self.late = False
        self.replaced = ""

    def _tell(self, moment: Moment) -> None:
        for call in self._calls[moment]:
            call()

    @property
    def model(self) -> nn.Module:
        """The module without wrappers."""
        return naming.unwrapped(self.module)

    @cached_property
    def layers(self) -> Mapping[str, nn.Module]:
        """Blocks of lists, and the largest modules beside them."""
        return naming.layers(self.module)

    @cached_property
    def hidden(self) -> frozenset[str]:
        """Layers of which nothing is seen as they run, because torch.compile does not call them one by one."""
        if _compiled(self.module):
            return frozenset(self.layers)
        compiled = [module for module in self.model.modules() if _compiled(module)]
        # Hooks on what torch.compile returned run outside of the graph, those on its parts do not.
        inner = {id(part) for module in compiled for part in module.modules() if part is not module}
        in_place = {
            id(module)
            for module in self.model.modules()
            if getattr(module, "_compiled_call_impl", None) is not None
        }
        return frozenset(
            name for name, module in self.layers.items() if id(module) in inner | in_place
        )

    @property
    def entrance(self) -> str:
        return next(
            (name for name in self.layers if name not in self.hidden), next(iter(self.layers))
        )

    @property
    def roots(self) -> Sequence[nn.Module]:
        """The modules that a forward pass calls; none if hooks on them would be compiled."""
        return (
            () if getattr(self.module, "_compiled_call_impl", None) is not None else (self.module,)
        )

    @property
    def entered(self) -> nn.Module:
        """The module of the forward pass that begins."""
        return self.model

    strict = False
    """Whether a step never has more passes than `accumulation`. If not, several may share one loss."""

    @property
    def trains(self) -> bool:
        """Whether the model is in training mode, whatever its wrappers are in."""
        return self.model.training

    @property
    def plain(self) -> bool:
        """Whether parameters hold their own gradients, as torch leaves them."""
        return True

    @cached_property
    def at_hand(self) -> bool:
        """Whether looking at what a rank holds moves nothing between ranks: parts of DTensors lie as boxes, and where torch did
        not shard the module as a whole, gradients may still have to be summed.
        """
        weights = naming.parameters(self.module).values()
        return all(map(in_boxes, weights)) and (
            fully_sharded(self.module) or not any(map(is_split, weights))
        )

    @property
    def recomputes(self) -> bool:
        """The module's own code decides."""
        return True

    @property
    def holders(self) -> Sequence[tuple[int, ...]]:
        return ()

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes along which ranks take different samples."""
        return tuple(axis for axis in self.comm.mesh.sizes if axis not in INSIDE)

    @cached_property
    def data(self) -> Group:
        """This rank's group along them."""
        return self.comm.along(self.axes)

    @property
    def passes(self) -> int:
        """Forward passes of the step so far."""
        return self._passes

    def now(self) -> Now:
        last = max(self._passes - 1, 0)
        if self.accumulation is None:
            return Now(self._step, last, None, part=(self.data.index, self.data.size))
        place = last % self.accumulation
        return Now(
            self._step, place * self.data.size + self.data.index, self.accumulation * self.data.size
        )

    def factors(self) -> Mapping[Unit, float]:
        # A rank's loss is the mean over its own samples, 1 / ranks of which are the step's.
        return {"parameter": 1.0, "activation": 1 / self.data.size}

    def activation(self, layer: str, tensor: Tensor, output: bool) -> Placement:
        """Of ranks that share samples, those see a part whose tensor is shorter than the tokens that went in."""
        local, placement = whole(tensor, self.comm, ())
        group, shape = self.comm.mesh.sizes.get("tensor", 1), tuple(local.shape)
        # Sequence parallelism leaves each tensor rank a part of the tokens, in dimension 1.
        tokens = next((given.shape[1] for given in self._given if given.dim() > 1), 0)
        if (
            placement.sizes != placement.whole
            or group == 1
            or len(shape) < 2
            or shape[1] * group != tokens
        ):
            return placement
        return placement.split(1, self.comm.group("tensor").index, group)

    def batched(self, tensor: Tensor) -> bool:
        """Whether the first dimension of an activation is that of the samples, or of their tokens, that went in."""
        first = next((given for given in self._given if given.dim()), None)
        if first is None or not tensor.dim():
            return True
        shape = tuple(first.shape)
        return tensor.shape[0] in (shape[0], shape[0] * shape[1] if len(shape) > 1 else shape[0])

    def tensors(self, kind: Kind) -> Iterator[Held]:
        if kind == "state":
            yield self._numbers("counters", [self._step])
            yield from self._settings_held()
        elif kind == "buffer":
            yield from (
                self.held(name, kind, "", buffer.detach())
                for name, buffer in naming.buffers(self.module).items()
            )
        elif kind in ("weight", "gradient", "moment"):
            flat = flat_pieces(self.module)
            for name, parameter in naming.parameters(self.module).items():
                pieces = flat.get(id(parameter))
                for part, tensor in self.of(kind, parameter).items():
                    if pieces is None:
                        yield self.held(name, kind, part, tensor)
                    for piece in pieces or ():
                        end = piece.offset + piece.stop - piece.start
                        local = tensor.detach().reshape(-1)[piece.offset : end]
                        placement = Placement.full(piece.shape).run(piece.start, piece.stop)
                        yield Held(*self._named(piece.name, part, kind), local, placement)

    def held(self, name: str, kind: str, part: str, tensor: Tensor) -> Held:
        """A tensor of that parameter: whole, as ranks hold it alike, or the part that lies here."""
        local, placement = whole(
            tensor, self.comm, tuple(axis for axis in self.comm.mesh.sizes if axis != "pipeline")
        )
        return Held(*self._named(name, part, kind), local, placement)

    def named(self, name: str) -> str:
        """The global name of a parameter or buffer of that name in the module."""
        return name

    def _named(self, name: str, part: str, kind: str) -> tuple[str, str, str]:
        layer, rest = naming.layer_of(self.named(name), self.layers)
        return layer, kind, ".".join(word for word in (rest, part) if word)

    def of(self, kind: Kind, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """The tensors of that kind of a parameter, by what follows its name."""
        if kind == "weight":
            return {"": parameter.detach()}
        if kind == "gradient":
            # Zeros for none: the parameter is in the log, and can be compared.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradient = gradient if gradient.layout == torch.strided else gradient.to_dense()
            return {"": gradient.detach()} if parameter.requires_grad else {}
        states = (optimizer.state.get(parameter, {}) for optimizer in self.optimizers)
        found = {name: value for state in states for name, value in state.items()}
        return {
            name: value
            for name, value in found.items()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        }

    def batch(self) -> Iterator[Held]:
        """Tensor ranks take the same samples; data ranks others."""
        for index, tensor in enumerate(self._given):
            yield Held(
                "", "input", str(index), tensor, Placement.full(tuple(tensor.shape), ("tensor",))
            )

    def on(self, moment: Moment, call: Callable[[], None]) -> None:
        self._calls[moment].append(call)

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """The groups of parameters of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def moving(self) -> Sequence[int]:
        """The numbers of the optimizers that take part in this step, as far as they have begun to."""
        return sorted(self._ready)

    def owned(self, numbers: Iterable[int]) -> dict[int, Mapping[str, Any]]:
        """By its id, the group of each parameter that those optimizers hold."""
        return {
            id(weight): group
            for number in numbers
            for group in self.optimizers[number].param_groups
            for weight in group["params"]
        }

    def settings(self) -> Mapping[str, object]:
        named = (
            (f"group {at}.{name}", value)
            for at, group in enumerate(self.groups)
            for name, value in group.items()
        )
        values = {
            name: value for name, value in named if not name.endswith((".params", ".param_names"))
        }
        kinds = " + ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        return {"optimizer": kinds, "accumulation": self.accumulation, **values}

    def about(self) -> Mapping[str, object]:
        formats = {
            str(parameter.dtype).removeprefix("torch.") for parameter in self.model.parameters()
        }
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            formats.add(str(torch.get_autocast_dtype("cpu")).removeprefix("torch."))
        return {
            "engine": type(self.module).__name__,
            "mesh": {axis: size for axis, size in self.comm.mesh.sizes.items() if size > 1}
            or {"data": 1},
            "accumulation": self.accumulation,
            "formats": sorted(formats),
            "hidden": sorted(self.hidden),
            "settings": {name: str(value) for name, value in self.settings().items()},
        }

    def _numbers(self, name: str, values: Sequence[Any]) -> Held:
        numbers = torch.tensor([float(value) for value in values], dtype=torch.float64)
        return Held(
            "",
            "state",
            name,
            numbers,
            Placement.full(tuple(numbers.shape), tuple(self.comm.mesh.sizes)),
        )

    def _settings_held(self) -> Iterator[Held]:
        """The numbers in the optimizers' settings as they are now, each setting apart; what all groups have alike is said once,
        so that it does not matter how parameters are grouped.
        """
        for name in dict.fromkeys(
            name for group in self.groups for name in group if name != "params"
        ):
            values = [group[name] for group in self.groups if name in group]
            alike = len(values) == len(self.groups) and all(value == values[0] for value in values)
            for at, value in enumerate(values[:1] if alike else values):
                numbers = value if isinstance(value, list | tuple) else [value]
                if all(isinstance(part, int | float) for part in numbers):
                    yield self._numbers(
                        "learning rate" if name == "lr" and alike else f"group {at}.{name}", numbers
                    )

    def begin(self, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """A forward pass begins; it is counted if it is for training."""
        # A checkpoint runs the model again inside backward: that is no pass of its own.
        if recomputing():
            return
        self._entered += 1
        self.quiet = not (self.trains and torch.is_grad_enabled())
        if self.quiet:
            # Without gradients, evaluation is meant; with them, train() may have been forgotten.
            if torch.is_grad_enabled():
                self.evaluating += 1
            return
        if self._stepped:
            self.after()
        self._passes += 1
        if self.meeting is not None:
            self.meeting.passed()
        leaves = tree_leaves(in_order(self.entered, given, named))
        self._given = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        for call in self.passing:
            call(given, named)


def in_order(module: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call in the order in which the module's forward declares them, whether they
    were given by place or by name.
    """
    kind: Any = type(module)
    try:
        declared = _signature(kind)
        found = declared.bind_partial(module, *given, **named).arguments
    except (TypeError, ValueError):  # it takes something else, as its own error will say
        return [*given, *(named[name] for name in sorted(named))]
    open_ = {
        name
        for name, parameter in declared.parameters.items()
        if parameter.kind is Parameter.VAR_KEYWORD
    }
    # Keywords that forward does not name come in the order of the call, which may be any.
    values = [sorted(value.items()) if name in open_ else value for name, value in found.items()]
    return values[1:]


@lru_cache
def _signature(kind: Any) -> Signature:
    return signature(kind.forward)


def ranks_of(module: nn.Module) -> Comm:
    """All ranks of the process group that this process is in, as torch distributes `module` over them; one without."""
    rank, world = joined() or (0, 1)
    return Comm(mesh_of(module, world), rank)


def bare_optimizer(optimizer: Any) -> Any:
    """The optimizer below what accelerate and others wrap around it. Raises `BridgeError` if it cannot be watched."""
    inner = getattr(optimizer, "optimizer", None)
    if inner is not None and hasattr(inner, "param_groups"):
        return bare_optimizer(inner)
    if not hasattr(optimizer, "param_groups"):
        raise BridgeError(
            f"attach: found an optimizer of type {type(optimizer).__name__}, expected one of torch's, or one that wraps it;"
            " pass what has param_groups and step()"
        )
    return optimizer


def _compiled(module: nn.Module) -> bool:
    return (
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    )
