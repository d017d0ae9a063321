"""Cutting: a model of Hugging Face is run on a few tokens to find where it can be cut into layers.
The layers are then run one by one, each with no weights but its own, and have to give the same
output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bridge.engine.layers import Arguments
from bridge.engine.models.blocks import Batch, Blocks, Cut, Stream, asked
from bridge.errors import BridgeError, ConfigError
from bridge.findings import Finding
from bridge.layout.pipeline import ranks_of
from bridge.plan import Plan
from bridge.rules import Effect

SHAPE = (2, 8)
"""Samples and tokens of the trial."""
WHOLE = "it can only be run as one layer"


class Uncut(ConfigError):
    """A model that cannot be cut."""


def planned(
    model: nn.Module, plan: Plan, parts: object = None
) -> tuple[Cut | None, tuple[Finding, ...]]:
    """The cut of a model of Hugging Face, and None for other models, with findings.

    A model that cannot be cut is run as one layer, unless pipeline ranks have to share it. If ZeRO
    3 is asked for, that is a finding, because one layer is never sharded.
    """
    if isinstance(model, nn.Sequential):
        return None, ()
    reason = "make it an nn.Sequential to shard them"
    if is_hugging_face(model):
        try:
            return cut_of(model), ()
        except Uncut as error:
            if ranks_of(plan) > 1 or parts:
                raise
            reason = str(error)
    if plan.zero.effective_stage != 3:
        return None, ()
    return None, (
        Finding(
            "zero.stage",
            f"this model is one layer, so its weights stay whole: {reason}",
            Effect.COST,
            True,
        ),
    )


def is_hugging_face(model: nn.Module) -> bool:
    """Whether `model` is one of transformers, or wraps one."""
    return hasattr(model, "config") and callable(getattr(model, "get_input_embeddings", None))


def cut_of(model: nn.Module) -> Cut:
    """The cut of `model`. Raises `Uncut` with the module in the way."""
    Uncut.raise_if(asked(model, {}))
    # Weights take part in backward, so that arguments of blocks which are computed from weights
    # show.
    with still(model), _trained(model):
        seen, given, fixed, expected = _run(model)
        cut = _with_extras(model, replace(seen.cut(), fixed=fixed), given)
        _prove(model, cut, given, expected)
    return cut


@dataclass
class _Seen:
    """The calls of blocks and of modules beside them in a forward pass, in order: name, arguments,
    named arguments, output.
    """

    model: nn.Module
    container: str
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=list)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The blocks, in order."""
        return tuple(
            f"{self.container}.{name}"
            for name, _ in self.model.get_submodule(self.container).named_children()
        )

    @property
    def units(self) -> tuple[str, ...]:
        """The largest modules with weights beside the blocks."""
        around = _ancestors(self.container)
        named = (
            (f"{parent}." if parent else "", self.model.get_submodule(parent)) for parent in around
        )
        children = (
            (f"{lead}{name}", module)
            for lead, parent in named
            for name, module in parent.named_children()
        )
        outer = (
            (name, module) for name, module in children if name not in (*around, self.container)
        )
        return tuple(name for name, module in outer if any(True for _ in module.parameters()))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the calls from here on."""
        with ExitStack() as stack:
            for name in (*self.blocks, *self.units):

                def hook(
                    module: nn.Module, given: Any, named: Any, output: Any, name: str = name
                ) -> None:
                    self.calls.append((name, given, named, output))

                stack.callback(
                    self.model.get_submodule(name)
                    .register_forward_hook(hook, with_kwargs=True)
                    .remove
                )
            yield

    def cut(self) -> Cut:
        """The cut that the calls show, without extras."""
        blocks, units, names = self.blocks, self.units, [name for name, *_ in self.calls]
        self._in_turn(names)
        first, last = names.index(blocks[0]), names.index(blocks[-1])
        between = (name for name in names[first:last] if name in units)
        Uncut.raise_if(
            f"{name}: runs between the blocks of {self.container}; {WHOLE}" for name in between
        )
        before: dict[str, tuple[int, ...]] = {}
        for name, _, _, output in self.calls[:first]:
            if not isinstance(output, Tensor):
                raise Uncut(
                    f"{name}: returns {type(output).__name__} ahead of the blocks, expected a tensor; {WHOLE}"
                )
            before[name] = tuple(output.shape)
        # Modules that this pass did not call go to the end, so that their weights belong to a
        # layer.
        after = tuple(
            dict.fromkeys((*names[last + 1 :], *(name for name in units if name not in names)))
        )
        around = _ancestors(self.container)
        beside = tuple(
            name for name, _ in self.model.named_parameters() if name.rpartition(".")[0] in around
        )
        place, returns = _way([call for call in self.calls if call[0] in blocks])
        return Cut(blocks, before, after, beside, place, returns, tuple({} for _ in blocks), {})

    def _in_turn(self, names: list[str]) -> None:
        blocks = self.blocks
        called = [name for name in names if name in blocks]
        if tuple(called) != blocks:
            wrong = next((name for name in blocks if called.count(name) != 1), self.container)
            raise Uncut(
                f"{wrong}: is called {called.count(wrong)} times, expected once and in order; {WHOLE}"
            )


def _way(calls: list[Any]) -> tuple[int | str, tuple[int, ...]]:
    """The place at which blocks take the stream, and the length of the tuple that each returns (0:
    a bare tensor).
    """
    outputs = [output[0] if isinstance(output, tuple) else output for *_, output in calls]
    for (name, *_), output in zip(calls, outputs, strict=True):
        if not isinstance(output, Tensor):
            raise Uncut(
                f"{name}: returns {type(output).__name__}, expected a tensor first; {WHOLE}"
            )
    place = _place(calls[0], None)
    for output, (name, *call) in zip(outputs, calls[1:], strict=False):
        place = _place((name, *call), output)
    return place, tuple(len(output) if isinstance(output, tuple) else 0 for *_, output in calls)


def _place(
    call: tuple[str, tuple[Any, ...], dict[str, Any], Any], stream: Tensor | None
) -> int | str:
    """The argument that is `stream` itself; without one, the first argument that is a tensor."""
    name, given, named, _ = call
    values: list[tuple[int | str, Any]] = [*enumerate(given), *named.items()]
    for place, value in values:
        if value is stream if stream is not None else isinstance(value, Tensor):
            return place
    raise Uncut(f"{name}: does not take what the block before it returns as it is; {WHOLE}")


def _with_extras(model: nn.Module, cut: Cut, given: Arguments) -> Cut:
    """The cut with its extras: arguments of blocks beside the stream that are computed from
    weights.
    """
    batch = Batch(given, [])
    Blocks(model, cut)._noted(batch, {})
    numbers: dict[int, int] = {}
    extras = []
    for call in batch.calls or []:
        # What depends on a weight has a gradient. The same tensor may go to several blocks, and
        # travels once.
        leaves = enumerate(tree_leaves((call.given, call.named)))
        marked = {
            place: leaf for place, leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad
        }
        extras.append(
            {place: numbers.setdefault(id(leaf), len(numbers)) for place, leaf in marked.items()}
        )
    return replace(cut, extras=tuple(extras))


def _prove(model: nn.Module, cut: Cut, given: Arguments, expected: Any) -> None:
    """Run the layers one by one, each as if it were alone on a rank. Raise unless they give the
    model's output, bit by bit.
    """
    blocks = Blocks(model, cut)
    value: Any = given
    for layer in blocks.chain().layers:
        with _alone(model, layer.module), torch.no_grad():
            try:
                value = layer(value)
            except BridgeError:
                raise
            except Exception as error:
                raise Uncut(
                    f"{layer.name}: does not run without the rest of the model ({type(error).__name__}: {error})"
                ) from error
        # As from another rank: without the calls that an earlier layer noted.
        value = blocks.received(value.tensors, given) if isinstance(value, Stream) else value
    if not _same(value, expected):
        raise Uncut(
            f"{cut.blocks[0]}: run one by one, the blocks give another output than the model; {WHOLE}"
        )


def _same(one: Any, other: Any) -> bool:
    first, second = (
        [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in (one, other)
    )
    return len(first) == len(second) and all(
        a.shape == b.shape and bool(torch.equal(a, b)) for a, b in zip(first, second, strict=True)
    )


def _run(model: nn.Module) -> tuple[_Seen, Arguments, Mapping[str, Any], Any]:
    """Run the model on a few tokens, with a loss if it takes labels. Returns its calls, its
    arguments, the fixed arguments of all runs, and its output.
    """
    fixed = uncached(model)
    try:
        ids = tokens(model)
    except NotImplementedError:
        raise Uncut(
            f"{type(model).__name__}: has no embedding of words to begin with; {WHOLE}"
        ) from None
    # With labels first, as it is called in training. Not every model takes them.
    for named in ({"input_ids": ids, "labels": ids}, {"input_ids": ids}):
        seen = _Seen(model, _container(model))
        try:
            with seen.watching(), torch.no_grad():
                return seen, Arguments((), named), fixed, model(**fixed, **named)
        except Exception as error:
            found = f"{type(model).__name__}: does not run on input_ids alone ({type(error).__name__}: {error}); {WHOLE}"
    raise Uncut(found)


def uncached(model: nn.Module) -> Mapping[str, Any]:
    """Arguments that turn the model's cache off."""
    return {"use_cache": False} if hasattr(model.config, "use_cache") else {}


def tokens(model: nn.Module, shape: tuple[int, int] = SHAPE) -> Tensor:
    """Tokens of the trial, of `shape` (samples, tokens), all in the model's vocabulary."""
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    number = getattr(embeddings, "num_embeddings", None) or len(next(embeddings.parameters()))
    return (
        torch.arange(shape[0] * shape[1], device=next(model.parameters()).device).view(shape)
        % number
    )


def _container(model: nn.Module) -> str:
    """The name of the list of blocks: the one that the model's own plan for pipelines names, or
    else the largest.
    """
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    # Blocks may hold lists themselves, such as their experts.
    outer = {
        name: module
        for name, module in lists.items()
        if not any(parent in lists for parent in _ancestors(name))
    }
    plans = (getattr(module, "_pp_plan", None) or {} for module in model.modules())
    named = {name.rpartition(".")[2] for plan in plans for name in plan}
    planned = {name for name in outer if name.rpartition(".")[2] in named}
    sizes: dict[str, int] = {
        name: sum(weight.numel() for weight in outer[name].parameters())
        for name in planned or outer
    }
    if not sizes:
        raise Uncut(f"{type(model).__name__}: has no list of blocks; {WHOLE}")
    return max(sizes, key=lambda name: sizes[name])


def _ancestors(name: str) -> list[str]:
    """Names of the modules around a module, from the model itself ("") inwards."""
    words = name.split(".")
    return [".".join(words[:number]) for number in range(len(words))]


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """While inside, the model is in evaluation mode. Afterwards modes, buffers and torch's
    generators are as they were.
    """
    modes = [(module, module.training) for module in model.modules()]
    held = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        model.eval()
        with torch.random.fork_rng([]):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for buffer, value in held:
            buffer.copy_(value)


@contextmanager
def _trained(model: nn.Module) -> Iterator[None]:
    """While inside, every weight takes part in backward."""
    held = [
        (weight, weight.requires_grad)
        for weight in model.parameters()
        if weight.is_floating_point()
    ]
    try:
        for weight, _ in held:
            weight.requires_grad_(True)
        yield
    finally:
        for weight, trained in held:
            weight.requires_grad_(trained)


@contextmanager
def _alone(model: nn.Module, module: nn.Module) -> Iterator[None]:
    """While inside, all weights but those of `module` are NaN."""
    own = {id(weight) for weight in module.parameters()}
    others = [
        (weight, weight.data)
        for weight in model.parameters()
        if id(weight) not in own and weight.is_floating_point()
    ]
    try:
        # A single element of memory each. A layer that reads one of them cannot give the right
        # output.
        for weight, data in others:
            weight.data = data.new_full((), nan).expand(data.shape)
        yield
    finally:
        for weight, data in others:
            weight.data = data
