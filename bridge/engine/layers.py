"""Layers: what a model is made of, seen from outside: its layers in order, and each parameter with those that
use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from bridge.engine.formats import name_of
from bridge.engine.tensor_parallel import Mark
from bridge.errors import ConfigError
from bridge.layout.partition import Layers
from bridge.layout.shard import Parameter


class Arguments(NamedTuple):
    """What a model that is one layer is called with."""

    given: tuple[Any, ...]
    named: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its global name and its module, which takes the output of the layer before.

    A model that is one layer (`only`) takes `Arguments`.
    """

    name: str
    module: nn.Module
    only: bool = False

    def __call__(self, inputs: Any) -> Any:
        """Run the module."""
        return self.module(*inputs.given, **inputs.named) if self.only else self.module(inputs)


def as_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """`model`, or its list of layers as one module."""
    return model if isinstance(model, nn.Module) else nn.Sequential(*model)


def layers_of(model: nn.Module) -> tuple[Layer, ...]:
    """The children of a Sequential; any other module is one layer."""
    if isinstance(model, nn.Sequential):
        return tuple(Layer(name, module) for name, module in model.named_children())
    return (Layer("", model, only=True),)


def facts(model: nn.Module, layers: Sequence[Layer]) -> Layers:
    """What partition rules see. A model may tell how many layers lead and trail its body (`leading`,
    `trailing`).
    """
    sizes = tuple(sum(weight.numel() for weight in layer.module.parameters()) for layer in layers)
    return Layers(len(layers), int(getattr(model, "leading", 0)), int(getattr(model, "trailing", 0)), sizes)


def parameter_facts(
    parameters: Mapping[str, nn.Parameter], layers: Sequence[Layer], stages: Sequence[range], marks: Mapping[int, Mark]
) -> list[Parameter]:
    """Every parameter with its shape, format, the stages that use it, and how tensor ranks hold it (`marks`, by identity).

    Raises `ConfigError` for one outside all layers.
    """
    users = _users(layers, stages)
    strays = [name for name, weight in parameters.items() if id(weight) not in users]
    ConfigError.raise_if(f"model: parameter {name} belongs to no layer; put it in one" for name in strays)
    return [_fact(name, weight, users[id(weight)], marks.get(id(weight), Mark())) for name, weight in parameters.items()]


def _fact(name: str, weight: nn.Parameter, stages: tuple[int, ...], mark: Mark) -> Parameter:
    trained, dtype = weight.requires_grad, name_of(weight.dtype, name)
    partial = mark.partial and trained
    return Parameter(name, tuple(weight.shape), dtype, stages, trained, mark.split, mark.start, mark.whole, partial)


def _users(layers: Sequence[Layer], stages: Sequence[range]) -> dict[int, tuple[int, ...]]:
    """Stages that use a parameter, by its identity."""
    found: dict[int, list[int]] = {}
    for stage, members in enumerate(stages):
        for weight in {id(weight) for index in members for weight in layers[index].module.parameters()}:
            found.setdefault(weight, []).append(stage)
    return {weight: tuple(users) for weight, users in found.items()}
