"""Number formats: the names in a plan and the types of torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bridge.errors import ConfigError
from bridge.plan.plan import Dtype

TORCH: Mapping[Dtype, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_NAMES: Mapping[torch.dtype, Dtype] = {dtype: name for name, dtype in TORCH.items()}


def name_of(dtype: torch.dtype, where: str) -> Dtype:
    """Return the name that a plan has for `dtype`. Raises `ConfigError` if there is none; the
    message begins with `where`.
    """
    if dtype not in _NAMES:
        raise ConfigError(
            f"{where}: found {dtype}, expected one of {', '.join(TORCH)}; cast it first"
        )
    return _NAMES[dtype]
