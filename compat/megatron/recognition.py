"""Recognises launches of Megatron and its files in sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.files import Launch, Script

YAML_CFG, CONTAINER = "yaml_cfg", "container"
"""Names of the entry points for a file of `--yaml-cfg` and for a serialised ConfigContainer."""
MODEL, PARALLEL = "language_model", "model_parallel"
TELLING = frozenset(
    {"--micro-batch-size", "--num-layers", "--tensor-model-parallel-size", "--yaml-cfg"}
)
"""Flags that identify a launch of Megatron: every launch has at least one of them."""


def is_launch(launch: Launch) -> bool:
    """Whether a command of a script launches Megatron."""
    return any(word.partition("=")[0] in TELLING for word in launch.texts)


def score(data: Any) -> int:
    """Return how strongly `data` looks like a config of Megatron. The stack with the highest
    number reads the file.

    A YAML file with sections counts 20, a recipe counts 2, flags or a script that launches
    Megatron count 1.
    """
    if isinstance(data, Script):
        return int(any(map(is_launch, data.launches)))
    if isinstance(data, Mapping):
        # AutoModel counts one or two for each section that its recipes have too, such as
        # `model` and `optimizer`.
        if kind_of_sections(data):
            return 20
        return 2 if "MODEL_ARGS" in data else int(any(str(key).startswith("--") for key in data))
    return int(isinstance(data, list) and any(str(word).startswith("--") for word in data))


def kind_of_sections(data: Any) -> str | None:
    """Return the entry point of a parsed file; None if the file has none of Megatron's sections."""
    if not isinstance(data, Mapping):
        return None
    if isinstance(data.get(MODEL), Mapping) and isinstance(data.get(PARALLEL), Mapping):
        return YAML_CFG
    target = str(data.get("_target_", ""))
    # Other files have a `model` section too; two of three sections beside the class's name are
    # proof enough.
    sections = sum(isinstance(data.get(name), Mapping) for name in ("model", "train", "optimizer"))
    return CONTAINER if target.endswith("ConfigContainer") and sections >= 2 else None
