"""Modules of pipeline stages, and two ways to split a model's layers into stages: evenly, or by
given module names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from bridge.engine.layers import Chain, Layer
from bridge.errors import BridgeError, ConfigError
from compat.automodel.virtual_stages import stages


class StageModules(nn.Module):
    """The modules of one pipeline stage, under the names that they have in the whole model. A part
    shares its modules and parameters with the model. The engine runs the modules; a script cannot
    call the part.
    """

    def __init__(self, model: nn.Module, layers: Iterable[Layer]) -> None:
        super().__init__()
        self.config = getattr(model, "config", None)
        for layer in layers:
            for name in layer.parts or (layer.name,):
                _graft_module(self, name.split("."), model.get_submodule(name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises `BridgeError`, because a stage runs only within its schedule."""
        raise BridgeError(
            "AutoPipeline: a part cannot run by itself; call info.schedule.step(...), or step(...)"
            " of AutoPipeline"
        )


def _graft_module(owner: nn.Module, words: Sequence[str], module: nn.Module) -> None:
    for word in words[:-1]:
        if word not in owner._modules:
            owner.add_module(word, nn.Module())
        owner = owner.get_submodule(word)
    owner.add_module(words[-1], module)


def even(chain: Chain, **options: Any) -> list[list[str]]:
    """Return the names of the layers in each virtual stage, split as AutoModel does. `options` has
    the arguments of `virtual_stages.stages`.
    """
    names = [layer.name for layer in chain.layers]
    first, last = chain.leading, len(names) - chain.trailing
    ends = [first]
    for count in stages(num_layers=last - first, **options).layers:
        ends.append(ends[-1] + count)
    ends[0], ends[-1] = 0, len(names)
    return [names[start:stop] for start, stop in pairwise(ends)]


def layers_by_stage(
    model: nn.Module, chain: Chain, parts: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Return the names of the engine's layers in each stage, from the module names in `parts`.
    Modules without weights, such as rotary embeddings, may be in every stage.

    Raises `ConfigError` for names that the model does not have, and for modules of one layer that
    are in several stages.
    """
    modules = dict(model.named_modules())
    ConfigError.raise_if(
        f"module_fqns_per_model_part: part {stage}: the model has no module {name!r}"
        for stage, names in enumerate(parts)
        for name in names
        if name not in modules
    )
    ConfigError.raise_if(_find_apart(chain, parts))
    stages = [
        [
            layer.name
            for layer in chain.layers
            if any(_holds_module(names, name) for name in _module_names(layer))
        ]
        for names in parts
    ]
    empty = [str(stage) for stage, names in enumerate(stages) if not names]
    ConfigError.raise_if(
        f"module_fqns_per_model_part: part {stage} names no layer; add one" for stage in empty
    )
    return stages


def _find_apart(chain: Chain, parts: Sequence[Sequence[str]]) -> Iterator[str]:
    for layer in chain.layers:
        homes = {
            name: [stage for stage, names in enumerate(parts) if _holds_module(names, name)]
            for name in _module_names(layer)
        }
        for name, where in homes.items():
            if len(where) != 1:
                yield f"module_fqns_per_model_part: {name} is in {len(where)} parts, expected one; name it in one"
        if len({stage for where in homes.values() for stage in where}) > 1:
            yield (
                f"module_fqns_per_model_part: {', '.join(homes)} run together; name them in the"
                " same part"
            )


def _module_names(layer: Layer) -> tuple[str, ...]:
    return layer.parts or (layer.name,)


def _holds_module(names: Sequence[str], module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)
