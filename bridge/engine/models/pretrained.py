"""A model of Hugging Face from a folder on this machine: its weights if they are there, else random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from bridge.errors import BridgeError, SourceError

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def opened(folder: Path, seed: int) -> nn.Module:
    """The model for causal language modelling in `folder`, in fp32; random weights depend on `seed`. Nothing is downloaded and
    no code of the folder runs.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise BridgeError("--model FOLDER: transformers is not installed; pip install 'stagebridge[huggingface]'") from None
    auto: Any = AutoModelForCausalLM
    try:
        if any(path for pattern in WEIGHTS for path in folder.glob(pattern)):
            found: nn.Module = auto.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
            return found
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            made: nn.Module = auto.from_config(config, dtype=torch.float32)
            return made
    except (OSError, ValueError) as error:
        raise SourceError(f"{folder}: transformers makes no model of it ({str(error).splitlines()[0]})") from error
