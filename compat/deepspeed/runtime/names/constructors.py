"""Torch's constructors of tensors, as they are within `zero.Init`: floating-point tensors get the
config's format. Source: deepspeed/runtime/zero/partition_parameters.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from compat.deepspeed import names
from compat.deepspeed.runtime.names.accelerator import get_accelerator

ORIGINAL: dict[str, Callable[..., Tensor]] = {
    name: getattr(torch, name)
    for name in ("arange", "empty", "eye", "full", "ones", "randn", "tensor", "zeros")
}
globals().update({f"_orig_torch_{name}": function for name, function in ORIGINAL.items()})
WRAPPER = "zero_wrapper_for_fp_tensor_constructor"
__all__ = ["get_accelerator", WRAPPER, *(f"_orig_torch_{name}" for name in ORIGINAL)]


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor],
    target_fp_dtype: torch.dtype | None,
    target_device: torch.device | None,
) -> Callable[..., Tensor]:
    """Return `fn` with another result: its floating-point tensors are of `target_fp_dtype`, and
    those for which the caller names no device are on `target_device`. None changes nothing.
    """

    @wraps(fn)
    def make(*arguments: Any, **keywords: Any) -> Tensor:
        if keywords.get("device") is None and target_device is not None:
            keywords["device"] = target_device
        tensor = fn(*arguments, **keywords)
        if target_fp_dtype is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(target_fp_dtype)
        return tensor

    return make


@contextmanager
def make_tensors_in(dtype: torch.dtype) -> Iterator[None]:
    """Context in which torch's constructors make floating-point tensors of `dtype`."""
    # Asked of DeepSpeed's module, where transformers puts a wrapper of its own meanwhile.
    wrap = getattr(names.module("runtime.zero.partition_parameters"), WRAPPER)
    before = {name: getattr(torch, name) for name in ORIGINAL}
    try:
        for name, function in ORIGINAL.items():
            setattr(torch, name, wrap(function, target_fp_dtype=dtype, target_device=None))
        yield
    finally:
        for name, function in before.items():
            setattr(torch, name, function)
