"""`deepspeed.init_inference`: prepares a model for inference in a given format, without DeepSpeed's
own kernels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bridge.engine.formats import TORCH
from bridge.errors import BridgeError, ConfigError
from compat.deepspeed.runtime.names.accelerator import get_accelerator
from compat.deepspeed.runtime.names.utilities import logger

__all__ = ["InferenceEngine", "init_inference"]
NAMES: dict[str, torch.dtype] = {
    "half": torch.half,
    "float": torch.float,
    "torch.float16": torch.half,
    "torch.float32": torch.float,
}
NAMES.update((str(name), dtype) for name, dtype in TORCH.items())
SPLITS = ("mp_size", "ep_size", "moe")
KERNELS = (
    "replace_with_kernel_inject",
    "enable_cuda_graph",
    "triangular_masking",
    "injection_policy",
    "use_triton",
)


class InferenceEngine(nn.Module):
    """A model in evaluation mode. Attributes that this class does not define come from the model."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        place = get_accelerator()
        self.module = model.to(dtype=dtype, device=place.current_device_name()).eval()
        self.dtype = dtype

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of this module, or else of the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Return the model's output."""
        return self.module(*inputs, **keywords)

    def generate(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the model's own `generate`."""
        if not hasattr(self.module, "generate"):
            raise BridgeError(
                f"generate: {type(self.module).__name__} has no method generate; call the engine"
                " itself"
            )
        model: Any = self.module
        return model.generate(*inputs, **keywords)


def init_inference(
    model: nn.Module, config: str | Path | Mapping[str, Any] | None = None, **kwargs: Any
) -> InferenceEngine:
    """Return a model for inference. The default of `dtype` is fp16, as in DeepSpeed. Settings of
    DeepSpeed's kernels change no numbers beyond rounding, and each of them gives a warning. Raises
    `ConfigError` for settings that would split the model over ranks, for a format that torch does
    not have, and for the argument `checkpoint`.
    """
    settings = (
        json.loads(Path(config).read_text(encoding="utf-8"))
        if isinstance(config, str | Path)
        else dict(config or {})
    )
    ConfigError.raise_if(
        f"init_inference: {name} is {settings[name]!r} in config and {value!r} as an argument; give"
        f" {name} only once"
        for name, value in kwargs.items()
        if name in settings and settings[name] != value
    )
    settings.update(kwargs)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"init_inference: found {type(model).__name__}, expected a torch.nn.Module; if this"
            " is a pipeline of transformers, pass its model"
        )
    ConfigError.raise_if(_refusals(settings))
    for name in (name for name in KERNELS if settings.get(name)):
        logger.warning(
            "init_inference: %s: torch's own kernels are used instead (same up to rounding)", name
        )
    dtype: Any = settings.get("dtype", torch.half)
    return InferenceEngine(model, NAMES[dtype] if isinstance(dtype, str) else dtype)


def _refusals(settings: Mapping[str, Any]) -> Any:
    split = settings.get("tensor_parallel", settings.get("tp")) or {}
    size = split.get("tp_size", 1) if isinstance(split, Mapping) else getattr(split, "tp_size", 1)
    sizes = {"tensor_parallel.tp_size": size, **{name: settings.get(name) for name in SPLITS}}
    for name, value in sizes.items():
        if isinstance(value, int) and value > 1:
            yield (
                f"init_inference: found {name}={value}; the engine does not split models for"
                " inference; run the model on one rank"
            )
    dtype = settings.get("dtype", torch.half)
    if dtype not in (*NAMES, *NAMES.values()):
        yield (
            f"init_inference: found dtype={dtype}; the engine does not support this format; use"
            " torch.half, torch.bfloat16 or torch.float"
        )
    if settings.get("checkpoint"):
        yield "init_inference: found the argument checkpoint; load the weights into the model first"
