"""Builds the installed transformers' config and model of a config.json, on the meta device, to see
whether they stop.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

from bridge.errors import ConfigError
from bridge.stack.dialect import Config
from compat.huggingface.formats import text
from tests.harvesting.machine import MachineError, judge

UNASKED = ("num_key_value_heads", "rotary_dim", "qk_rope_head_dim")
"""Settings whose stops come in the forward pass, which is not run here."""


def release_of_package() -> str:
    """Return the installed release of transformers."""
    return version("transformers")


def start(config: Config) -> None:
    """Build the config and the model. Raises `ConfigError` with the reason for which one of them
    stops.
    """
    from torch import device
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    data = json.loads(text(config.given))
    kind = data.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise MachineError(f"{kind}: the code of this family comes with its weights")
    build: Any = AutoModelForCausalLM.from_config
    try:
        model_config: Any = AutoConfig.for_model(kind, **data)
        with device("meta"):
            build(model_config)
    except Exception as error:
        judge(error)
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"refused by transformers: {type(error).__name__}: {reason}") from error
