"""Cutting a model: makes a checkpoint and a config.json that have only the first few layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.checkpoint.hub import Hub, ParameterGroup
from bridge.errors import SourceError

NUMBERED = re.compile(r"(.+?)\.(\d+)\.")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
"""Names of the setting for the number of layers in Hugging Face's configs."""
DROPOUT = re.compile(r".*(?:_pdrop|dropout|_dropout_prob)")
OTHER_HEADS = ("summary", "classifier")
"""Prefixes of the settings of heads that do not predict tokens, such as classifiers. Their dropout
is left as it is.
"""


def layers_of(hub: Hub) -> dict[str, int]:
    """Return the number of layers in each list of layers of the model, by the list's name."""
    counts: dict[str, int] = {}
    for name in hub.parameters:
        if match := NUMBERED.match(name):
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    return counts


def count_elements(hub: Hub, layers: int | None = None) -> int:
    """Return the number of elements of all weights; if `layers` is given, only of the weights that
    are left after a cut to so many layers.
    """
    return sum(
        parameter.weight.count
        for name, parameter in hub.parameters.items()
        if layers is None or _stays_in_model(name, layers)
    )


def _stays_in_model(name: str, layers: int) -> bool:
    match = NUMBERED.match(name)
    return match is None or int(match[2]) < layers


def cut_layers(hub: Hub, layers: int) -> Hub:
    """Return the checkpoint with only the first `layers` layers of each list of layers, and with
    all parameters that belong to no layer.
    """
    groups = (
        ParameterGroup(
            tuple(name for name in group.names if _stays_in_model(name, layers)), group.settings
        )
        for group in hub.groups
    )
    return replace(
        hub,
        parameters={
            name: value for name, value in hub.parameters.items() if _stays_in_model(name, layers)
        },
        buffers={
            name: value for name, value in hub.buffers.items() if _stays_in_model(name, layers)
        },
        ties={
            name: of
            for name, of in hub.ties.items()
            if _stays_in_model(name, layers) and _stays_in_model(of, layers)
        },
        groups=tuple(group for group in groups if group.names),
        model=hub.model and replace(hub.model, layers=layers),
    )


def config_with_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the config.json of the same model with `layers` layers. Raises `SourceError` if no
    key of `config` is the number of layers.
    """
    key = next((key for key in LAYERS if isinstance(config.get(key), int)), None)
    if key is None:
        raise SourceError(
            f"config.json: expected one of {', '.join(LAYERS)}, found none; a model without layers cannot be cut"
        )
    whole = config[key]
    # Lists as long as the model is deep have an entry for each layer, such as its kind of attention
    # (`layer_types`).
    lists = {
        name: value[:layers]
        for name, value in config.items()
        if isinstance(value, list) and len(value) == whole
    }
    return {**config, **lists, key: layers}


def without_dropout(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the config.json with all dropout set to 0, and the names of the settings that were
    above 0. Two engines draw different dropout masks, so their runs can be compared only without
    dropout.
    """
    dropout = (
        name for name in config if DROPOUT.fullmatch(name) and not name.startswith(OTHER_HEADS)
    )
    settings = tuple(name for name in dropout if isinstance(config[name], float) and config[name])
    return {**config, **dict.fromkeys(settings, 0.0)}, settings
