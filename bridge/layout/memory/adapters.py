"""Low-rank adapters: the matrices that they add to a model, and the layers that have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from bridge.layout.architecture import Architecture, LayerPart
from bridge.layout.shard import Parameter
from bridge.plan.plan import Adapters

TARGETS = {
    "query": "query",
    "key": "key",
    "value": "value",
    "out": "dense",
    "up": "mlp_in",
    "gate": "mlp_in",
    "down": "mlp_out",
    "logits": "output",
}
"""The plan's name of a target, by the last word of the name of a module."""
ALL = ("query", "key", "value", "dense", "mlp_in", "mlp_out")
"""Targets of adapters on all linear layers but the output layer."""


def is_adapted(name: str, adapters: Adapters) -> bool:
    """Whether the module `name` has an adapter."""
    target = TARGETS.get(name.rpartition(".")[2])
    return bool(adapters.rank) and target in (adapters.targets or ALL)


def adapted_parts(shape: Architecture, layer: int, adapters: Adapters) -> Iterator[LayerPart]:
    """Yield the modules of a layer that have an adapter."""
    for part in shape.parts(layer):
        if part.kind == "linear" and is_adapted(part.name, adapters):
            yield part


def add_adapters(parameters: Iterable[Parameter], adapters: Adapters) -> Iterator[Parameter]:
    """Yield `parameters` as they are without adapters; else yield them frozen, and after each matrix
    with an adapter the adapter's two: rank x inputs, and outputs x rank.
    """
    rank = adapters.rank
    for one in parameters:
        if rank is None:
            yield one
            continue
        yield replace(one, trainable=False)
        module, _, kind = one.name.rpartition(".")
        if kind == "weight" and len(one.shape) > 1 and is_adapted(module, adapters):
            *stack, outputs, inputs = one.shape
            for name, shape in (("a", (rank, inputs)), ("b", (outputs, rank))):
                yield replace(one, name=f"{module}.adapter_{name}", shape=(*stack, *shape))
