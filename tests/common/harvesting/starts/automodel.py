"""Builds an installed AutoModel's mesh, pipeline and steps of a recipe, and the config and model of
transformers that the recipe names, on the meta device, to see whether they stop.
"""

from __future__ import annotations

from typing import Any

from bridge.errors import ConfigError
from bridge.stack.dialect import Config
from compat.automodel.formats import nest_recipe
from compat.automodel.releases import release
from harvesting.code import first
from harvesting.judges import automodel as real
from harvesting.judges.automodel import release_of_package as release_of_package

FILLS = True
"""Whether `start` needs none of the settings that `missing` asks for."""


def start(config: Config) -> None:
    """Build what the recipe describes. Raises `ConfigError` with the reason for which something
    stops.
    """
    question, _ = real.pose_config(config)
    real.answer(question)
    model = nest_recipe(config.given, release(config.version)).get("model") or {}
    settings = dict(model.get("config") or {})
    name = str(settings.pop("_target_", ""))
    if not name.startswith("transformers."):
        return
    from torch import device
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    try:
        instance: Any = first([name.replace(".", ":", 1)])(**settings)
        with device("meta"):
            build(instance)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"refused by transformers: {type(error).__name__}: {reason}") from error
