"""Number formats: a plan's names and torch's types."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bridge.errors import ConfigError
from bridge.plan import Dtype

TORCH: Mapping[Dtype, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_NAMES: Mapping[torch.dtype, Dtype] = {dtype: name for name, dtype in TORCH.items()}


def name_of(dtype: torch.dtype, where: str) -> Dtype:
    """Return the plan's name for `dtype`. Raises `ConfigError`, with `where` as the place, if there
    is no name.
    """
    if dtype not in _NAMES:
        raise ConfigError(
            f"{where}: found {dtype}, expected one of {', '.join(TORCH)}; cast it first"
        )
    return _NAMES[dtype]
