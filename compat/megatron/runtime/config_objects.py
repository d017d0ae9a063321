"""Builds the installed Megatron-Core's own config objects from plain fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from importlib import import_module
from typing import Any

from bridge.errors import ConfigError
from compat.megatron.arguments.namespace import member_name
from compat.megatron.objects.fields import DDP, LATENT, OPTIMIZER, PARALLEL, TRANSFORMER

PLACES = {
    PARALLEL: "megatron.core",
    TRANSFORMER: "megatron.core.transformer",
    LATENT: "megatron.core.transformer",
    DDP: "megatron.core.distributed",
    OPTIMIZER: "megatron.core.optimizer",
}
"""The package that each class is imported from."""
ACTIVATION = "activation_func"


def build_object(name: str, fields: Mapping[str, Any]) -> Any:
    """Return a real config object of the installed release, made of plain `fields`.

    Raises `ConfigError` with the reason if the class refuses them.
    """
    cls = getattr(import_module(PLACES[name]), name)
    init_fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    try:
        return cls(
            **{
                name: _live(init_fields[name], value)
                for name, value in fields.items()
                if name in init_fields
            }
        )
    except Exception as error:
        raise ConfigError(
            f"{name}: refused by Megatron itself: {type(error).__name__}: {error}"
        ) from error


def _live(field: Any, value: Any) -> Any:
    """Return the object that a class expects for a name: a dtype, an enumeration's member or an
    activation.
    """
    import torch

    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    if isinstance(value, str) and isinstance(field.default, Enum):
        return type(field.default)[member_name(value)]
    return _function(value) if field.name == ACTIVATION and isinstance(value, str) else value


def _function(name: str) -> Any:
    """Return the activation function `name`. It is Megatron's own function, whose module differs by
    release, or torch's function.
    """
    from torch.nn import functional

    for place in ("megatron.core.fusions.fused_bias_geglu", "megatron.core.activations"):
        with suppress(ModuleNotFoundError):
            if hasattr(import_module(place), name):
                return getattr(import_module(place), name)
    return getattr(functional, name, None) or _stand_in(name)


def _stand_in(name: str) -> Any:
    """Return a function of the given name that cannot be called.

    It stands for functions that older releases define inside a function of arguments.py. Configs
    only store such a function.
    """

    def stand_in(x: Any) -> Any:
        raise NotImplementedError(name)

    stand_in.__name__ = name
    return stand_in
