"""`deepspeed.pipe`: a model as a list of layers. A layer is a module, or a spec from which the
module is built later. Source: deepspeed/runtime/pipe/module.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch import nn

from bridge.errors import BridgeError, ConfigError

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]


class LayerSpec:
    """A layer that is built later: the module's class and the arguments for it."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(
                f"LayerSpec: found {typename!r}, expected a subclass of torch.nn.Module"
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        arguments = [
            *map(repr, self.module_args),
            *(f"{name}={value!r}" for name, value in self.module_kwargs.items()),
        ]
        return f"{self.typename.__name__}({', '.join(arguments)})"

    def build(self, log: bool = False) -> nn.Module:
        """Make the module."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A spec whose module is shared by all specs with the same `key`. If a spec has `forward_fn`,
    its layer runs `forward_fn(module, inputs)` instead of the module's own forward.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | list[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else tied_weight_attr
        )


class Function(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Any) -> Any:
        """Call it."""
        return self.function(inputs)


class Tied(nn.Module):
    """A layer that runs a function with a module of another layer, for tied weights."""

    def __init__(self, module: nn.Module, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.tied, self.function = module, function

    def forward(self, inputs: Any) -> Any:
        """Call the function with the shared module and the inputs."""
        return self.function(self.tied, inputs)


class PipelineModule(nn.Sequential):
    """Layers in order, divided into `num_stages` pipeline stages. A layer is a module, a spec, or a
    function of the previous layer's output. Every rank builds all layers and keeps the layers of
    its own stage. `loss_fn(outputs, labels)` returns the loss of a microbatch.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Any = None,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        if num_stages is None and topology is None:
            raise ConfigError(
                "PipelineModule: found neither num_stages nor topology; pass num_stages"
            )
        if checkpointable_layers:
            raise ConfigError(
                "PipelineModule: found checkpointable_layers, but the engine recomputes chunks of"
                " layers of any class; leave the argument out"
            )
        stages: int = num_stages if num_stages is not None else topology.get_dim("pipe")
        world = torch_distributed.get_world_size() if torch_distributed.is_initialized() else 1
        if world % stages:
            raise ConfigError(
                f"num_stages: found {stages}, which does not divide the number of ranks"
                f" ({world}); use a divisor of {world}"
            )
        specs, ties = list(layers), dict[str, nn.Module]()
        seed: Callable[[int], Any] = seed_fn or torch.manual_seed
        modules = []
        for index, spec in enumerate(specs):
            if seed_layers:
                seed(base_seed + index)
            modules.append(_build_layer(spec, ties, stages))
        super().__init__(*modules)
        self.__dict__["loss_fn"] = loss_fn
        self.num_stages, self.partition_method, self.dynamic_shape = (
            stages,
            partition_method,
            dynamic_shape,
        )
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.tied_weight_attrs = {
            spec.key: spec.tied_weight_attr for spec in specs if isinstance(spec, TiedLayerSpec)
        }

    @property
    def code(self) -> dict[str, Any]:
        """Return the settings of this pipeline as the code part of a config."""
        stages = (
            {"pipeline_stages": self.num_stages, "partition_method": self.partition_method}
            if self.num_stages > 1
            else {}
        )
        interval = self.activation_checkpoint_interval
        return {
            **stages,
            **({"checkpointing": True, "checkpoint_interval": interval} if interval else {}),
        }

    def num_pipeline_stages(self) -> int:
        """Return the number of pipeline stages."""
        return self.num_stages

    def allreduce_tied_weight_gradients(self) -> None:
        """Do nothing, because the engine itself reduces the gradients of tied weights."""


def _build_layer(spec: Any, ties: dict[str, nn.Module], stages: int) -> nn.Module:
    """Return the layer for `spec`, an entry in the list of layers. `ties` has the shared modules by
    key.
    """
    if isinstance(spec, TiedLayerSpec):
        is_shared = spec.key in ties
        module = ties.setdefault(
            spec.key, spec.build() if not is_shared else ties.get(spec.key, nn.Identity())
        )
        others = [
            name for name, _ in module.named_parameters() if name not in spec.tied_weight_attr
        ]
        if is_shared and others and stages > 1:
            raise ConfigError(
                f"TiedLayerSpec {spec.key!r}: {others[0]} is not in tied_weight_attr, so each"
                " stage would have a separate copy; add it to tied_weight_attr, or put the layers"
                " on one stage"
            )
        return module if spec.forward_fn is None else Tied(module, spec.forward_fn)
    if isinstance(spec, PipelineModule):
        raise BridgeError(
            "PipelineModule: found a PipelineModule among the layers; pass the layers of this"
            " module instead"
        )
    if isinstance(spec, nn.Module):
        return spec
    if isinstance(spec, LayerSpec):
        return spec.build()
    if callable(spec):
        return Function(spec)
    raise ConfigError(
        f"PipelineModule: found {type(spec).__name__} among the layers, expected a"
        " torch.nn.Module, a LayerSpec or a function"
    )
