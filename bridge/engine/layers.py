"""Layers: a model as a list of layers in order, and its parameters with the stages that use them.
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
    """The arguments of a model that runs as one layer."""

    given: tuple[Any, ...]
    named: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its global name, its module, and `run`, which takes the output of the layer
    before. `parts` names the modules of the layer, if it does not consist of the one module with
    its name.
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
    """A model as layers. Partition rules divide only the body, without the first `leading` and the
    last `trailing` layers.

    If the model is `called`, the first layer takes `Arguments`. `received(tensors, given)` returns
    the input of a layer, made of tensors that another rank sent and of the model's arguments.
    """

    layers: tuple[Layer, ...]
    leading: int = 0
    trailing: int = 0
    called: bool = False
    received: Callable[[Sequence[Tensor], Arguments], Any] = lambda tensors, given: (
        tensors[0] if len(tensors) == 1 else tuple(tensors)
    )


def as_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Return `model`, or, if it is a list of layers, a module with these layers."""
    return model if isinstance(model, nn.Module) else nn.Sequential(*model)


def chain_of(model: nn.Module) -> Chain:
    """Return the children of a Sequential as layers. Its attributes `leading` and `trailing`, if it
    has them, give the counts. Any other module is one layer.
    """
    if isinstance(model, nn.Sequential):
        layers = tuple(Layer(name, module, module) for name, module in model.named_children())
        return Chain(layers, int(getattr(model, "leading", 0)), int(getattr(model, "trailing", 0)))
    return Chain(
        (Layer("", model, lambda inputs: model(*inputs.given, **inputs.named)),), called=True
    )


def facts(chain: Chain) -> Layers:
    """The facts about a model that partition rules use: its layers, and the number of parameters of
    each layer.
    """
    sizes = tuple(
        sum(weight.numel() for weight in layer.module.parameters()) for layer in chain.layers
    )
    return Layers(len(chain.layers), chain.leading, chain.trailing, sizes)


def logits_in(output: Any) -> Any:
    """Return the logits in a model's output: the output itself, or its attribute `logits`."""
    return getattr(output, "logits", output)


def loss_in(output: Any) -> Any:
    """Return the loss in a model's output: the output itself, or its attribute `loss`."""
    return getattr(output, "loss", output)


def parameter_facts(
    parameters: Mapping[str, nn.Parameter],
    layers: Sequence[Layer],
    stages: Sequence[range],
    marks: Mapping[int, Mark],
) -> list[Parameter]:
    """Return every parameter with its shape, its format, the stages that use it, and its split over
    tensor ranks (`marks`, by identity). Raises `ConfigError` for a parameter outside all layers.
    """
    users = _users(layers, stages)
    strays = [name for name, weight in parameters.items() if id(weight) not in users]
    ConfigError.raise_if(
        f"model: parameter {name} belongs to no layer; put it in one" for name in strays
    )
    found = []
    for name, weight in parameters.items():
        mark, trained = marks.get(id(weight), Mark()), weight.requires_grad
        dtype = name_of(weight.dtype, name)
        # A frozen weight has no gradient of which there could be shares.
        partial = mark.partial and trained
        shape, stages_of = tuple(weight.shape), users[id(weight)]
        found.append(
            Parameter(
                name, shape, dtype, stages_of, trained, mark.split, mark.start, mark.whole, partial
            )
        )
    return found


ALSO = "_stagebridge_also"
"""Name of the attribute of a module that lists parameters of other modules that the module uses."""


def also_uses(module: nn.Module) -> list[nn.Parameter]:
    """Return the list of parameters of other modules that `module` uses when it runs. To register
    such a parameter, append it before the engine is created.
    """
    # In `__dict__`, as a parameter list in an attribute would give the parameters second names in
    # the model.
    found: list[nn.Parameter] = module.__dict__.setdefault(ALSO, [])
    return found


def weights_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that must be whole while `module` runs."""
    yield from module.parameters()
    for part in module.modules():
        yield from part.__dict__.get(ALSO, ())


def _users(layers: Sequence[Layer], stages: Sequence[range]) -> dict[int, tuple[int, ...]]:
    """Return the stages that use each parameter, in order, by the parameter's identity. A tied
    weight has one identity and several stages.
    """
    found: dict[int, list[int]] = {}
    for stage, members in enumerate(stages):
        for weight in {
            id(weight) for index in members for weight in weights_of(layers[index].module)
        }:
            found.setdefault(weight, []).append(stage)
    return {weight: tuple(users) for weight, users in found.items()}
