"""Writes `mp_rank_*` of Megatron-LM (--ckpt-format torch): a file for each tensor rank, of one stage, with a plain optimizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from bridge.config import shown
from bridge.errors import SourceError
from bridge.layout.shard import Box
from bridge.rules import Effect
from bridge.state.digests import SUMS
from bridge.state.files import File
from bridge.state.formats import Wanted, Written
from bridge.state.hub import Hub, lost, weights_of
from bridge.state.lazy import Held, Joined, Lazy, Run, Shape, cast, torch_type
from bridge.state.packing import saved
from bridge.state.pickled import Record
from compat.megatron.state import run
from compat.megatron.state.ranks import ENGINE_ORDER, LAYERS, OUTPUT, OWN_ORDER, WORDS, Parallel, boxes, ordered

if TYPE_CHECKING:
    from torch import Tensor

LINEAR = ("linear_proj.", "linear_qkv.", "linear_fc1.", "linear_fc2.", "output_layer.")
"""Modules that have an extra state, which is empty without 8-bit formats."""
DIVISIBLE = 128
"""What Megatron-LM makes the rows of the vocabulary a multiple of on each tensor rank (--make-vocab-size-divisible-by)."""


@dataclass(frozen=True)
class Cut(Lazy):
    """A box of a tensor; only the rows that hold it are read."""

    base: Lazy
    place: Box

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        """Its sizes."""
        return self.place.sizes

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """That of the whole."""
        return self.base.dtype

    def flat(self, start: int, stop: int) -> Tensor:
        """Of as many rows as hold these elements."""
        width = prod(self.shape[1:])
        first, last = start // width, -(-stop // width)
        (offset, *offsets), (_, *sizes) = self.place.offsets, self.place.sizes
        found = self.base.box(Box((offset + first, *offsets), (last - first, *sizes)))
        return found.reshape(-1)[start - first * width : stop - first * width]


@dataclass(frozen=True)
class Layout:
    """What is written: format of the weights, tensor ranks, shapes with rows of padding, and names in the order of the model."""

    hub: Hub
    dtype: str
    ranks: int
    shapes: Mapping[str, Shape]
    names: tuple[str, ...]

    def part(self, name: str, whole: Lazy, rank: int) -> Lazy:
        """A tensor rank's part of a parameter, or of a tensor beside it."""
        pieces = [_piece(whole, box) for box in boxes(name, self.shapes, rank, self.ranks)]
        if len(pieces) == 1:
            return pieces[0]
        runs = tuple(Run(piece, 0, piece.count) for piece in pieces)
        return Joined(runs, (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:]), whole.dtype)

    def weight(self, name: str) -> Lazy:
        """The copy that the model computes with."""
        held = self.hub.parameters[name]
        return weights_of(held.weight if held.weight.dtype == self.dtype else held.best, self.dtype)


def _piece(whole: Lazy, box: Box) -> Lazy:
    """A box of a tensor whose last rows may be padding, which are zeros."""
    if box.sizes == whole.shape:
        return whole
    inside = max(0, min(whole.shape[0] - box.offsets[0], box.sizes[0]))
    found: Lazy = Cut(whole, Box(box.offsets, (inside, *box.sizes[1:])))
    if inside == box.sizes[0]:
        return found
    import torch

    padding = Held(torch.zeros(prod(box.sizes) - found.count, dtype=torch_type(whole.dtype)))
    runs = (Run(found, 0, found.count), Run(padding, 0, padding.count))
    return Joined(tuple(run for run in runs if len(run)), box.sizes, whole.dtype)


def plan(hub: Hub, wanted: Wanted, tracker: str, file: str) -> Written:
    """The files for so many tensor ranks. Raises `SourceError` for what these files cannot be."""
    layout = _layout(hub, wanted)
    place = f"iter_{run.iteration_of(hub):07d}"
    ranks = range(layout.ranks)
    files = [saved(f"{place}/mp_rank_{rank:02d}/{file}", _state(layout, rank)) for rank in ranks]
    files.append(File(tracker, (str(run.iteration_of(hub)).encode(),)))
    return Written(tuple(files), f"{place}/{SUMS}", (*run.unsaid(hub), *_padded(layout)))


def _layout(hub: Hub, wanted: Wanted) -> Layout:
    args, ranks = run.carried(hub).get("args") or {}, wanted.ranks or 1
    odd = [name for name in hub.parameters if ".experts." in name or ".local_experts." in name]
    if odd:
        raise SourceError(f"megatron-ranks: {odd[0]}: experts are not written in this format; choose --to megatron")
    shapes = {name: held.weight.shape for name, held in hub.parameters.items()}
    layers = len({name.split(".")[2] for name in shapes if name.startswith(LAYERS)})
    order = OWN_ORDER if any(name.endswith(".input_layernorm.weight") for name in shapes) else ENGINE_ORDER
    names = ordered(shapes, Parallel(ranks, 1, layers), 0, order)
    strange = sorted(set(shapes) - set(names))
    if strange or not layers:
        said = shown(strange[0]) if strange else "no layers"
        raise SourceError(f"megatron-ranks: {said}: not of a GPT of Megatron-Core; use --names megatron, or --to megatron")
    for name in (WORDS, OUTPUT):
        if name in shapes:
            shapes[name] = (_rows(shapes[name][0], args, ranks), *shapes[name][1:])
    return Layout(hub, wanted.dtype or hub.computed, ranks, shapes, tuple(names))


def _rows(words: int, args: Mapping[str, Any], ranks: int) -> int:
    """Rows of the vocabulary with padding (training/tokenizer: vocab_size_with_padding), as the run's own arguments have them."""
    told = args.get("padded_vocab_size")
    if isinstance(told, int) and told >= words and told % ranks == 0:
        return told
    unit = (args.get("make_vocab_size_divisible_by") or DIVISIBLE) * ranks
    return -(-words // int(unit)) * int(unit)


def _state(layout: Layout, rank: int) -> dict[str, Any]:
    """A rank's file (training/checkpointing.py: generate_state_dict)."""
    hub = layout.hub
    found = run.common_of(hub, _optimizer(layout, rank) if hub.moments else {})
    if isinstance(found.get("args"), Record):
        sizes = {"tensor_model_parallel_size": layout.ranks, "pipeline_model_parallel_size": 1, "rank": rank}
        found["args"] = Record("argparse Namespace", (), {**found["args"].state, **sizes})
    return {**found, "model": OrderedDict(_model(layout, rank))}


def _model(layout: Layout, rank: int) -> Iterator[tuple[str, Lazy | None]]:
    """The state dict of the model: each parameter, and behind those of a linear layer its extra state."""
    before = ""
    for name in layout.names:
        module = name.rpartition(".")[0]
        if before and module != before:
            yield from _extra(before)
        yield name, layout.part(name, layout.weight(name), rank)
        before = module
    yield from _extra(before)
    if OUTPUT not in layout.shapes:
        yield "output_layer._extra_state", None


def _extra(module: str) -> Iterator[tuple[str, None]]:
    if f"{module}.".endswith(LINEAR):
        yield f"{module}._extra_state", None


def _optimizer(layout: Layout, rank: int) -> dict[str, Any]:
    """The optimizer's state: parameters are numbered by group, those that decay first (optimizer/optimizer.py: state_dict)."""
    import torch

    hub, state, masters = layout.hub, dict[int, Any](), list[list[Lazy]]()
    rows, sides = run.rows_of(hub, None), _sides(layout)
    for row, names in zip(rows, sides, strict=True):
        row["params"] = list(range(len(state), len(state) + len(names)))
        masters.append([layout.part(name, cast(hub.parameters[name].best, "F32"), rank) for name in names])
        for name in names:
            held = hub.parameters[name]
            step = {} if held.step is None else {"step": Held(torch.tensor(float(held.step)))}
            state[len(state)] = {
                **step,
                **{kind: layout.part(name, cast(moment, "F32"), rank) for kind, moment in held.moments.items()},
            }
    inner = {"state": state, "param_groups": rows}
    return inner if layout.dtype == "F32" else {"optimizer": inner, **run.grad_scaler(hub), "fp32_from_fp16_params": masters}


def _sides(layout: Layout) -> list[list[str]]:
    """Trained parameters by group, in the model's order."""
    trained = [name for name in layout.names if name in layout.hub.trained]
    sides = [[name for name in trained if _spared(layout, name) is side] for side in (False, True)]
    return [names for names in sides if names]


def _spared(layout: Layout, name: str) -> bool:
    return len(layout.shapes[name]) == 1 or name.endswith(".bias")


def _padded(layout: Layout) -> Iterator[Any]:
    for name in (WORDS, OUTPUT):
        if name in layout.shapes:
            rows, words = layout.shapes[name][0], layout.hub.parameters[name].weight.shape[0]
            if rows > words:
                said = f"{rows - words} rows of zeros behind the {words} of {name}, as Megatron-LM pads them"
                yield lost("vocabulary", f"{said}; logits of theirs take part in the loss", Effect.NUMBERS)
