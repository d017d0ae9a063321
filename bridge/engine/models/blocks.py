"""Blocks: a model that is written as one module, as Hugging Face's are, run as the layers that it
consists of.

Nothing is traced or rewritten. A layer beside the blocks is the model's own forward pass, in which
stand-ins take the place of the other layers' modules. They note the arguments of blocks and return
the stream that comes in. A block's other arguments, such as masks, follow from the batch alone.
Every rank therefore finds them by itself, and only the stream travels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_unflatten

from bridge.engine.layers import Arguments, Chain, Layer
from bridge.errors import BridgeError


@dataclass(frozen=True)
class Cut:
    """Where a model is cut, by names of its modules: those that run `before` its blocks and `after`
    them. `before` has the shape that each returned for the tokens of a trial. `beside` names
    parameters of the modules around the blocks.

    `place` is the argument in which a block takes the stream, as a number or a name. A block
    returns a tuple of so many things as `returns` says, with the stream first; 0 stands for the
    bare stream. `extras` has a mapping for each block: the places of other arguments that are
    computed from weights, with their numbers among those that travel with the stream. `fixed`
    arguments are passed to the model in every call, so that it keeps no caches.
    """

    blocks: tuple[str, ...]
    before: Mapping[str, tuple[int, ...]]
    after: tuple[str, ...]
    beside: tuple[str, ...]
    place: int | str
    returns: tuple[int, ...]
    extras: tuple[Mapping[int, int], ...]
    fixed: Mapping[str, Any]


@dataclass
class Call:
    """The arguments of a block, with None in the place of the stream."""

    given: list[Any]
    named: dict[str, Any]

    def filled(self, place: int | str, stream: Any) -> Call:
        """The same call with `stream` in its place."""
        given, named = list(self.given), dict(self.named)
        if isinstance(place, int):
            given[place] = stream
        else:
            named[place] = stream
        return Call(given, named)


@dataclass(eq=False)
class Batch:
    """The model's arguments, and the arguments of its blocks, which are found when the first of
    them needs its own.
    """

    given: Arguments
    calls: list[Call] | None = None


@dataclass(frozen=True)
class Stream:
    """The value between layers. `tensors` are hidden states, then the extras. They alone travel to
    other ranks, which have the batch themselves.
    """

    tensors: tuple[Tensor, ...]
    batch: Batch


register_pytree_node(
    Stream,
    lambda stream: (list(stream.tensors), stream.batch),
    lambda leaves, batch: Stream(tuple(leaves), batch),
)


class _Reached(Exception):
    """The last block was called."""


class Part(nn.Module):
    """The modules and parameters of a model that run beside its blocks, as one layer."""

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
        """The mode of the model."""
        return bool(self.__dict__["model"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        pass

    def forward(self, inputs: Any) -> Any:
        return self._run(inputs)


class Blocks:
    """A model and its layers: what runs before its blocks, each block, and what runs after them."""

    def __init__(self, model: nn.Module, cut: Cut) -> None:
        self.model, self.cut = model, cut
        self._blocks = [model.get_submodule(name) for name in cut.blocks]
        self._seen: Callable[[int, Call], Any] = lambda index, call: None
        self._standins = {
            name: _standin(block, partial(self._visited, at))
            for at, (name, block) in enumerate(zip(cut.blocks, self._blocks, strict=True))
        }
        self._blanks = {
            name: _standin(model.get_submodule(name), _blank(model, name, shape))
            for name, shape in cut.before.items()
        }

    def chain(self) -> Chain:
        """The layers, in order."""
        cut = self.cut
        first = Part(self.model, cut.before, cut.beside, self.enter)
        last = Part(self.model, cut.after, cut.beside, self.leave)
        layers = [Layer(next(iter(cut.before)), first, first, tuple(cut.before))]
        layers += [
            Layer(name, block, self._runs(at))
            for at, (name, block) in enumerate(zip(cut.blocks, self._blocks, strict=True))
        ]
        layers.append(Layer(cut.after[-1], last, last, cut.after))
        return Chain(tuple(layers), 1, 1, True, self.received)

    def enter(self, given: Arguments) -> Stream:
        """Run the modules before the blocks. Returns the first block's input."""
        BridgeError.raise_if(asked(self.model, given.named))
        batch = Batch(given, [])
        found = self._noted(batch, {})
        return Stream((found, *self._extras(batch.calls or [])), batch)

    def received(self, tensors: Sequence[Tensor], given: Arguments) -> Stream:
        """The stream of tensors from another rank, with this rank's own batch."""
        return Stream(tuple(tensors), Batch(given))

    def leave(self, stream: Stream) -> Any:
        """Run the modules after the blocks. Returns the model's output."""

        # The modules before the blocks are blanks here and the blocks stand-ins, so that the model
        # computes nothing until it has the last block's output.
        def seen(index: int, call: Call) -> Any:
            last = index == len(self._blocks) - 1
            return self._returned(index, stream.tensors[0] if last else self._stream(call))

        return self._run(stream.batch, self._blanks, seen)

    def _runs(self, index: int) -> Callable[[Stream], Stream]:
        """A block as a layer."""

        def run(stream: Stream) -> Stream:
            call = self._call(index, stream)
            found = self._blocks[index](*call.given, **call.named)
            return Stream(
                (found[0] if isinstance(found, tuple) else found, *stream.tensors[1:]), stream.batch
            )

        return run

    def _call(self, index: int, stream: Stream) -> Call:
        """The arguments of a block, with the stream in its place."""
        batch = stream.batch
        if batch.calls is None:
            # This rank did not run the modules before the blocks. Blanks stand for them; dropout
            # among them must not move the generators, which this block is going to use.
            batch.calls = []
            first = stream.tensors[0]
            devices = [first.device] if first.device.type == "cuda" else []
            with torch.no_grad(), torch.random.fork_rng(devices):
                self._noted(batch, self._blanks)
        call, places = batch.calls[index], self.cut.extras[index]
        if places:
            leaves, form = tree_flatten((call.given, call.named))
            for place, number in places.items():
                leaves[place] = stream.tensors[1 + number]
            call = Call(*tree_unflatten(leaves, form))
        return call.filled(self.cut.place, stream.tensors[0])

    def _noted(self, batch: Batch, blanks: Mapping[str, nn.Module]) -> Any:
        """Note the arguments of all blocks in `batch`. Returns the first block's stream."""
        entered: list[Any] = []

        def seen(index: int, call: Call) -> Any:
            stream = self._stream(call)
            entered.append(stream)
            assert batch.calls is not None
            if index != len(batch.calls):
                raise BridgeError(f"{self.cut.blocks[index]}: {_OUT_OF_TURN}")
            batch.calls.append(call.filled(self.cut.place, None))
            # Nothing behind the last block is of interest: the exception ends the model's forward
            # pass there.
            if index == len(self._blocks) - 1:
                raise _Reached
            return self._returned(index, stream)

        try:
            self._run(batch, blanks, seen)
        except _Reached:
            return entered[0]
        raise BridgeError(f"{self.cut.blocks[len(entered)]}: {_OUT_OF_TURN}")

    def _run(
        self, batch: Batch, blanks: Mapping[str, nn.Module], seen: Callable[[int, Call], Any]
    ) -> Any:
        """The model's forward pass with stand-ins for its blocks."""
        self._seen = seen
        with replaced(self.model, {**self._standins, **blanks}):
            return self.model(*batch.given.given, **{**self.cut.fixed, **batch.given.named})

    def _visited(self, index: int, /, *given: Any, **named: Any) -> Any:
        """The forward pass of the stand-in for block `index`."""
        return self._seen(index, Call(list(given), named))

    def _stream(self, call: Call) -> Any:
        return (
            call.given[self.cut.place]
            if isinstance(self.cut.place, int)
            else call.named[self.cut.place]
        )

    def _returned(self, index: int, stream: Any) -> Any:
        """The stream in the form in which that block returns it."""
        number = self.cut.returns[index]
        return (stream, *[None] * (number - 1)) if number else stream

    def _extras(self, calls: Sequence[Call]) -> list[Tensor]:
        """The extras that travel with the stream, in the order of their numbers. Several blocks may
        take the same one.
        """
        found: dict[int, Tensor] = {}
        for call, places in zip(calls, self.cut.extras, strict=True):
            leaves = tree_leaves((call.given, call.named)) if places else []
            found.update(
                {number: leaves[place] for place, number in places.items() if number not in found}
            )
        return [found[number] for number in sorted(found)]


FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Settings by which a model returns what its blocks hold."""
CACHES = ("use_cache", "past_key_values")


def asked(model: nn.Module, named: Mapping[str, Any]) -> Iterator[str]:
    """A problem for each output or cache that settings or arguments ask for and that a model in
    layers does not return.
    """
    for flag in FLAGS:
        if named.get(flag, getattr(model.config, flag, False)):
            yield f"{flag}: {_NOT_KEPT}"
    for name in CACHES:
        if named.get(name):
            yield f"{name}: {_NO_CACHE}"


_NOT_KEPT = (
    "a model that is run in layers does not collect what its blocks hold; leave it out, or set it in the model's config before"
    " initialize, so that the model stays one layer"
)
_NO_CACHE = (
    "a model that is run in layers keeps no cache; leave it out, and call engine.module to generate"
)
_OUT_OF_TURN = (
    "the model does not call its blocks once each and in order (layerdrop, perhaps); turn that off"
)


@contextmanager
def replaced(model: nn.Module, others: Mapping[str, nn.Module]) -> Iterator[None]:
    """While inside, the modules of `others` are in the places of their names."""
    places = [
        (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], other)
        for name, other in others.items()
    ]
    held = [owner._modules[leaf] for owner, leaf, _ in places]
    try:
        for owner, leaf, other in places:
            owner._modules[leaf] = other
        yield
    finally:
        for (owner, leaf, _), module in zip(places, held, strict=True):
            owner._modules[leaf] = module


def _standin(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A module that has all attributes of `module` and runs `forward`, without its hooks."""
    found = copy(module)
    # With gradient checkpointing on, transformers' layers would run `forward` within a checkpoint,
    # and once more in backward.
    hooks = {name: OrderedDict[int, Any]() for name in vars(module) if name.endswith("_hooks")}
    found.__dict__.update(hooks, forward=forward, gradient_checkpointing=False)
    return found


def _blank(model: nn.Module, name: str, shape: Sequence[int]) -> Callable[..., Tensor]:
    """A function that returns zeros of the shape that the module `name` returns: `shape`, with the
    batch's own leading sizes.
    """
    weight = next(model.get_submodule(name).parameters())

    def forward(*given: Any, **named: Any) -> Tensor:
        taken = next(leaf for leaf in tree_leaves((given, named)) if isinstance(leaf, Tensor))
        return weight.new_zeros(*taken.shape[: len(shape) - 1], shape[-1])

    return forward
