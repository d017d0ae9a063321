"""Blocks: a model that is written as one module, like the models of Hugging Face, runs as a list of
layers.

Nothing is traced or rewritten. A layer before, between or after the blocks runs the model's own
forward pass, in which substitutes replace the modules of all other layers. A substitute for a
module of an earlier layer returns the tensors that came from that layer. A substitute for a block
of a later layer records its arguments. Arguments that follow from the batch alone, such as masks,
are computed on every rank. Everything else is sent from rank to rank: the residual stream, and
other tensors that are computed from weights.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_unflatten

from bridge.engine.layers import Arguments, Chain, Layer, watched
from bridge.engine.randomness import scope
from bridge.errors import BridgeError, ConfigError

WHOLE = "the model can only run as one layer"


class Uncut(ConfigError):
    """Raised for a model that cannot be divided into layers."""


class Step(NamedTuple):
    """One call of a module in a forward pass: the name of the module, and how often the module was
    called before in this pass.
    """

    name: str
    turn: int = 0


@dataclass(frozen=True)
class Output:
    """The structure of a call's output. `form` is the nesting, and `leaves` the values in it, with
    None in place of each tensor. `values` is a table from the position of a tensor in `leaves` to
    the tensor's number, for tensors that a later layer uses. `alike` is a table from the position
    of a tensor in `leaves` to the position of an argument with the same shape.
    """

    form: Any
    leaves: tuple[Any, ...]
    alike: Mapping[int, int]
    values: Mapping[int, int]

    def fill_tensors(self, tensors: Mapping[int, Any]) -> Any:
        """Return an output of this structure, with `tensors` at their positions."""
        leaves = [tensors.get(place, leaf) for place, leaf in enumerate(self.leaves)]
        return tree_unflatten(leaves, self.form)

    def imitate_output(
        self, block: Block, arguments: Sequence[Any], tensors: Mapping[int, Any]
    ) -> Any:
        """Return a substitute for the output of a block, with `tensors` at their positions. Every
        other tensor is replaced by an argument of the call with the same shape. The stream leaves
        the block as it came in.
        """
        alike = {place: arguments[at] for place, at in self.alike.items()}
        return self.fill_tensors({**alike, block.leaves_at: arguments[block.place], **tensors})


@dataclass(frozen=True)
class Block:
    """A call of a block. The incoming stream is the leaf at `place` among the arguments, and the
    outgoing stream the leaf at `leaves_at` in the output. For arguments that travel between ranks,
    `taken` has their numbers by position.
    """

    step: Step
    place: int
    leaves_at: int
    taken: Mapping[int, int]


@dataclass(frozen=True)
class Segment:
    """The calls of modules between two rows of blocks, before the first row, or after the last one.
    `unused` are modules that were not called when the model was tried.
    """

    steps: tuple[Step, ...]
    unused: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the segment's modules."""
        return tuple(dict.fromkeys((*(step.name for step in self.steps), *self.unused)))


@dataclass(frozen=True)
class Cut:
    """A model divided into layers: segments and rows of blocks in turn, with a segment at both
    ends.

    Tensors that pass from layer to layer have numbers; `entering` has the numbers of each layer's
    inputs, in order. For each module outside the blocks, `blanks` has a function that makes a
    substitute for the module's output from a weight and a call. `beside` are the names of
    parameters of modules that contain the blocks. `fixed` are arguments for every call of the
    model, which turn its caches off. `packs` is true if the model then takes positions that restart
    within a row for those of packed documents, and with its cache does not.
    """

    layers: tuple[Segment | Block, ...]
    entering: tuple[tuple[int, ...], ...]
    outputs: Mapping[Step, Output]
    blanks: Mapping[str, Callable[[Tensor, BlockCall], Any]]
    beside: tuple[str, ...]
    fixed: Mapping[str, Any]
    packs: bool = False

    @cached_property
    def places(self) -> Mapping[Step, int]:
        """For each call, the index of the layer that makes it."""
        places: dict[Step, int] = {}
        for place, layer in enumerate(self.layers):
            steps = layer.steps if isinstance(layer, Segment) else (layer.step,)
            places.update(dict.fromkeys(steps, place))
        return places

    @cached_property
    def calls(self) -> Sequence[int]:
        """For each layer, the number of module calls in this layer and all layers before it."""
        return list(
            accumulate(len(one.steps) if isinstance(one, Segment) else 1 for one in self.layers)
        )

    @cached_property
    def rows(self) -> Mapping[int, range]:
        """A table from the index of each segment to the indices of the blocks that follow it."""
        ends = [place for place, one in enumerate(self.layers) if isinstance(one, Segment)]
        return {
            place: range(place + 1, end)
            for place, end in zip(ends, [*ends[1:], len(self.layers)], strict=True)
        }

    def blocks_of(self, place: int) -> list[Block]:
        """Return the blocks of the row after the segment at `place`."""
        row = (self.layers[at] for at in self.rows[place])
        return [block for block in row if isinstance(block, Block)]

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks, in the order of their calls."""
        return tuple(layer.step.name for layer in self.layers if isinstance(layer, Block))

    @property
    def before(self) -> tuple[str, ...]:
        """The names of the modules before all blocks."""
        first = self.layers[0]
        return first.modules if isinstance(first, Segment) else ()

    @property
    def after(self) -> tuple[str, ...]:
        """The names of the modules after all blocks."""
        last = self.layers[-1]
        return last.modules if isinstance(last, Segment) else ()


@dataclass
class BlockCall:
    """The arguments of a call, by position and by name."""

    given: list[Any]
    named: dict[str, Any]

    @cached_property
    def _flat(self) -> tuple[list[Any], Any]:
        return tree_flatten((self.given, self.named))

    @property
    def leaves(self) -> list[Any]:
        """All arguments, with nested ones taken apart."""
        return self._flat[0]

    def fill_arguments(self, values: Mapping[int, Any]) -> BlockCall:
        """Return this call with other arguments: `values` replace the arguments at their positions."""
        leaves, form = list(self.leaves), self._flat[1]
        for place, value in values.items():
            leaves[place] = value
        call = BlockCall(*tree_unflatten(leaves, form))
        # Taking arguments apart costs as much time as a small layer.
        call.__dict__["_flat"] = leaves, form
        return call


@dataclass(eq=False)
class Batch:
    """The model's arguments for one microbatch, and for each row of blocks the arguments of its
    blocks. The latter are found when the first block of the row needs them.
    """

    given: Arguments
    calls: dict[int, list[BlockCall]] = field(default_factory=dict)


@dataclass(frozen=True)
class Stream:
    """The value that passes between layers. `tensors` has the hidden states first, and then other
    tensors that are computed from weights. Only `tensors` are sent to other ranks, because every
    rank has the batch.
    """

    tensors: tuple[Tensor, ...]
    batch: Batch


register_pytree_node(
    Stream,
    lambda stream: (list(stream.tensors), stream.batch),
    lambda leaves, batch: Stream(tuple(leaves), batch),
)


class _Reached(Exception):
    """Raised when the last block of a row is called."""


class OuterLayer(nn.Module):
    """A layer made of modules and parameters that are outside the model's blocks."""

    def __init__(
        self,
        model: nn.Module,
        names: Iterable[str],
        beside: Iterable[str],
        run: Callable[[Any], Any],
    ) -> None:
        # Not as an attribute, which would make the model a child of its own part.
        self.__dict__["model"] = model
        super().__init__()
        self._run = run
        for index, name in enumerate(names):
            self.add_module(str(index), model.get_submodule(name))
        for index, name in enumerate(beside):
            self.register_parameter(f"beside{index}", model.get_parameter(name))

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return bool(self.__dict__["model"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        pass

    def forward(self, inputs: Any) -> Any:
        return self._run(inputs)


@dataclass
class _Pass:
    """A forward pass of the model that ends with the row of blocks after the segment at `place`. If
    no row follows the segment, the whole model runs.

    `values` has the tensors of earlier layers, by number; the segment adds its own. `real` is false
    if substitutes replace the modules of the segment too. `calls` are the calls of the blocks in
    the row.
    """

    place: int
    values: dict[int, Any]
    real: bool
    calls: list[BlockCall] = field(default_factory=list)
    turns: Counter[str] = field(default_factory=Counter)


class Blocks:
    """A model and its layers: rows of blocks, and the segments before, between and after them."""

    def __init__(self, model: nn.Module, cut: Cut) -> None:
        self.model, self.cut = model, cut
        self._modules = {step.name: model.get_submodule(step.name) for step in cut.places}
        self._now: _Pass | None = None
        self._standins = {
            name: _standin(module, partial(self._visit_module, name))
            for name, module in self._modules.items()
        }

    def chain(self) -> Chain:
        """The layers, in order."""
        cut, layers = self.cut, list[Layer]()
        counts: Counter[str] = Counter()
        names = {id(module): name for name, module in self.model.named_modules()}
        for place, layer in enumerate(cut.layers):
            parts: tuple[str, ...] = ()
            keys: dict[int, str] | None = None
            if isinstance(layer, Block):
                name = layer.step.name
                module: nn.Module = self._modules[name]
                run: Callable[[Any], Any] = partial(self._block, place)
            else:
                name, parts, keys = _title(cut, place), layer.modules, names
                run = module = OuterLayer(
                    self.model, parts, cut.beside, partial(self._segment, place)
                )
            counts[name] += 1
            if counts[name] > 1:
                # Names tell layers apart, also for their random numbers.
                name, parts = f"{name}#{counts[name]}", parts or (name,)
            layers.append(Layer(name, module, run, parts, keys))
        around = {name for step in cut.places for name in ancestors(step.name)}
        watcher = watched({name: self.model.get_submodule(name) for name in sorted(around)})
        return Chain(tuple(layers), 1, 1, True, self.receive_stream, watcher)

    def receive_stream(self, tensors: Sequence[Tensor], arguments: Arguments) -> Stream:
        """Return the stream made of `tensors` from another rank and of this rank's own batch."""
        return Stream(tuple(tensors), Batch(arguments))

    def _segment(self, place: int, inputs: Any) -> Any:
        """Run the segment at `place`. Return the input of the blocks behind the segment, or the
        model's output for the last segment.
        """
        if place:
            batch, tensors = inputs.batch, inputs.tensors
        else:
            BridgeError.raise_if(find_requests(self.model, inputs.named))
            if self.cut.packs and restarting(inputs.named):
                raise BridgeError(_PACKED)
            batch, tensors = Batch(inputs), ()
        now = _Pass(place, self._tensors_by_number(place, tensors), True)
        if place == len(self.cut.layers) - 1:
            output = self._run(batch, now)
            self._check(now)
            return output
        self._note(batch, now)
        return self._hand_on(place, now.values, batch)

    def _block(self, place: int, stream: Stream) -> Stream:
        """Run the block at `place`."""
        layer, batch = self.cut.layers[place], stream.batch
        values = self._tensors_by_number(place, stream.tensors)
        assert isinstance(layer, Block)
        segment = next(at for at, row in self.cut.rows.items() if place in row)
        if segment not in batch.calls:
            # This rank did not run the modules before these blocks. Blanks stand for them; dropout
            # among them must not move the generators, which this block is going to use.
            with torch.no_grad(), scope(stream.tensors[0].device):
                self._note(batch, _Pass(segment, dict(values), False))
        call = batch.calls[segment][place - segment - 1]
        call = call.fill_arguments({at: values[number] for at, number in layer.taken.items()})
        output = self._modules[layer.step.name](*call.given, **call.named)
        self._keep(layer.step, output, values)
        return self._hand_on(place, values, batch)

    def _tensors_by_number(self, place: int, tensors: Sequence[Tensor]) -> dict[int, Any]:
        """Return the tensors that enter the layer at `place`, by number."""
        return dict(zip(self.cut.entering[place], tensors, strict=True))

    def _hand_on(self, place: int, values: Mapping[int, Any], batch: Batch) -> Stream:
        """Return the input of the layer behind the one at `place`."""
        return Stream(tuple(values[number] for number in self.cut.entering[place + 1]), batch)

    def _keep(self, step: Step, output: Any, values: dict[int, Any]) -> None:
        """Add to `values` those tensors of an output that later layers use."""
        numbers = self.cut.outputs[step].values
        leaves = tree_leaves(output) if numbers else []
        values.update({number: leaves[at] for at, number in numbers.items()})

    def _note(self, batch: Batch, now: _Pass) -> None:
        """Run the model as far as `now` says, and record the arguments of the blocks in `batch`.
        Arguments that travel between ranks are added to `now.values` instead.
        """
        try:
            self._run(batch, now)
        except _Reached:
            self._check(now)
            batch.calls[now.place] = now.calls
            return
        block = self.cut.blocks_of(now.place)[len(now.calls)]
        raise BridgeError(f"{block.step.name}: {_OUT_OF_TURN}")

    def _check(self, now: _Pass) -> None:
        """Raise an error unless the pass called all blocks that come before its end, and all modules
        whose outputs later layers need. Other modules may be left out, such as the embedding if the
        model gets embedded tokens.
        """
        if now.turns.total() == self.cut.calls[now.place + len(now.calls)]:
            return
        for step, place in self.cut.places.items():
            left_out = place <= now.place + len(now.calls) and now.turns[step.name] <= step.turn
            incomplete = not now.values.keys() >= set(self.cut.outputs[step].values.values())
            if left_out and (incomplete or isinstance(self.cut.layers[place], Block)):
                raise BridgeError(f"{step.name}: {_OUT_OF_TURN}")

    def _run(self, batch: Batch, now: _Pass) -> Any:
        """Run the model's forward pass with substitutes for modules."""
        before, self._now = self._now, now
        try:
            with replace_modules(self.model, self._standins):
                return self.model(*batch.given.given, **{**self.cut.fixed, **batch.given.named})
        finally:
            self._now = before

    def _visit_module(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the forward pass of module `name`. Either records the arguments, or calls
        the module, or returns a substitute for the output, depending on the layer of the module.
        """
        now = self._now
        if now is None:  # a checkpoint around the module computes it again in backward
            raise Uncut(f"{name}: the model calls this module again in backward; {WHOLE}")
        step = Step(name, now.turns[name])
        now.turns[name] += 1
        at = self.cut.places.get(step)
        if at is None or at > now.place:
            return self._note_block(name, at, BlockCall(list(args), dict(kwargs)), now)
        if at == now.place and now.real:
            output = self._modules[name](*args, **kwargs)
            self._keep(step, output, now.values)
            return output
        return self._again(step, at, BlockCall(list(args), dict(kwargs)), now)

    def _note_block(self, name: str, at: int | None, call: BlockCall, now: _Pass) -> Any:
        """Record the arguments of the block at `at`, and return a substitute for its output. Ends
        the forward pass after the last block of the row.
        """
        block, leaves = None if at is None else self.cut.layers[at], call.leaves
        if not isinstance(block, Block) or at != now.place + len(now.calls) + 1:
            raise BridgeError(f"{name}: {_OUT_OF_TURN}")
        if now.real:
            for place, number in block.taken.items():
                now.values.setdefault(number, leaves[place])
        now.calls.append(call.fill_arguments(dict.fromkeys(block.taken)))
        # Nothing behind the last block is of interest: the exception ends the model's forward pass
        # there.
        if at == self.cut.rows[now.place][-1]:
            raise _Reached
        return self.cut.outputs[block.step].imitate_output(block, leaves, {})

    def _again(self, step: Step, at: int, call: BlockCall, now: _Pass) -> Any:
        """Return the output of a module of an earlier layer, made of the tensors that came from
        there.
        """
        output, block = self.cut.outputs[step], self.cut.layers[at]
        tensors = {at: now.values[each] for at, each in output.values.items() if each in now.values}
        if isinstance(block, Block):
            return output.imitate_output(block, call.leaves, tensors)
        if all(leaf is not None or place in tensors for place, leaf in enumerate(output.leaves)):
            return output.fill_tensors(tensors)
        weight = next(self._modules[step.name].parameters())
        leaves, form = tree_flatten(self.cut.blanks[step.name](weight, call))
        return tree_unflatten([tensors.get(place, leaf) for place, leaf in enumerate(leaves)], form)


def _title(cut: Cut, place: int) -> str:
    """Return the name of a segment: the name of its first module, or for the last segment the name
    of the module that it calls last.
    """
    segment = cut.layers[place]
    assert isinstance(segment, Segment)
    if not segment.modules:
        block = cut.layers[max(place - 1, 0)]
        return f"{block.step.name}.after" if isinstance(block, Block) else "before"
    last = place == len(cut.layers) - 1
    return segment.steps[-1].name if last and segment.steps else segment.modules[0]


def ancestors(name: str) -> list[str]:
    """Return the names of all modules that contain the module `name`, from the model itself ("")
    inwards.
    """
    words = name.split(".")
    return [".".join(words[:number]) for number in range(len(words))]


def restarting(kwargs: Mapping[str, Any]) -> bool:
    """Return whether positions without a mask restart within a row."""
    positions = kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or kwargs.get("attention_mask") is not None:
        return False
    return bool((positions.diff(dim=-1) != 1).any())


def find_layer_drop(model: nn.Module) -> str | None:
    """Return the setting, with its value, by which the model leaves out blocks at random in
    training, or None if it does not.
    """
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        for key, value in {**getattr(config, "__dict__", {}), **vars(module)}.items():
            if key.endswith("layerdrop") and isinstance(value, float) and value > 0:
                return f"{f'{name}.' if name else ''}{key}={value}"
    return None


FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Names of settings that make a model return the activations of its blocks."""
CACHES = ("use_cache", "past_key_values")


def find_requests(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each setting or argument that asks for an output or a cache that a model
    in layers does not return.
    """
    for flag in FLAGS:
        if kwargs.get(flag, getattr(getattr(model, "config", None), flag, False)):
            yield f"{flag}: {_NOT_KEPT}"
    for name in CACHES:
        if kwargs.get(name):
            yield f"{name}: {_NO_CACHE}"


_NOT_KEPT = (
    "a model that is run in layers does not collect activations of its blocks; leave this setting"
    " out, or set it in the model's config before initialize, so that the model stays one layer"
)
_NO_CACHE = (
    "a model that is run in layers keeps no cache;"
    " leave this argument out, and call engine.module to generate"
)
_PACKED = (
    "position_ids: the positions restart within a row. With its cache, this model attends across the"
    " documents that they pack, and in layers, which keep no cache, it does not; set use_cache=False in"
    " the model's config, or pass an attention_mask"
)
_OUT_OF_TURN = (
    "the model does not call this module in the order in which it was divided into layers;"
    " turn off settings that change this order, such as layerdrop, or use zero.stage 2"
)


@contextmanager
def replace_modules(model: nn.Module, others: Mapping[str, nn.Module]) -> Iterator[None]:
    """Context in which the modules `others` stand in place of the modules with these names."""
    places = [
        (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], other)
        for name, other in others.items()
    ]
    originals = [owner._modules[leaf] for owner, leaf, _ in places]
    try:
        for owner, leaf, other in places:
            owner._modules[leaf] = other
        yield
    finally:
        for (owner, leaf, _), module in zip(places, originals, strict=True):
            owner._modules[leaf] = module


def _standin(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Return a module that runs `forward`. It has all attributes of `module`, but none of its
    hooks.
    """
    standin = copy(module)
    # With gradient checkpointing on, transformers' layers would run `forward` within a checkpoint,
    # and once more in backward.
    hooks = {name: OrderedDict[int, Any]() for name in vars(module) if name.endswith("_hooks")}
    standin.__dict__.update(hooks, forward=forward, gradient_checkpointing=False)
    return standin
