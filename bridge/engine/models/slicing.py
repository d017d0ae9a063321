"""Slicing: finds the modules in the blocks of a Hugging Face model that need whole sequences, so
that the others can run on slices of tokens. Each block runs on all tokens, and then again on the
first half of them. In the second run, its modules return the first half of their earlier outputs.
If the block then returns the first half of its earlier output, only its modules can need whole
sequences. Otherwise the block itself needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bridge.engine.models.blocks import Block, BlockCall, Cut
from bridge.engine.models.cutting import cut_of, still, tokens, without_cache
from bridge.engine.sequence import is_stream, stream_at
from bridge.engine.tensor_parallel import TOKENS
from bridge.errors import ConfigError
from bridge.layout.tensor import Tokens

CLOSE = 1e-4
"""The largest difference at which two activations count as equal, as a share of the largest
element.
"""


def slice_model(model: nn.Module, rows: Sequence[str]) -> Tokens:
    """Return how the stream of `model` is split by tokens. `rows` are the linear layers that are
    split by input features. Raises `ConfigError` if the stream does not have the shape (batch,
    tokens, features).
    """
    cut = cut_of(model)
    if len(cut.rows) > 2:
        raise ConfigError(
            f"parallel.sequence: {type(model).__name__} has {len(cut.rows) - 1} rows of blocks, expected one;"
            " turn parallel.sequence off"
        )
    with still(model), torch.no_grad():
        runs = _runs(model, cut, rows)
        if not is_stream(runs[cut.blocks[0]].stream):
            raise ConfigError(
                f"parallel.sequence: {cut.blocks[0]} does not take activations of shape (batch, tokens,"
                " features); turn parallel.sequence off"
            )
        regions: list[str] = []
        whole: list[str] = []
        for name, run in runs.items():
            if _by_token(model, name, run):
                for unit, record in run.units.items():
                    (regions if record.closed else whole).append(unit)
            else:
                whole.append(name)
    width = runs[cut.blocks[0]].stream.shape[-1]
    return Tokens(cut.blocks[0], cut.blocks[-1], width, tuple(regions), tuple(whole))


@dataclass
class _Unit:
    """The inputs and outputs of a module within a block, call by call. `closed` is true if the
    module returns the output of a split layer unchanged.
    """

    calls: list[tuple[Any, Any]] = field(default_factory=list)
    closed: bool = False


@dataclass
class _Run:
    """A call of a block on whole sequences: the arguments, the stream among them, the output, and
    the calls of the modules within the block (`units`).
    """

    call: BlockCall
    stream: Tensor
    output: Any
    units: Mapping[str, _Unit]


Note = Callable[[tuple[Any, ...], dict[str, Any], Any], None]
"""Type of a function that gets the positional arguments, the named arguments and the output of a
call.
"""


def _runs(model: nn.Module, cut: Cut, rows: Sequence[str]) -> dict[str, _Run]:
    """Run the model on a few tokens, and return the call of each block, by name."""
    runs: dict[str, _Run] = {}
    ends: dict[str, Any] = {}
    places = {layer.step.name: layer.place for layer in cut.layers if isinstance(layer, Block)}
    with ExitStack() as stack:
        for row in rows:
            stack.callback(
                _watch(model.get_submodule(row), partial(_end, ends, row.rpartition(".")[0]))
            )
        for name in cut.blocks:
            units = {unit: _Unit() for unit in _units(model, name)}
            for unit, record in units.items():
                stack.callback(
                    _watch(model.get_submodule(unit), partial(_record_call, ends, unit, record))
                )
            stack.callback(
                _watch(model.get_submodule(name), partial(_ran, runs, places[name], name, units))
            )
        model(input_ids=tokens(model), **without_cache(model))
    return runs


def _watch(module: nn.Module, note: Note) -> Callable[[], None]:
    """Call `note` after every call of `module`. Return a function that stops this."""

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        note(args, kwargs, output)

    return module.register_forward_hook(hook, with_kwargs=True).remove


def _end(ends: dict[str, Any], parent: str, args: Any, kwargs: Any, output: Any) -> None:
    ends[parent] = output


def _record_call(
    ends: dict[str, Any], name: str, record: _Unit, args: Any, kwargs: Any, output: Any
) -> None:
    first = output[0] if isinstance(output, tuple) else output
    # A module that goes on with what its last layer gave (dropout, a gate) has to get all of it.
    record.closed = ends.get(name) is first and not record.calls
    record.calls.append(((args, kwargs), output))


def _ran(
    runs: dict[str, _Run],
    place: int,
    name: str,
    units: Mapping[str, _Unit],
    args: Any,
    kwargs: Any,
    output: Any,
) -> None:
    call = BlockCall(list(args), dict(kwargs))
    runs[name] = _Run(call, call.leaves[place], output, units)


def _units(model: nn.Module, block: str) -> Iterator[str]:
    """Yield the names of the modules in a block that may need whole sequences. Norms do not need
    them, and neither do modules that have no weights and no children.
    """
    for name, module in model.get_submodule(block).named_children():
        inner = any(True for _ in module.children())
        if inner or any(weight.dim() > 1 for weight in module.parameters()):
            yield f"{block}.{name}"


def _by_token(model: nn.Module, name: str, run: _Run) -> bool:
    """Return whether tokens depend on each other only within the modules of a block. The block must
    not draw random numbers either, because dropout would need the mask of whole sequences.
    """
    half = run.stream.shape[TOKENS] // 2
    block = model.get_submodule(name)
    args, kwargs = ([_first(value, run.stream, half) for value in run.call.given], run.call.named)
    kwargs = {key: _first(value, run.stream, half) for key, value in kwargs.items()}
    with _replay_modules(model, run, half) as good:
        block.train()
        before = _random(run.stream)
        try:
            output = block(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
            return False  # what it does does not fit half of the tokens
        finally:
            block.eval()
        draws = not torch.equal(before, _random(run.stream))
    expected_half = _half(run.output, run.stream, half)
    complete = len(good) == sum(len(record.calls) for record in run.units.values())
    return not draws and complete and all(good) and _same(output, expected_half)


def _first(value: Any, stream: Tensor, half: int) -> Any:
    return value.narrow(TOKENS, 0, half) if value is stream else value


def _half(output: Any, stream: Tensor, half: int) -> Any:
    """Return an output in which every stream is cut to its first `half` tokens."""

    def cut(value: Tensor) -> Tensor:
        return (
            value.narrow(TOKENS, 0, half)
            if is_stream(value) and value.shape[:2] == stream.shape[:2]
            else value
        )

    return tree_map_only(Tensor, cut, output)


@contextmanager
def _replay_modules(model: nn.Module, run: _Run, half: int) -> Iterator[list[bool]]:
    """Context in which the modules of a block return the outputs that they gave for all tokens, cut
    to the first `half` tokens. Yields a list that gets a flag for each call of a module: whether
    its arguments were those of the whole run, cut in the same way.
    """
    good: list[bool] = []
    modules = {unit: model.get_submodule(unit) for unit in run.units}

    def play(record: _Unit) -> Callable[..., Any]:
        calls = iter(record.calls)

        def forward(*args: Any, **kwargs: Any) -> Any:
            (once, formerly), output = next(calls, (((), {}), None))
            leaves, _, place = stream_at(args, kwargs)
            others, _, _ = stream_at(once, formerly)
            if len(leaves) != len(others) or place < 0:
                raise ValueError(
                    "this module is called with other arguments or more often than before"
                )
            others[place] = others[place].narrow(TOKENS, 0, half)
            good.append(_same(leaves, others))
            return _half(output, run.stream, half)

        return forward

    try:
        for unit, record in run.units.items():
            modules[unit].forward = play(record)
        yield good
    finally:
        for module in modules.values():
            module.__dict__.pop("forward", None)


def _same(one: Any, other: Any) -> bool:
    first, second = (
        [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in (one, other)
    )
    return len(first) == len(second) and all(map(_close, first, second))


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    scale = (
        other.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp(min=1e-30)
        if other.numel()
        else torch.ones(())
    )
    return bool(torch.allclose(one, other, rtol=0.0, atol=float(CLOSE * scale), equal_nan=True))


def _random(tensor: Tensor) -> Tensor:
    """Return the state of the random generator that dropout on `tensor` would use."""
    return (
        torch.cuda.get_rng_state(tensor.device)
        if tensor.device.type == "cuda"
        else torch.get_rng_state()
    )
