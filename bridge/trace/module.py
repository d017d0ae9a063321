"""Modules as sources of traces: any torch module, with or without wrappers, on one rank,
replicated, or sharded by torch.
"""

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

from bridge.engine.comm import Comm, Group, rank_and_world
from bridge.errors import BridgeError
from bridge.trace import naming
from bridge.trace.hook import Hook
from bridge.trace.placement import Placement
from bridge.trace.record import Unit
from bridge.trace.sharding import (
    flat_pieces,
    fully_sharded,
    in_boxes,
    is_split,
    mesh_of,
    part_and_placement,
)
from bridge.trace.source import Held, Kind, Moment, Now
from bridge.trace.step_meeting import Meeting
from bridge.trace.tracer import is_recomputing

logger = logging.getLogger("bridge.trace")
SHORT = (torch.bfloat16, torch.float16)
INSIDE = ("tensor", "pipeline")
"""Names of the axes along which all ranks process the same samples."""
Pass = Callable[[tuple[Any, ...], Mapping[str, Any]], None]
"""Function that is called with the inputs of a forward pass."""


class ModuleSource:
    """The trace source of a `module` that `optimizer` trains: each step of the optimizer ends a
    step. If there are several optimizers, a step ends when all of them have stepped.

    The module may be wrapped by DistributedDataParallel, FullyShardedDataParallel, `fully_shard`,
    `parallelize_module`, torch.compile or accelerate. If `accumulation` is given, the script must
    divide the loss of each pass by it. Otherwise the passes of a step are logged separately, each
    under its number. The script must have averaged gradients over ranks before the optimizer steps.
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
        """Whether observers already know that the gradients of this step are complete."""
        self.replaced = ""
        """The names of two optimizers as text, if one replaced the other in this step; else empty."""
        self._foreign: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers that are not observed, because they hold no parameter of the module, or
        because they hold some, but not all, parameters of a known optimizer.
        """
        self._hooks: dict[int, tuple[Any, Any]] = {}
        self._watched: Callable[[int], None] = lambda number: None
        self._open: dict[int, tuple[int, int]] = {}
        """By the index of an optimizer: how many nested calls of its step() are running, and the
        number of forward passes when they began. If another forward pass has begun since, the calls
        ended with an error and do not count.
        """
        self._entered = 0
        """Number of forward passes since the trace was attached, evaluation included."""
        self.late = False
        """Whether weights of this step were updated before their gradients could be observed,
        because the trace was attached in the middle of the step.
        """
        self._ready: set[int] = set()
        """Indices of the optimizers that have begun to step, so that their gradients are complete."""
        self.stepping: list[Callable[[int], None]] = []
        """Functions to call before an optimizer steps, with the optimizer's index."""
        self.quiet, self.evaluating = False, 0
        """Whether the current forward pass is for evaluation, and the number of evaluation passes
        in this step that computed gradients.
        """
        self._calls: dict[Moment, list[Callable[[], None]]] = {
            "reduced": [],
            "updated": [],
            "ended": [],
        }
        self.passing: list[Pass] = []
        self.resumed = any(optimizer.state for optimizer in self.optimizers)
        self.outside = False
        """Whether the last forward pass of the module has ended, so that layers which run now are
        called by something else.
        """
        self.transformed = False
        """Whether a pass of this step ran in a transformation of torch.func, which computes gradients
        without a backward pass and has no tensors to look at.
        """
        self._given: tuple[Tensor, ...] = ()
        self._words: Mapping[int, str] = {}
        """By the id of an input tensor: the keyword with which the script passes it."""
        self.meeting: Meeting | None = None
        """The meeting at which all ranks wait for each other before a step; None if they do not."""
        self.last_gradient = 0.0
        """Time at which this rank computed its last gradient, on the host's clock."""
        self.done = 0
        """Number of steps before a run that resumes another one, as given to `attach`."""
        self.numbers: Mapping[str, float] = {}
        """The loss and the norm of gradients of the last step, as far as invariants measure them."""
        self._said = False
        self._split_names: dict[tuple[str, str], tuple[str, str]] = {}
        """By the name and the part of a parameter: its layer, and its name within the layer."""
        self._enter()
        self.watch()

    @property
    def together(self) -> bool:
        """Whether all ranks still take the same steps. Only then the ranks' tensors are compared."""
        return not self.uneven and (self.meeting is None or not self.meeting.over)

    @property
    def uneven(self) -> bool:
        """Whether torch's `Join` allows ranks to take different numbers of steps, so that no rank
        may wait for another. The first time, a warning says so.
        """
        joins = any(part._join_config.enable for part in self._joinable)
        if joins and not self._said:
            self._said = True
            logger.warning(
                "trace: torch's Join lets ranks take different numbers of steps; nothing is checked"
            )
        return joins

    @cached_property
    def _joinable(self) -> Sequence[Any]:
        return [part for part in self.module.modules() if hasattr(part, "_join_config")]

    @property
    def optimizer(self) -> Any:
        """The first optimizer."""
        return self.optimizers[0]

    def _enter(self) -> None:
        """Have `begin` called with the arguments of each forward pass."""
        # `Module.compile` compiles `_call_impl`, which runs the hooks: one that is put in here
        # would become part of the graph.
        compiled_call = getattr(self.module, "_compiled_call_impl", None)
        if compiled_call is None:
            hook = Hook(lambda _, arguments, keywords: self.begin(arguments, keywords))
            self.module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
            self.module.register_forward_hook(Hook(self._leave), always_call=True)
            return

        def enter_compiled(*arguments: Any, **keywords: Any) -> Any:
            self.begin(arguments, keywords)
            return compiled_call(*arguments, **keywords)

        self.module._compiled_call_impl = enter_compiled

    def _leave(self, *_: Any) -> None:
        self.outside = not is_recomputing()

    def watch(self) -> None:
        """Have `before` called before each step of an optimizer, and `after` when all optimizers
        have stepped.
        """

        def note_step(number: int) -> None:
            depth, began = self._open.get(number, (1, 0))
            self._open[number] = max(0, depth - 1), began
            if depth != 1:
                return
            self.late = number not in self._ready
            self.before(number)
            self._stepped.add(number)
            if len(self._stepped) == len(self.optimizers):
                self.after()

        def watch_optimizer(number: int) -> None:
            optimizer = self.optimizers[number]

            # Not compiled with the step of an optimizer: a graph would compute other samples.
            begin, end = map(
                torch.compiler.disable,
                (
                    lambda _, arguments, keywords: self._begin_optimizer_step(
                        number, arguments, keywords
                    ),
                    lambda *_: note_step(number),
                ),
            )
            before = optimizer.register_step_pre_hook(begin)
            after = optimizer.register_step_post_hook(end)
            self._hooks[number] = before, after

        self._watched = watch_optimizer
        for number in range(len(self.optimizers)):
            watch_optimizer(number)
        _watch_steps(self)

    def _meet(self, optimizer: Any) -> None:
        """Observe an optimizer that steps but was not passed to `attach`, if it holds parameters
        of the module.

        If it holds all parameters of a known optimizer, it replaces that optimizer. If no known
        optimizer holds any of its parameters, it is added.
        """
        inside = any(depth and began == self._entered for depth, began in self._open.values())
        if inside or optimizer in self._foreign or any(optimizer is one for one in self.optimizers):
            return
        own = {id(weight) for weight in self.module.parameters()}
        new = {id(weight) for group in optimizer.param_groups for weight in group["params"]} & own
        holdings = [
            set(self.groups_by_parameter([number])) & own for number in range(len(self.optimizers))
        ]
        number = next(
            (at for at, old in enumerate(holdings) if old and old <= new), len(self.optimizers)
        )
        # One that updates some of what another holds too is beside the training: it changes weights.
        if not new or (number == len(self.optimizers) and any(old & new for old in holdings)):
            self._foreign.add(optimizer)
            return
        if number < len(self.optimizers):
            for hook in self._hooks[number]:
                hook.remove()
            self.replaced = (
                f"{type(self.optimizers[number]).__name__} by {type(optimizer).__name__}"
            )
        optimizers = list(self.optimizers)
        optimizers[number : number + 1] = [optimizer]
        self.optimizers = tuple(optimizers)
        self._watched(number)

    def _begin_optimizer_step(self, number: int, arguments: Any, keywords: Any) -> Any:
        """Handle the beginning of an optimizer's step. If step() gets a closure, gradients are
        complete only after the closure has run, so the closure is wrapped. Returns the changed
        arguments of step(), or None.
        """
        place = 1 if len(arguments) > 1 else None
        closure = arguments[1] if place else keywords.get("closure")
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

        def compute_loss() -> Any:
            result = closure()
            self.before(number)
            return result

        if place:
            return (arguments[0], compute_loss, *arguments[2:]), keywords
        return arguments, {**keywords, "closure": compute_loss}

    def before(self, number: int = 0) -> None:
        """Record that the gradients of the optimizer with index `number` are complete. In the
        first call of a step, ranks meet and observers are told.
        """
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
        """Tell observers that the step is over, and prepare the next step."""
        self._tell("updated")
        self._tell("ended")
        self._step += 1
        self._passes = self.evaluating = 0
        self._stepped.clear()
        self._ready.clear()
        self._whole = self.late = self.transformed = False
        self.replaced = ""

    def _tell(self, moment: Moment) -> None:
        for call in self._calls[moment]:
            call()

    @property
    def model(self) -> nn.Module:
        """The module without wrappers."""
        return naming.unwrap_module(self.module)

    @cached_property
    def layers(self) -> Mapping[str, nn.Module]:
        """The layers by name: the elements of lists of modules, and the largest modules outside
        such lists.
        """
        return naming.layers_by_name(self.module)

    @cached_property
    def hidden(self) -> frozenset[str]:
        """Names of the layers whose activations cannot be seen, because torch.compile does not call
        them one by one.
        """
        if _is_compiled(self.module):
            return frozenset(self.layers)
        compiled_modules = [module for module in self.model.modules() if _is_compiled(module)]
        # Hooks on what torch.compile returned run outside of the graph, those on its parts do not.
        inner = {
            id(part)
            for module in compiled_modules
            for part in module.modules()
            if part is not module
        }
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
        """The outermost modules of a forward pass; empty if hooks on them would be compiled into
        the graph.
        """
        return (
            () if getattr(self.module, "_compiled_call_impl", None) is not None else (self.module,)
        )

    @property
    def current_module(self) -> nn.Module:
        """The module whose forward pass begins."""
        return self.model

    strict = False
    """Whether more passes than `accumulation` in a step are always an error. They are not where
    several passes may share one loss.
    """

    divides = True
    """Whether something divides the loss of each pass by `accumulation`, whatever the script does."""

    @property
    def trains(self) -> bool:
        """Whether the model itself is in training mode, even if a wrapper is not."""
        return self.model.training

    @property
    def plain(self) -> bool:
        """Whether each gradient is the attribute `grad` of its parameter, as in plain torch."""
        return True

    @cached_property
    def at_hand(self) -> bool:
        """Whether a rank can read its tensors without communication with other ranks. For
        DTensors, the rank's part must be a box of the whole tensor, and `fully_shard` must have
        sharded the module, because otherwise gradients may still have to be summed.
        """
        weights = naming.parameters_by_name(self.module).values()
        return all(map(in_boxes, weights)) and (
            fully_sharded(self.module) or not any(map(is_split, weights))
        )

    @property
    def recomputes(self) -> bool:
        """True, because the module's own code may recompute."""
        return True

    @property
    def holders(self) -> Sequence[tuple[int, ...]]:
        return ()

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes along which ranks process different samples."""
        return tuple(axis for axis in self.comm.mesh.sizes if axis not in INSIDE)

    @cached_property
    def data(self) -> Group:
        """The group of ranks that process different samples. This rank is one of them."""
        return self.comm.along(self.axes)

    @property
    def passes(self) -> int:
        """Number of forward passes for training in this step so far."""
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
        """Return the placement of an activation. With sequence parallelism, each tensor rank holds
        a part of the tokens.
        """
        local, placement = part_and_placement(tensor, self.comm, ())
        group, shape = self.comm.mesh.sizes.get("tensor", 1), tuple(local.shape)
        # Sequence parallelism leaves each tensor rank a part of the tokens, in dimension 1.
        tokens = next((argument.shape[1] for argument in self._given if argument.dim() > 1), 0)
        if (
            placement.sizes != placement.whole
            or group == 1
            or len(shape) < 2
            or shape[1] * group != tokens
        ):
            return placement
        return placement.split(1, self.comm.group("tensor").index, group)

    def has_batch_dimension(self, tensor: Tensor) -> bool:
        """Return whether the first dimension of an activation runs over the samples of the input,
        or over its tokens.
        """
        first = next((argument for argument in self._given if argument.dim()), None)
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
                self.local_tensor(name, kind, "", buffer.detach())
                for name, buffer in naming.buffers_by_name(self.module).items()
            )
        elif kind in ("weight", "gradient", "moment"):
            flat = flat_pieces(self.module)
            for name, parameter in naming.parameters_by_name(self.module).items():
                pieces = flat.get(id(parameter))
                for part, tensor in self.of(kind, parameter).items():
                    if pieces is None:
                        yield self.local_tensor(name, kind, part, tensor)
                    for piece in pieces or ():
                        end = piece.offset + piece.stop - piece.start
                        local = tensor.detach().reshape(-1)[piece.offset : end]
                        placement = Placement.full(piece.shape).run(piece.start, piece.stop)
                        yield Held(*self._split_name(piece.name, part, kind), local, placement)

    def local_tensor(self, name: str, kind: str, part: str, tensor: Tensor) -> Held:
        """Return a tensor that belongs to the parameter `name`, with its placement: the whole
        tensor if ranks hold copies of it, or this rank's part.
        """
        local, placement = part_and_placement(
            tensor, self.comm, tuple(axis for axis in self.comm.mesh.sizes if axis != "pipeline")
        )
        return Held(*self._split_name(name, part, kind), local, placement)

    def global_name(self, name: str) -> str:
        """The global name of a parameter or buffer whose name in the module is `name`."""
        return name

    def _split_name(self, name: str, part: str, kind: str) -> tuple[str, str, str]:
        key = name, part
        if key not in self._split_names:
            layer, rest = naming.layer_of(self.global_name(name), self.layers)
            self._split_names[key] = layer, ".".join(word for word in (rest, part) if word)
        layer, tensor = self._split_names[key]
        return layer, kind, tensor

    def of(self, kind: Kind, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """Return the tensors of a kind that belong to a parameter, such as its moments. The keys
        are suffixes for the parameter's name.
        """
        if kind == "weight":
            return {"": parameter.detach()}
        if kind == "gradient":
            # Zeros for none: the parameter is in the log, and can be compared.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradient = gradient if gradient.layout == torch.strided else gradient.to_dense()
            return {"": gradient.detach()} if parameter.requires_grad else {}
        states = (optimizer.state.get(parameter, {}) for optimizer in self.optimizers)
        values = {name: value for state in states for name, value in state.items()}
        return {
            name: value
            for name, value in values.items()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        }

    def batch(self) -> Iterator[Held]:
        """Yield the input tensors of the current pass. Tensor ranks have the same inputs, and data
        ranks have different ones. Their names are numbers, with a keyword if there is one:
        "1:attention_mask".
        """
        for index, tensor in enumerate(self._given):
            word = self._words.get(id(tensor))
            name = f"{index}:{word}" if word else str(index)
            yield Held("", "input", name, tensor, Placement.full(tuple(tensor.shape), ("tensor",)))

    def on(self, moment: Moment, call: Callable[[], None]) -> None:
        self._calls[moment].append(call)

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """The groups of parameters of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def moving(self) -> Sequence[int]:
        """The indices of the optimizers that have begun to step in this step."""
        return sorted(self._ready)

    def groups_by_parameter(self, numbers: Iterable[int]) -> dict[int, Mapping[str, Any]]:
        """Return the parameter group of each parameter that the optimizers with these indices
        hold, by the parameter's id.
        """
        return {
            id(weight): group
            for number in numbers
            for group in self.optimizers[number].param_groups
            for weight in group["params"]
        }

    def casts(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Return the 16-bit weights of which this rank holds fp32 masters, each with its master. If
        the script itself made the masters, they are assigned by shape and order.
        """
        held = {id(one): one for group in self.groups for one in group["params"]}
        parameters = naming.parameters_by_name(self.module)
        own, masters = {id(weight) for weight in parameters.values()}, dict[Any, list[Tensor]]()
        for weight in held.values():
            if id(weight) not in own and weight.dtype == torch.float32:
                masters.setdefault(weight.shape, []).append(weight)
        return {
            name: (weight, masters[weight.shape].pop(0))
            for name, weight in parameters.items()
            if weight.requires_grad
            and weight.dtype in SHORT
            and id(weight) not in held
            and masters.get(weight.shape)
        }

    def settings(self) -> Mapping[str, object]:
        pairs = (
            (f"group {at}.{name}", value)
            for at, group in enumerate(self.groups)
            for name, value in group.items()
        )
        values = {
            name: value for name, value in pairs if not name.endswith((".params", ".param_names"))
        }
        kinds = " + ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        return {"optimizer": kinds, "accumulation": self.accumulation, **values}

    def modes(self) -> Mapping[str, list[str]]:
        """Return the names of the largest modules that are in evaluation mode though the model
        trains, of the parameters that require no gradient, and of those that have several names.
        """
        evaluating: list[str] = []
        for name, module in naming.modules_by_path(self.module) if self.trains else ():
            if not module.training and not name.startswith(tuple(f"{one}." for one in evaluating)):
                evaluating.append(name)
        weights = naming.parameters_by_name(self.module).items()
        frozen = [name for name, weight in weights if not weight.requires_grad]
        ties = [" and ".join(map(self.global_name, tie)) for tie in naming.ties_of(self.module)]
        return {"evaluating": evaluating, "frozen": frozen, "tied": ties}

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
        """Yield the present numbers in the optimizers' settings, one tensor for each setting. A
        setting that has the same value in all parameter groups is yielded once, so that the
        division into groups does not matter; so are the learning rates, each once.
        """
        for name in dict.fromkeys(
            name for group in self.groups for name in group if name != "params"
        ):
            values = [group[name] for group in self.groups if name in group]
            if name == "lr" and all(isinstance(value, int | float | Tensor) for value in values):
                yield self._numbers("learning rate", sorted({float(value) for value in values}))
                continue
            alike = len(values) == len(self.groups) and all(value == values[0] for value in values)
            for at, value in enumerate(values[:1] if alike else values):
                numbers = value if isinstance(value, list | tuple) else [value]
                if all(isinstance(part, int | float) for part in numbers):
                    yield self._numbers(f"group {at}.{name}", numbers)

    def begin(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Handle the beginning of a forward pass. A pass for training is counted, and its inputs
        are recorded.
        """
        # A checkpoint runs the model again inside backward: that is no pass of its own.
        if is_recomputing():
            return
        self._entered += 1
        self.outside = False
        transformed = torch._C._functorch.maybe_current_level() is not None
        self.transformed |= transformed
        self.quiet = transformed or not (self.trains and torch.is_grad_enabled())
        if self.quiet:
            # Without gradients, evaluation is meant; with them, train() may have been forgotten.
            if torch.is_grad_enabled() and not transformed:
                self.evaluating += 1
            return
        if self._stepped:
            self.after()
        self._passes += 1
        self.begin_pass()
        leaves = tree_leaves(in_order(self.current_module, arguments, keywords))
        self._given = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        mappings = [keywords, *(value for value in arguments if isinstance(value, Mapping))]
        self._words = {id(value): str(key) for pairs in mappings for key, value in pairs.items()}
        for call in self.passing:
            call(arguments, keywords)

    def begin_pass(self) -> None:
        """Tell the other ranks that a forward pass for training begins."""
        if self.meeting is not None:
            self.meeting.begin_forward()


def in_order(
    module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> list[Any]:
    """Return the arguments of a call of `module` in the order in which its forward method declares
    them, whether they were passed by position or by name.
    """
    kind: Any = type(module)
    try:
        declaration = _forward_signature(kind)
        by_name = declaration.bind_partial(module, *arguments, **keywords).arguments
    except (TypeError, ValueError):  # it takes something else, as its own error will say
        return [*arguments, *(keywords[name] for name in sorted(keywords))]
    open_ = {
        name
        for name, parameter in declaration.parameters.items()
        if parameter.kind is Parameter.VAR_KEYWORD
    }
    # Keywords that forward does not name come in the order of the call, which may be any.
    values = [sorted(value.items()) if name in open_ else value for name, value in by_name.items()]
    return values[1:]


@lru_cache
def _forward_signature(kind: Any) -> Signature:
    return signature(kind.forward)


def ranks_of(module: nn.Module) -> Comm:
    """Return the communicator of this rank. Its mesh has all ranks of the process group, along the
    axes over which torch distributes `module`; without a process group it has one rank.
    """
    rank, world = rank_and_world() or (0, 1)
    return Comm(mesh_of(module, world), rank)


def bare_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of accelerate and others. Raises `BridgeError` if
    the optimizer cannot be observed.
    """
    inner = getattr(optimizer, "optimizer", None)
    if inner is not None and hasattr(inner, "param_groups"):
        return bare_optimizer(inner)
    if not hasattr(optimizer, "param_groups"):
        raise BridgeError(
            f"attach: found an optimizer of type {type(optimizer).__name__}, expected an optimizer of torch or a wrapper"
            " around one; pass an object with param_groups and step()"
        )
    return optimizer


def _is_compiled(module: nn.Module) -> bool:
    return (
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    )


_sources: weakref.WeakSet[ModuleSource] = weakref.WeakSet()
"""The sources that want to know of every step of any optimizer."""


def _watch_steps(source: ModuleSource) -> None:
    """Tell a source of every step of any optimizer, for as long as the source lives."""
    # One hook for all sources, which stays: a hook that goes with its source may go while torch
    # walks through the hooks of a step, and that step would end in an error.
    if not _hooked:
        hook = torch.compiler.disable(_report_step)  # type: ignore[no-untyped-call]
        _hooked.append(register_optimizer_step_pre_hook(hook))
    _sources.add(source)


_hooked: list[Any] = []
"""The handle of the hook on the steps of all optimizers. Empty until the first source is made."""


def _report_step(optimizer: Any, arguments: Any, keywords: Any) -> None:
    for source in tuple(_sources):
        source._meet(optimizer)
