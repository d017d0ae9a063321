"""The engine as a source of traces: says which part of an activation, weight or gradient this rank
holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bridge.engine.comm import Comm
from bridge.engine.device import generator
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
    """The source through which traces read the tensors of an engine."""

    engine: Engine

    @cached_property
    def layers(self) -> Mapping[str, nn.Module]:
        """Modules of the layers of all pipeline ranks, by name, although this rank runs only some
        of them. A layer that consists of several modules of a model is listed as these modules.
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
        """Return where the run is: the step and the microbatch. The number of microbatches in a
        step is given only if the plan sets the size of a microbatch, because only then are all
        microbatches equally large.
        """
        engine = self.engine
        equal = engine.plan.batch.micro is not None
        number = engine.accumulation * engine.data.size if equal else None
        return Now(engine.current_step, engine.place, number, engine.executor.again)

    def factors(self) -> Mapping[Unit, float]:
        """Return the factors for gradients of the step that ends. A gradient times this factor is
        the gradient that the optimizer gets, after clipping.
        """
        return {"activation": self.engine.unit, "parameter": self.engine.gradient_unit * self.clip}

    @property
    def clip(self) -> float:
        """The factor by which clipping multiplies all gradients of the step that ends."""
        norm, clip = self.engine.progress.grad_norm, setting(self.engine.plan.optimizer, "clip")
        return clip_factor(norm, clip) if isfinite(norm) else 1.0

    @property
    def loss(self) -> float:
        """The mean loss over all ranks, of the step that ends."""
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
        """Return the names of modules that have no weights and are outside of all layers. They run
        on every rank that computes arguments of blocks.
        """
        if not self.engine.chain.called:
            return []
        layers = naming.layers_by_name(self.engine.model)
        return [
            name
            for name, module in layers.items()
            if name not in self.layers and not any(True for _ in module.parameters())
        ]

    def has_batch_dimension(self, tensor: Tensor) -> bool:
        """Return whether an activation has a row for each sample. If its first dimension is 1
        although there are several samples, it is the same for all of them.
        """
        leaves = (
            leaf
            for leaf in tree_leaves(self.engine.batch)
            if isinstance(leaf, Tensor) and leaf.dim()
        )
        return not tensor.dim() or tensor.shape[0] != 1 or len(next(leaves, tensor)) == 1

    def activation(self, layer: str, tensor: Tensor, output: bool) -> Placement:
        """Return which part of a layer's input or output `tensor` is.

        Logits of a split vocabulary are split along the last dimension. Under sequence parallelism,
        streams are split by tokens. All other activations are whole on every tensor rank.
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
            own = generator(self.engine.device)
            if own is not None:
                state = own.get_state()
                yield Held(
                    "", kind, "device", state, Placement.full(tuple(state.shape), ("tensor",))
                )
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
                for layer, tensor, offset, placement in self._parts_by_flat[
                    flat.slots[0].parameter.name
                ]:
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
        """Yield the inputs and labels of the current microbatch, which are equal on all tensor and
        pipeline ranks.
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
        """Yield the whole weights that data ranks have gathered from slices."""
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
        """Yield this rank's slices of weights, gradients or optimizer state (`kind`). Each comes
        with its flat and with a suffix for the names of its parameters.
        """
        engine, flats = self.engine, self.engine.layout.flats
        if kind == "weight":
            yield from (
                (flat, "", shard) for flat, shard in zip(flats, engine.weights.shards, strict=True)
            )
        elif kind == "gradient":
            yield from ((flat, "", shard) for flat, shard in engine.gradients.parts())
        else:
            for place, index in enumerate(engine.weights.trainable_flats()):
                yield from (
                    (flats[index], name, state)
                    for name, state in engine.optimizer.state(place).items()
                )

    @cached_property
    def _parts_by_flat(self) -> Mapping[str, Sequence[tuple[str, str, int, Placement]]]:
        """A table from each flat, named by its first parameter, to the parts of parameters in this
        rank's slice of the flat. A part has the layer, the name in the layer, the offset in the
        slice, and the placement in the whole parameter.
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
        """Return the name of a parameter's layer, and the name of the parameter within the layer."""
        layer = self._layer_of(parameter)
        return layer, parameter.removeprefix(f"{layer}.")

    def _layer_of(self, parameter: str) -> str:
        return next((layer for layer in self.layers if parameter.startswith(f"{layer}.")), "")

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {layer: place for place, layer in enumerate(self.layers)}

    @cached_property
    def _by_tokens(self) -> range:
        """The inputs and outputs of layers at which the stream is split by tokens. The number 2 n
        stands for the input of layer n, and 2 n + 1 for its output.

        The layer that splits the stream still gets the whole stream. With hooks, the first block
        splits its input, and the last block named by the tensor plan gathers its output.
        """
        engine, end = self.engine, 2 * len(self._places)
        first = min(
            (
                place
                for layer, place in self._places.items()
                # The module is the layer itself or within the layer.
                if any(f"{name}.".startswith(f"{layer}.") for name in engine.scattered)
            ),
            default=end,
        )
        last = max((self._places.get(name, -1) for name in engine.gathered), default=None)
        return range(2 * first + 1, end) if last is None else range(2 * first, 2 * last + 1)

    @cached_property
    def _logits(self) -> Mapping[str, Parameter]:
        """For each layer that returns logits of a split vocabulary, the weight that is split."""
        slots = {
            slot.parameter.name: slot.parameter
            for flat in self.engine.layout.flats
            for slot in flat.slots
        }
        names = {id(weight): name for name, weight in self.engine.model.named_parameters()}
        heads = (
            (layer, part) for layer, module in self.layers.items() for part in module.modules()
        )
        outputs = {
            layer: names[id(part.weight)]
            for layer, part in heads
            if isinstance(part, VocabularyLinear)
        }
        return {layer: slots[name] for layer, name in outputs.items() if name in slots}


def _box(parameter: Parameter, replicas: tuple[str, ...]) -> Placement:
    """Return where this rank's part of a parameter lies in the whole parameter."""
    whole = tuple(
        parameter.whole if dim == parameter.split else size
        for dim, size in enumerate(parameter.shape)
    )
    offsets = tuple(
        parameter.start if dim == parameter.split else 0 for dim in range(len(parameter.shape))
    )
    holders = ("pipeline",) if parameter.replicas else ()
    return Placement.box(whole, offsets, parameter.shape, (*replicas, *holders))
