"""Trial: runs a model on a few samples. The inputs and outputs of the modules show where the model
can be divided into layers, and which tensors pass from layer to layer.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from bridge.engine.layers import Arguments
from bridge.engine.models.blocks import (
    WHOLE,
    Block,
    BlockCall,
    Cut,
    Output,
    Segment,
    Step,
    Uncut,
    ancestors,
)
from bridge.errors import BridgeError

Source = tuple[int, int]
"""Identifies a tensor in the output of a call: the number of the call, and the position of the
tensor in the output.
"""


@dataclass(frozen=True)
class Called:
    """A call of a module: the arguments and the output, each with nested values taken apart, and
    the nesting of the output (`form`).
    """

    step: Step
    given: Sequence[Any]
    output: Sequence[Any]
    form: Any

    @property
    def name(self) -> str:
        """The name of the module."""
        return self.step.name


class Trial:
    """Runs a model once, and records its output and the calls of the modules `names`, in order.
    With `apart`, the autograd graph is cut behind each of these modules, so that the graph of a
    tensor ends at the outputs from which it was computed.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], apart: bool) -> None:
        self.model, self.names, self.apart = model, names, apart
        self.calls: list[Called] = []
        self.output: Any = None
        self._origins: dict[int, Source] = {}
        self._starts: list[Tensor] = []
        self._turns: Counter[str] = Counter()

    def run(self, arguments: Arguments, constants: Mapping[str, Any]) -> Trial:
        """Run the model. Raises `Uncut` if it does not run so."""
        with ExitStack() as stack:
            for name in self.names:
                hook = self.model.get_submodule(name).register_forward_hook
                stack.callback(hook(partial(self._record_call, name), with_kwargs=True).remove)
            try:
                self.output = self.model(*arguments.given, **{**constants, **arguments.named})
            except BridgeError:
                raise
            except Exception as error:  # whatever the model's own code raises
                raise Uncut(
                    f"{type(self.model).__name__}: a trial of its modules one by one fails"
                    f" ({type(error).__name__}: {error}); {WHOLE}"
                ) from error
        return self

    def _record_call(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        leaves, form = tree_flatten(output)
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if self.apart and leaf.is_floating_point():
                start = leaf.detach().requires_grad_()
                # A copy, since models write into what they get.
                leaf = leaves[place] = start.clone()
                self._starts.append(start)
                self._origins[id(start)] = len(self.calls), place
            elif self.apart and id(leaf) in self._origins:
                continue  # indices that a later module hands on come from the one that chose them
            self._origins[id(leaf)] = len(self.calls), place
        arguments = BlockCall(list(args), dict(kwargs)).leaves
        self.calls.append(Called(Step(name, self._turns[name]), arguments, leaves, form))
        self._turns[name] += 1
        return tree_unflatten(leaves, form)

    def origin(self, value: Any) -> Source | None:
        """Return the number of the call that returned the tensor `value` itself, and the tensor's
        position in the output, or None if no call did.
        """
        return self._origins.get(id(value)) if isinstance(value, Tensor) else None

    def sources(self, value: Any) -> set[Source]:
        """Return the tensors in outputs of calls from which `value` was computed."""
        own = self.origin(value)
        if own is not None or not isinstance(value, Tensor):
            return set() if own is None else {own}
        sources, open_, visits = set[Source](), [value.grad_fn], set[Any]()
        while open_:
            node = open_.pop()
            if node is None or node in visits:
                continue
            visits.add(node)
            sources.update(filter(None, [self.origin(getattr(node, "variable", None))]))
            open_ += [after for after, _ in node.next_functions]
        return sources


def lists(model: nn.Module, arguments: Arguments, constants: Mapping[str, Any]) -> list[str]:
    """Return the names of the module lists that contain the blocks. In such a list, a module takes
    the output of the module before it.

    If the model's own plan for pipelines names some of these lists, only those are returned. If no
    list has such modules, the result is the lists that this plan names, or else the largest list.
    """
    outer = _outer(model)
    children = {
        f"{name}.{child}": name
        for name, module in outer.items()
        for child, _ in module.named_children()
    }
    trial = Trial(model, tuple(children), False).run(arguments, constants)
    last: dict[str, int] = {}
    rows = set[str]()
    for number, call in enumerate(trial.calls):
        name = children[call.name]
        froms = {origin[0] for leaf in call.given if (origin := trial.origin(leaf))}
        if last.get(name, -1) in froms:
            rows.add(name)
        last[name] = number
    plans = (getattr(module, "_pp_plan", None) or {} for module in model.modules())
    leaves = {name.rpartition(".")[2] for plan in plans for name in plan}
    plan_rows = {name for name in rows or last if name.rpartition(".")[2] in leaves}
    if plan_rows or rows:
        return sorted(plan_rows or rows)
    sizes = {name: sum(map(Tensor.numel, outer[name].parameters())) for name in last or outer}
    return [max(sizes, key=lambda name: sizes[name])]


def _outer(model: nn.Module) -> dict[str, nn.Module]:
    """Return the module lists of the model that have weights, by name. Lists inside another list,
    such as the experts of a block, are left out.
    """
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())
    }
    return {
        name: module
        for name, module in modules.items()
        if not any(parent in modules for parent in ancestors(name))
    }


def find_blocks(model: nn.Module, arguments: Arguments, constants: Mapping[str, Any]) -> list[str]:
    """Return the names of the blocks: the modules of the lists that contain them, or else of all
    children of one module that are alike in class and size those that are largest together. Raises
    `Uncut` if no module has such children.
    """
    if _outer(model):
        return [
            f"{name}.{child}"
            for name in lists(model, arguments, constants)
            for child, _ in model.get_submodule(name).named_children()
        ]
    alike: dict[Any, list[str]] = {}
    for name, module in model.named_modules():
        size = sum(map(Tensor.numel, module.parameters()))
        if name and size:
            alike.setdefault((name.rpartition(".")[0], type(module), size), []).append(name)
    sizes = {key: key[2] * len(names) for key, names in alike.items() if names[1:]}
    if not sizes:
        raise Uncut(f"{type(model).__name__}: no module of the model is repeated; {WHOLE}")
    return alike[max(sizes, key=lambda key: sizes[key])]


def units(model: nn.Module, blocks: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the modules that have weights, contain none of the `blocks`, and are in
    none of them. A module within another such module is left out.
    """
    around = dict.fromkeys(name for each in blocks for name in ancestors(each))
    names: dict[int, str] = {}
    for parent in around:
        for child, module in model.get_submodule(parent).named_children():
            name = f"{parent}.{child}" if parent else child
            if name not in (*around, *blocks) and any(True for _ in module.parameters()):
                names.setdefault(id(module), name)
    return tuple(names.values())


def cut(
    model: nn.Module, arguments: Arguments, constants: Mapping[str, Any], names: Sequence[str] = ()
) -> Cut:
    """Run a model once, and return how to divide it into layers, of which `names` may be the blocks.
    Raises `Uncut` if this is not possible.
    """
    modules = dict(model.named_modules())
    Uncut.raise_if(
        f"layers: the model has no module {name!r}; {WHOLE}"
        for name in names
        if name not in modules
    )
    blocks = [*names] or find_blocks(model, arguments, constants)
    trial = Trial(model, (*units(model, blocks), *blocks), True).run(arguments, constants)
    calls = {call.name for call in trial.calls}
    Uncut.raise_if(
        f"{name}: is never called, expected at least one call; {WHOLE}"
        for name in blocks
        if name not in calls
    )
    around = {name for each in blocks for name in ancestors(each)}
    beside = tuple(
        name for name, _ in model.named_parameters() if name.rpartition(".")[0] in around
    )
    return _Cutting(trial, set(blocks)).cut(beside, constants)


@dataclass
class _Place:
    """A layer: the indices of the calls that it makes. For a block, `row` is the index of the first
    block in the same row.
    """

    calls: list[int]
    row: int | None = None


@dataclass
class _Cutting:
    """Turns a trial into a division of the model. Tensors that pass from layer to layer get
    numbers: `made` has the layer that computes each of them, and `needed` the numbers that each
    layer uses. For each block, `taken` has the numbers of those arguments that other layers
    compute, by position.
    """

    trial: Trial
    blocks: set[str]
    places: list[_Place] = field(default_factory=list)
    home: dict[int, int] = field(default_factory=dict)
    outputs: dict[Source, int] = field(default_factory=dict)
    arguments: dict[tuple[int, int], int] = field(default_factory=dict)
    made: list[int] = field(default_factory=list)
    needed: dict[int, set[int]] = field(default_factory=dict)
    taken: dict[int, dict[int, int]] = field(default_factory=dict)

    def cut(self, beside: tuple[str, ...], constants: Mapping[str, Any]) -> Cut:
        """Return the division of the model into layers."""
        self._in_layers()
        for at, place in enumerate(self.places):
            for number in place.calls:
                for leaf_at, leaf in enumerate(self.trial.calls[number].given):
                    if place.row is None:
                        self._beside(at, leaf)
                    else:
                        self._argument(at, place.row, leaf_at, leaf)
        for leaf in tree_leaves(self.trial.output):
            self._beside(len(self.places) - 1, leaf)
        layers = [
            self._segment(at) if place.row is None else self._block(at, place)
            for at, place in enumerate(self.places)
        ]
        outputs = {
            call.step: Output(
                call.form,
                tuple(self._constants(call)),
                _alike(call),
                self._tensors_by_position(number),
            )
            for number, call in enumerate(self.trial.calls)
        }
        return Cut(
            tuple(layers), self._entering(layers), outputs, self._blanks(), beside, constants
        )

    def _in_layers(self) -> None:
        """Divide the calls into layers: segments, and rows of blocks between them."""
        waiting: list[int] = []
        row: int | None = None
        for number, call in enumerate(self.trial.calls):
            # Ahead of what takes the batch alone nothing would travel: it joins the segment.
            alone = not any(
                self.trial.sources(leaf) or _depends_on_weights(leaf) for leaf in call.given
            )
            if call.name not in self.blocks or alone:
                waiting.append(number)
                continue
            if row is None or waiting or not self._goes_on(number, row):
                self._add(waiting)
                waiting, row = [], len(self.places)
            self._add([number], row)
        self._add(waiting)

    def _add(self, calls: list[int], row: int | None = None) -> None:
        self.home.update(dict.fromkeys(calls, len(self.places)))
        self.places.append(_Place(calls, row))

    def _goes_on(self, number: int, row: int) -> bool:
        """Return whether the call belongs to the same row of blocks as the call before. One
        argument must be an output of the call before. An argument that was computed from outputs of
        the row must be one of these outputs itself.
        """
        direct = False
        for leaf in self.trial.calls[number].given:
            own = self.trial.origin(leaf)
            sources = self.trial.sources(leaf)
            here = {source for source in sources if self.home.get(source[0], -1) >= row}
            if here and own not in here:
                return False
            direct = direct or (own is not None and own[0] == number - 1)
        return direct

    def _argument(self, at: int, row: int, leaf_at: int, leaf: Any) -> None:
        """Record that the layer at `at` needs this argument from another layer, unless every rank
        can compute it from the batch.
        """
        own = self.trial.origin(leaf)
        if own is not None and self.home[own[0]] >= row:
            value = self._number(self.outputs, own, self.home[own[0]])
        elif _depends_on_weights(leaf) or own is not None:
            # The segment ahead of the row computes it, or has it: what it is there counts, and not
            # what it is in evaluation, where dropout gives what it gets.
            value = self._number(self.arguments, (row, id(leaf)), row - 1)
            self._beside(row - 1, leaf)
        else:
            return
        self.needed.setdefault(at, set()).add(value)
        self.taken.setdefault(at, {})[leaf_at] = value

    def _beside(self, at: int, leaf: Any) -> None:
        """Record that the layer at `at` needs the outputs of earlier layers from which this value
        was computed.
        """
        for source in self.trial.sources(leaf):
            home = self.home[source[0]]
            if home < at:
                self.needed.setdefault(at, set()).add(self._number(self.outputs, source, home))

    def _number(self, numbers: dict[Any, int], key: Any, home: int) -> int:
        if key not in numbers:
            numbers[key] = len(self.made)
            self.made.append(home)
        return numbers[key]

    def _tensors_by_position(self, number: int) -> dict[int, int]:
        """Return the numbers of the tensors in a call's output, by position."""
        return {at: value for (call, at), value in self.outputs.items() if call == number}

    def _segment(self, at: int) -> Segment:
        steps = tuple(self.trial.calls[number].step for number in self.places[at].calls)
        names = {call.name for call in self.trial.calls}
        last = at == len(self.places) - 1
        # Modules that this pass did not call go to the end, so that their weights belong to a
        # layer.
        return Segment(steps, tuple(n for n in self.trial.names if n not in names) if last else ())

    def _block(self, at: int, place: _Place) -> Block:
        number = place.calls[0]
        call, numbers = self.trial.calls[number], self.taken.get(at, {})
        tensors = [n for n, leaf in enumerate(call.output) if isinstance(leaf, Tensor)]
        if not tensors or not numbers:
            what = (
                "the block returns no tensor"
                if numbers
                else "the block gets no input that is computed from weights"
            )
            raise Uncut(f"{call.name}: {what}; {WHOLE}")
        goes_on = at + 1 < len(self.places) and self.places[at + 1].row == place.row
        following = self._stream_of(at + 1) if goes_on else None
        out = self._tensors_by_position(number)
        leaves_at = following[1] if following else min(out, default=tensors[0])
        before = self._stream_of(at)
        # The first of a row takes its stream where the second does.
        likely = before or following
        stream = likely[0] if likely and likely[0] in numbers else min(numbers)
        return Block(call.step, stream, leaves_at, numbers)

    def _stream_of(self, at: int) -> tuple[int, int] | None:
        """Return two positions: of the argument through which the block gets the stream from the
        block before it, and of the same tensor in the output of that block. Return None for the
        first block of a row.
        """
        if self.places[at].row in (None, at):
            return None
        before = self.places[at - 1].calls[0]
        for leaf_at, leaf in enumerate(self.trial.calls[self.places[at].calls[0]].given):
            own = self.trial.origin(leaf)
            if own is not None and own[0] == before:
                return leaf_at, own[1]
        return None

    def _constants(self, call: Called) -> Iterator[Any]:
        """Yield each bool and each text in the output of a call, and None in place of every other
        value. Raises `Uncut` for a number in the output of a block, because the number may be
        different for another batch and cannot be replaced.
        """
        for leaf in call.output:
            number = isinstance(leaf, int | float) and not isinstance(leaf, bool)
            if number and call.name in self.blocks:
                raise Uncut(
                    f"{call.name}: the block returns the number {leaf}, expected tensors; {WHOLE}"
                )
            yield leaf if isinstance(leaf, bool | str) else None

    def _entering(self, layers: Sequence[Segment | Block]) -> tuple[tuple[int, ...], ...]:
        """Return, for each layer, the numbers of the tensors that enter it, with the stream first."""
        rows: list[tuple[int, ...]] = []
        live = set[int]()
        for at in reversed(range(len(layers))):
            layer, before = layers[at], layers[at - 1]
            live = {n for n in live | self.needed.get(at, set()) if self.made[n] < at}
            lead = layer.taken[layer.place] if isinstance(layer, Block) else None
            if isinstance(layer, Segment) and at and isinstance(before, Block):
                lead = self.outputs.get((self.places[at - 1].calls[0], before.leaves_at))
            rows.append(tuple(sorted(live, key=lambda number: (number != lead, number))))
        return tuple(reversed(rows))

    def _blanks(self) -> dict[str, Zeros | Shapes]:
        """Return, for each module outside the blocks, a function that makes a substitute for the
        module's output. Ranks without the module call this function.
        """
        blanks: dict[str, Zeros | Shapes] = {}
        for number, call in enumerate(self.trial.calls):
            # A module that once needs shapes of its own always gets them.
            if self.places[self.home[number]].row is None and call.name not in blanks:
                calls = [each for each in self.trial.calls if each.name == call.name]
                zeros = {Zeros.of(each) for each in calls}
                alike = zeros.pop() if len(zeros) == 1 else None
                module = self.trial.model.get_submodule(call.name)
                blanks[call.name] = alike or Shapes(_without_memory(module))
        return blanks


def _alike(call: Called) -> dict[int, int]:
    """Return, for each tensor in the output of a call, the position of the first argument with the
    same shape.
    """
    shapes: dict[tuple[int, ...], int] = {}
    for at, leaf in enumerate(call.given):
        if isinstance(leaf, Tensor):
            shapes.setdefault(tuple(leaf.shape), at)
    leaves = enumerate(call.output)
    output_shapes = {at: tuple(leaf.shape) for at, leaf in leaves if isinstance(leaf, Tensor)}
    return {at: shapes[shape] for at, shape in output_shapes.items() if shape in shapes}


def _depends_on_weights(value: Any) -> bool:
    """Return whether `value` is a tensor that was computed from weights."""
    return isinstance(value, Tensor) and value.requires_grad


@dataclass(frozen=True)
class Zeros:
    """Makes zeros as a substitute for an output with `dims` dimensions. The last dimension has the
    size `width`, and the others are as large as those of the first tensor argument.
    """

    dims: int
    width: int

    @classmethod
    def of(cls, call: Called) -> Zeros | None:
        """Return a `Zeros` for the output of `call`. Return None if the output is not a single
        tensor, or if its sizes before the last differ from those of the first tensor argument.
        """
        tensor = next((leaf for leaf in call.given if isinstance(leaf, Tensor)), None)
        (first, *more) = call.output
        if more or tensor is None or not isinstance(first, Tensor) or not first.dim():
            return None
        alike = first.shape[:-1] == tensor.shape[: first.dim() - 1]
        return cls(first.dim(), first.shape[-1]) if alike else None

    def __call__(self, weight: Tensor, call: BlockCall) -> Tensor:
        """Return zeros for this call, with the format and on the device of `weight`."""
        tensor = next(leaf for leaf in call.leaves if isinstance(leaf, Tensor))
        return weight.new_zeros(*tensor.shape[: self.dims - 1], self.width)


@dataclass(frozen=True)
class Shapes:
    """Makes zeros as a substitute for the output of `module`. A copy of the module without memory
    (on torch's meta device) is run to find the shapes.
    """

    module: nn.Module

    def __call__(self, weight: Tensor, call: BlockCall) -> Any:
        """Return zeros for this call, with the format and on the device of `weight`."""
        args, kwargs = tree_map_only(Tensor, lambda leaf: leaf.to("meta"), (call.given, call.named))
        with torch.no_grad():
            output = self.module(*args, **kwargs)
        return tree_map_only(Tensor, partial(_fill_shape, weight), output)


def _fill_shape(weight: Tensor, shape: Tensor) -> Tensor:
    dtype = weight.dtype if shape.is_floating_point() else shape.dtype
    return torch.zeros(shape.shape, dtype=dtype, device=weight.device)


def _without_memory(module: nn.Module) -> nn.Module:
    """Return a copy of `module` whose tensors have shapes but no memory."""
    tensors = chain(module.parameters(), module.buffers())
    memo: dict[int, Any] = {}
    for tensor in tensors:
        bare = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(bare, False) if isinstance(tensor, nn.Parameter) else bare
    return copy.deepcopy(module, memo)
