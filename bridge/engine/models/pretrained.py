"""Opens a model of Hugging Face in a folder on this machine, with the weights in the folder, or
with random weights if there are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bridge.errors import BridgeError, SourceError
from bridge.stack.extras import install_command

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


def dropping(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the settings of a model's config that drop activations at random (dropout), with their
    values.
    """
    return {
        name: value
        for name, value in config.items()
        if "drop" in name and isinstance(value, float) and value > 0
    }


def settings(folder: Path) -> dict[str, Any]:
    """Return the settings that transformers reads from the config.json in `folder`, with defaults
    filled in.
    """
    from transformers import AutoConfig

    config: dict[str, Any] = AutoConfig.from_pretrained(folder, local_files_only=True).to_dict()
    return config


def build_model(folder: Path | None, config: Any, seed: int, **options: Any) -> Any:
    """Return the model for causal language modelling that `config` describes, with the weights in
    `folder`, or with random ones from `seed` if there are none.
    """
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    if folder and any(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        return auto.from_pretrained(folder, config=config, local_files_only=True, **options)
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        return auto.from_config(config, **options)


def open_model(folder: Path, seed: int, drops: bool = True) -> Any:
    """Return the model for causal language modelling in `folder`, in fp32. If the folder has no
    weights, they are drawn from `seed`. Without `drops`, dropout is off.

    Nothing is downloaded, and no code in the folder runs.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise BridgeError(
            f"--model FOLDER: transformers is not installed; {install_command('huggingface')}"
        ) from None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        for name in () if drops else dropping(config.to_dict()):
            setattr(config, name, 0.0)
        return build_model(folder, config, seed, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{folder}: transformers cannot build a model from this folder ({str(error).splitlines()[0]})"
        ) from error
