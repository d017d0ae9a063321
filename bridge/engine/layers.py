"""Layers: a model as a list of layers, and the stages that use each parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from bridge.engine.formats import name_of
from bridge.errors import ConfigError
from bridge.layout.partition import Layers
from bridge.layout.shard import Parameter


class Arguments(NamedTuple):
    """The arguments of one call of a model: positional arguments (`given`) and named arguments."""

    given: tuple[Any, ...]
    named: dict[str, Any]

    def copy(self) -> Arguments | None:
        """Return a copy for a trial of the model, which may write into what it gets; None if there is
        none of an argument.
        """
        alone = tree_map_only(Tensor, _alone, tuple(self))
        try:
            return Arguments(*copy.deepcopy(alone))
        except Exception:  # whatever an argument's own code raises
            return None


def _alone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a model. `run` takes the output of the layer before. `parts` names the modules
    of the layer. If it is empty, the only module is the one with the layer's name.

    A layer that runs the forward pass of the whole model, with substitutes for the other layers,
    has `keys`: a name for each module of the model by `id`. Such layers draw the same random
    numbers for the same calls.
    """

    name: str
    module: nn.Module
    run: Callable[[Any], Any]
    parts: tuple[str, ...] = ()
    keys: Mapping[int, str] | None = None

    def __call__(self, inputs: Any) -> Any:
        """Run it."""
        return self.run(inputs)


@dataclass(frozen=True)
class Chain:
    """A model as a list of layers. The first `leading` layers (such as an embedding) and the last
    `trailing` layers (such as a head) are not blocks. If `called` is true, the first layer takes
    all arguments of the model as `Arguments`. `received(tensors, given)` makes the input of a layer
    from tensors of another rank and from the model's arguments, and returns this input. `changed()`
    yields a problem for each change to the model since the chain was made, so that the layers are no
    longer those of the model.
    """

    layers: tuple[Layer, ...]
    leading: int = 0
    trailing: int = 0
    called: bool = False
    received: Callable[[Sequence[Tensor], Arguments], Any] = lambda tensors, arguments: (
        tensors[0] if len(tensors) == 1 else tuple(tensors)
    )
    changed: Callable[[], Iterable[str]] = tuple


def as_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Return `model` as a module. A list of layers becomes a module that contains them. Raises
    `ConfigError` for weights without a shape.
    """
    module = model if isinstance(model, nn.Module) else nn.Sequential(*model)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"model: {name} has no shape before the first forward pass of its lazy module; run the"
                " model once before initialize"
            )
    return module


def chain_of(model: nn.Module) -> Chain:
    """Return the modules that an `nn.Sequential` calls, in order, as layers. Its attributes `leading`
    and `trailing`, if there are any, say how many layers stand before the blocks and after them. Any
    other module becomes one layer, and so does an `nn.Sequential` that does more than call them.
    """
    if not isinstance(model, nn.Sequential) or more_than_children(model):
        return Chain((one_layer(model),), called=True)
    first: dict[int, str] = {}
    layers = []
    for name, module in model._modules.items():
        assert module is not None, "nn.Sequential cannot call None"
        earlier = first.setdefault(id(module), name)
        layers.append(Layer(name, module, module, () if earlier == name else (earlier,)))
    ends = int(getattr(model, "leading", 0)), int(getattr(model, "trailing", 0))
    return Chain(tuple(layers), *ends, changed=watched({"": model}))


def one_layer(model: nn.Module) -> Layer:
    """Return a model as one layer, which takes its arguments and calls it."""
    return Layer("", model, lambda inputs: model(*inputs.given, **inputs.named))


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GUARDS = "guards"
"""Attribute of a function that stands for a module's `forward` only to guard it: the `forward` itself.
"""


def hooks_of(module: nn.Module) -> int:
    """Return the number of hooks on calls of `module` that a script registered."""
    hooks = (hook for kind in HOOKS for hook in vars(module)[kind].values())
    return sum(
        not str(getattr(hook, "__module__", "")).startswith(("bridge.", "compat."))
        for hook in hooks
    )


def more_than_children(model: nn.Sequential) -> str | None:
    """Return what an `nn.Sequential` does in addition to calling its children one after the other;
    None if it does nothing else.
    """
    if getattr(_forward_of(model)[0], "__func__", None) is not nn.Sequential.forward:
        return f"{type(model).__name__} has a forward of its own"
    return f"{type(model).__name__} has hooks on the whole model" if hooks_of(model) else None


def _forward_of(module: nn.Module) -> tuple[Any, Any]:
    """Return the `forward` of a module as the script knows it, and that of its class."""
    return getattr(module.forward, GUARDS, module.forward), type(module).forward


def watched(modules: Mapping[str, nn.Module]) -> Callable[[], Iterator[str]]:
    """Return a function that yields a problem for each change since now to the children of `modules`
    (by name), to their `forward`, or to the hooks on them.
    """
    before = {
        name: (dict(each._modules), hooks_of(each), _forward_of(each))
        for name, each in modules.items()
    }

    def changed() -> Iterator[str]:
        for name, module in modules.items():
            children, hooks, forward = before[name]
            here, own = f"{name}." if name else "", module._modules
            for child in dict.fromkeys((*children, *own)):
                if children.get(child) is not own.get(child):
                    yield f"{here}{child}: this module was replaced, added or removed {_LATER}"
            if _forward_of(module) != forward:
                yield f"{name or 'model'}: the forward of this module was replaced {_LATER}"
            if hooks_of(module) > hooks:
                yield f"{name or 'model'}: this module got a hook {_LATER}"

    return changed


_LATER = "after the model was divided into layers"


def facts(chain: Chain) -> Layers:
    """Return the numbers of layers and of their parameters, by which partition rules cut the model."""
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
    tensor ranks. `marks` says how parameters are split, by their identity (`id`). Raises
    `ConfigError` for a parameter outside all layers.
    """
    users = _users(layers, stages)
    strays = [name for name, weight in parameters.items() if id(weight) not in users]
    ConfigError.raise_if(
        f"model: parameter {name} belongs to no layer; make it a parameter of a layer"
        for name in strays
    )
    facts = []
    for name, weight in parameters.items():
        mark, trains = marks.get(id(weight), Mark()), weight.requires_grad
        dtype = name_of(weight.dtype, name)
        # A frozen weight has no gradient of which there could be shares.
        partial = mark.partial and trains
        shape, stages_of = tuple(weight.shape), users[id(weight)]
        facts.append(
            Parameter(
                name, shape, dtype, stages_of, trains, mark.split, mark.start, mark.whole, partial
            )
        )
    return facts


ALSO = "_stagebridge_also"
"""Name of an attribute of modules: a list of other modules' parameters that the module uses too."""


def also_uses(module: nn.Module) -> list[nn.Parameter]:
    """Return the list of other modules' parameters that `module` uses when it runs. To add such a
    parameter, append it to this list before the engine is created.
    """
    # In `__dict__`, as a parameter list in an attribute would give the parameters second names in
    # the model.
    parameters: list[nn.Parameter] = module.__dict__.setdefault(ALSO, [])
    return parameters


def weights_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters that must be whole while `module` runs."""
    yield from module.parameters()
    for part in module.modules():
        yield from part.__dict__.get(ALSO, ())


def _users(layers: Sequence[Layer], stages: Sequence[range]) -> dict[int, tuple[int, ...]]:
    """Return a table from the identity (`id`) of each parameter to the stages that use the
    parameter, in order. Both names of a tied weight have the same identity.
    """
    stages_by_weight: dict[int, list[int]] = {}
    for stage, members in enumerate(stages):
        for weight in {
            id(weight) for index in members for weight in weights_of(layers[index].module)
        }:
            stages_by_weight.setdefault(weight, []).append(stage)
    return {weight: tuple(users) for weight, users in stages_by_weight.items()}


@dataclass(frozen=True, slots=True)
class Mark:
    """What conversion did to a parameter. If `split` is a dimension, the parameter is cut along it:
    the dimension has `whole` elements in all, and this rank's part begins at `start`. With
    `partial`, each rank has only a share of the gradient, and the shares must be summed.
    """

    split: int | None = None
    start: int = 0
    whole: int = 0
    partial: bool = False
