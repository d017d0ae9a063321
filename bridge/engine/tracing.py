"""The engine as a source of traces. It knows the part of each activation, weight and gradient that
this rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bridge.comm import Comm
from bridge.engine.formats import TORCH
from bridge.engine.optimizer import clip_factor, setting
from bridge.engine.tensor_parallel import TOKENS, VocabularyLinear
from bridge.layout.shard import Flat, Parameter, holders_of
from bridge.trace import naming
from bridge.trace.placement import Placement
from bridge.trace.record import SHARD, Unit
from bridge.trace.source import Held, Kind, Moment, Now

if TYPE_CHECKING:
    from bridge.engine.runner import Engine


@dataclass(frozen=True)
class EngineSource:
    """Describes an engine to traces."""

    engine: Engine

    @cached_property
    def layers(self) -> Mapping[str, nn.Module]:
        """Layers of all pipeline ranks, of which this rank runs some. If a layer consists of
        several modules of a model, these modules are listed, under the names that the model gives
        them.
        """
        model = self.engine.model
        parts = {
            name: model.get_submodule(name)
            for layer in self.engine.chain.layers
            for name in layer.parts
        }
        own = (
            (layer, name)
            for layer in self.engine.chain.layers
            for name in layer.parts or (layer.name,)
        )
        return {name: parts.get(name, layer.module) for layer, name in own}

    @property
    def entrance(self) -> str:
        pipeline = self.engine.pipeline
        first = min(pipeline.local(self.engine.line.index))
        layer = self.engine.chain.layers[pipeline.layers[first][0]]
        return layer.parts[0] if layer.parts else layer.name

    at_hand = True
    """Whether weights and gradients can be read without communication between ranks."""

    @property
    def recomputes(self) -> bool:
        return any(stage.recomputes for stage in self.engine.executor.stages.values())

    @property
    def holders(self) -> Sequence[tuple[int, ...]]:
        homes = self.engine.pipeline.schedule.homes
        return sorted({holders_of(parameter, homes) for parameter in self.engine.parameters})

    @property
    def comm(self) -> Comm:
        return self.engine.comm

    def now(self) -> Now:
        """The position of the run. Microbatches are known to be equal if the plan sets their size.
        """
        engine = self.engine
        equal = engine.plan.batch.micro is not None
        number = engine.accumulation * engine.data.size if equal else None
        return Now(engine.started, engine.place, number, engine.executor.again)

    def factors(self) -> Mapping[Unit, float]:
        """Factors for the gradients of the step that ends. Gradients times these factors are those
        that the optimizer gets, after clipping.
        """
        norm, clip = self.engine.progress.grad_norm, setting(self.engine.plan.optimizer, "clip")
        clipped = clip_factor(norm, clip) if isfinite(norm) else 1.0
        return {"activation": self.engine.unit, "parameter": self.engine.gradient_unit * clipped}

    @property
    def loss(self) -> float:
        """The loss of the step that ends, over all ranks."""
        return self.engine.progress.loss

    def on(self, moment: Moment, call: Callable[[], None]) -> None:
        self.engine.watchers[moment].append(call)

    def settings(self) -> Mapping[str, object]:
        return {**self.engine.plan.values(), "seed": self.engine.seed}

    def about(self) -> Mapping[str, object]:
        engine = self.engine
        formats = {
            name for flat in engine.layout.flats for name in (flat.dtype, flat.reduce, flat.master)
        }
        return {
            "engine": "native",
            "mesh": dict(engine.comm.mesh.sizes),
            "accumulation": engine.accumulation,
            "hidden": self._hidden(),
            "formats": sorted(str(TORCH[name]).removeprefix("torch.") for name in formats),
            "settings": dict(self.settings()),
        }

    def _hidden(self) -> list[str]:
        """Modules without weights outside the layers. They run on every rank that computes the
        arguments of its blocks.
        """
        if not self.engine.chain.called:
            return []
        found = naming.layers(self.engine.model)
        return [
            name
            for name, module in found.items()
            if name not in self.layers and not any(True for _ in module.parameters())
        ]

    def batched(self, tensor: Tensor) -> bool:
        """Return whether an activation has a row for each sample. An activation whose first
        dimension is 1, although there are several samples, is the same for all samples.
        """
        leaves = (
            leaf
            for leaf in tree_leaves(self.engine.batch)
            if isinstance(leaf, Tensor) and leaf.dim()
        )
        return not tensor.dim() or tensor.shape[0] != 1 or len(next(leaves, tensor)) == 1

    def activation(self, layer: str, tensor: Tensor, output: bool) -> Placement:
        """Return the placement of `tensor`, a part of a layer's activation.

        Logits of a split vocabulary are split by their last dimension, and streams are split by
        tokens under sequence parallelism. All other activations are whole on every tensor rank.
        """
        shape, group = tuple(tensor.shape), self.engine.tensor
        if group.size == 1:
            return Placement.full(shape)
        logits = self._logits.get(layer) if output else None
        if logits is not None:
            return Placement.box(
                (*shape[:-1], logits.whole), (*(0 for _ in shape[:-1]), logits.start), shape
            )
        if 2 * self._places[layer] + output in self._by_tokens:
            return Placement.full(shape).split(TOKENS, group.index, group.size)
        return Placement.full(shape, ("tensor",))

    def tensors(self, kind: Kind) -> Iterator[Held]:
        if kind == "buffer":
            return
        if kind == "state":
            yield self._counters()
        elif kind == "generator":
            state = torch.get_rng_state()
            yield Held("", kind, "", state, Placement.full(tuple(state.shape), ("tensor",)))
        elif kind == "replica":
            yield from self._buffers()
        elif kind == "shard":
            # Slices of gradients as they are kept, padding included.
            for flat, shard in self.engine.gradients.parts():
                layer = self._layer_of(flat.slots[0].parameter.name)
                yield Held(
                    layer, SHARD, f"stage {flat.stage}", shard, Placement.full((len(shard),))
                )
        else:
            for flat, name, shard in self._shards(kind):
                for layer, tensor, offset, placement in self._owned[flat.slots[0].parameter.name]:
                    local = shard[offset : offset + placement.count]
                    yield Held(
                        layer,
                        kind,
                        f"{tensor}.{name}" if name else tensor,
                        local,
                        placement,
                        flat.replicas,
                    )

    def batch(self) -> Iterator[Held]:
        """Yield inputs and labels of the current microbatch. Tensor and pipeline ranks have the
        same inputs and labels.
        """
        for index, tensor in enumerate(
            tensor for tensor in tree_leaves(self.engine.batch) if isinstance(tensor, Tensor)
        ):
            yield Held(
                "",
                "input",
                str(index),
                tensor,
                Placement.full(tuple(tensor.shape), ("tensor", "pipeline")),
            )

    def _counters(self) -> Held:
        engine, progress = self.engine, self.engine.progress
        counters = [
            progress.steps,
            progress.skipped,
            progress.samples,
            engine.scaler.scale,
            progress.lr,
            engine.seed,
        ]
        numbers = torch.tensor(counters, dtype=torch.float64)
        return Held(
            "",
            "state",
            "counters",
            numbers,
            Placement.full(tuple(numbers.shape), tuple(engine.comm.mesh.sizes)),
        )

    def _buffers(self) -> Iterator[Held]:
        """Yield whole weights that data ranks gathered from their slices."""
        weights = self.engine.weights
        weights.settle()
        # A flat that shares its buffer may be out of it, and a flat that is not sharded was not
        # gathered.
        for flat in self.engine.layout.flats:
            if flat.sharded and not flat.weight_shared:
                whole = weights.whole(flat)
                for slot in flat.slots:
                    local = whole[slot.start : slot.stop].view(slot.parameter.shape)
                    layer, tensor = self._split_name(slot.parameter.name)
                    yield Held(
                        layer,
                        "replica",
                        tensor,
                        local,
                        _box(slot.parameter, ("data",)),
                        flat.replicas,
                    )

    def _shards(self, kind: Kind) -> Iterator[tuple[Flat, str, Tensor]]:
        """Yield owned slices of a kind, each with its flat and with a suffix for the names of
        parameters.
        """
        engine, flats = self.engine, self.engine.layout.flats
        if kind == "weight":
            yield from (
                (flat, "", shard) for flat, shard in zip(flats, engine.weights.shards, strict=True)
            )
        elif kind == "gradient":
            yield from ((flat, "", shard) for flat, shard in engine.gradients.parts())
        else:
            for place, index in enumerate(engine.weights.trained()):
                yield from (
                    (flats[index], name, state)
                    for name, state in engine.optimizer.state(place).items()
                )

    @cached_property
    def _owned(self) -> Mapping[str, Sequence[tuple[str, str, int, Placement]]]:
        """The ranges of each flat buffer that this rank owns, by the buffer's first parameter:
        layer, name, offset in the slice, and placement.
        """
        return {
            flat.slots[0].parameter.name: list(self._pieces(flat))
            for flat in self.engine.layout.flats
        }

    def _pieces(self, flat: Flat) -> Iterator[tuple[str, str, int, Placement]]:
        for piece in flat.pieces(self.engine.data.index):
            parameter = piece.parameter
            replicas = (
                *(("tensor",) if parameter.split is None else ()),
                *(() if flat.sharded else ("data",)),
            )
            yield (
                *self._split_name(parameter.name),
                piece.offset,
                _box(parameter, replicas).run(piece.start, piece.stop),
            )

    def _split_name(self, parameter: str) -> tuple[str, str]:
        """Return the layer of a parameter, and the parameter's name in that layer."""
        layer = self._layer_of(parameter)
        return layer, parameter.removeprefix(f"{layer}.")

    def _layer_of(self, parameter: str) -> str:
        return next((layer for layer in self.layers if parameter.startswith(f"{layer}.")), "")

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {layer: place for place, layer in enumerate(self.layers)}

    @cached_property
    def _by_tokens(self) -> range:
        """The positions where the stream is split by tokens: 2 n is the input of layer n, and 2 n +
        1 its output.

        A layer that scatters its output takes the whole stream. If the stream is assembled again
        later, the blocks do both themselves: the first block scatters its input, and the last block
        that is named gathers its output.
        """
        engine, end = self.engine, 2 * len(self._places)
        first = min(
            (place for layer, place in self._places.items() if _in(layer, engine.scattered)),
            default=end,
        )
        last = max((self._places.get(name, -1) for name in engine.gathered), default=None)
        return range(2 * first + 1, end) if last is None else range(2 * first, 2 * last + 1)

    @cached_property
    def _logits(self) -> Mapping[str, Parameter]:
        """For each layer with an output split by vocabulary, the weight that is split."""
        slots = {
            slot.parameter.name: slot.parameter
            for flat in self.engine.layout.flats
            for slot in flat.slots
        }
        names = {id(weight): name for name, weight in self.engine.model.named_parameters()}
        heads = (
            (layer, part) for layer, module in self.layers.items() for part in module.modules()
        )
        found = {
            layer: names[id(part.weight)]
            for layer, part in heads
            if isinstance(part, VocabularyLinear)
        }
        return {layer: slots[name] for layer, name in found.items() if name in slots}


def _in(layer: str, names: Iterable[str]) -> bool:
    """Return whether one of the modules is the layer or is inside it."""
    return any(f"{name}.".startswith(f"{layer}.") for name in names)


def _box(parameter: Parameter, replicas: tuple[str, ...]) -> Placement:
    """Return the placement of this rank's part of a parameter in the whole parameter."""
    whole = tuple(
        parameter.whole if dim == parameter.split else size
        for dim, size in enumerate(parameter.shape)
    )
    offsets = tuple(
        parameter.start if dim == parameter.split else 0 for dim in range(len(parameter.shape))
    )
    holders = ("pipeline",) if parameter.replicas else ()
    return Placement.box(whole, offsets, parameter.shape, (*replicas, *holders))
