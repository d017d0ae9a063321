"""Layers: what a model is made of, seen from outside: its layers in order, and each parameter with those that
use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

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
    """One layer: its global name, its module, and how it is run on the output of the layer before. `parts` are the modules that
    it consists of, if its own name is not that of them all.
    """

    name: str
    module: nn.Module
    run: Callable[[Any], Any]
    parts: tuple[str, ...] = ()

    def __call__(self, inputs: Any) -> Any:
        """Run it."""
        return self.run(inputs)


@dataclass(frozen=True)
class Chain:
    """A model as layers, of which so many lead and trail the body. If it is `called`, the first one takes `Arguments`.

    `received(tensors, given)` is what a layer takes, from the tensors that another rank sent and what the model is called with.
    """

    layers: tuple[Layer, ...]
    leading: int = 0
    trailing: int = 0
    called: bool = False
    received: Callable[[Sequence[Tensor], Arguments], Any] = lambda tensors, given: _packed(tensors)


def _packed(tensors: Sequence[Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def as_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """`model`, or its list of layers as one module."""
    return model if isinstance(model, nn.Module) else nn.Sequential(*model)


def chain_of(model: nn.Module) -> Chain:
    """The children of a Sequential, which may tell how many of them lead and trail its body; any other module is one layer."""
    if isinstance(model, nn.Sequential):
        layers = tuple(Layer(name, module, module) for name, module in model.named_children())
        return Chain(layers, int(getattr(model, "leading", 0)), int(getattr(model, "trailing", 0)))
    return Chain((Layer("", model, lambda inputs: model(*inputs.given, **inputs.named)),), called=True)


def facts(chain: Chain) -> Layers:
    """What partition rules see."""
    sizes = tuple(sum(weight.numel() for weight in layer.module.parameters()) for layer in chain.layers)
    return Layers(len(chain.layers), chain.leading, chain.trailing, sizes)


def logits_in(output: Any) -> Any:
    """The logits that a model returns: its output, or the `logits` of that."""
    return getattr(output, "logits", output)


def loss_in(output: Any) -> Any:
    """The loss that a model returns: its output, or the `loss` of that."""
    return getattr(output, "loss", output)


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


ALSO = "_stagebridge_also"


def also_uses(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of other modules that `module` uses when it runs, which whoever knows puts in here before an engine is made."""
    found: list[nn.Parameter] = module.__dict__.setdefault(ALSO, [])
    return found


def weights_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that must be whole while `module` runs."""
    yield from module.parameters()
    for part in module.modules():
        yield from part.__dict__.get(ALSO, ())


def _users(layers: Sequence[Layer], stages: Sequence[range]) -> dict[int, tuple[int, ...]]:
    """Stages that use a parameter, by its identity."""
    found: dict[int, list[int]] = {}
    for stage, members in enumerate(stages):
        for weight in {id(weight) for index in members for weight in weights_of(layers[index].module)}:
            found.setdefault(weight, []).append(stage)
    return {weight: tuple(users) for weight, users in found.items()}
