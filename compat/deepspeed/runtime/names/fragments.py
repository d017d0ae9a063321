"""`deepspeed.utils.safe_get_full_grad` and similar functions: read and write a parameter's whole
master, moments and gradient. As with DeepSpeed, all data ranks must take part in each call. Source:
deepspeed/utils/tensor_fragment.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bridge.errors import BridgeError
from compat.deepspeed.runtime.names import parts

__all__ = [
    "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state", "safe_get_local_fp32_param",
    "safe_get_local_grad", "safe_get_local_optimizer_state", "safe_set_full_fp32_param", "safe_set_full_grad",
    "safe_set_full_optimizer_state", "safe_set_local_fp32_param", "safe_set_local_grad", "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]  # fmt: skip


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """Return the whole master of the parameter in fp32; None if no engine holds the parameter."""
    place = parts.place_of(param)
    return None if place is None else parts.master(*place).float()


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the parameter's master to `value`, and the weight in the compute format to the rounded
    value.
    """
    place = parts.place_of(param)
    if place is not None:
        parts.set_masters(place[0], [(place[1], place[2], value)])


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return the whole tensor of an optimizer state for the parameter, such as `exp_avg`; None if
    no engine holds the parameter.
    """
    place = parts.place_of(param)
    if place is None:
        return None
    native, index, name = place
    return parts.whole(native, index, name, parts.moment(native, index, optim_state_key))


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set an optimizer state of the parameter, such as `exp_avg`, to `value`."""
    place = parts.place_of(param)
    if place is not None:
        native, index, name = place
        parts.put(native, index, name, parts.moment(native, index, optim_state_key), value)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Return the parameter's whole mean gradient of the current step, with ZeRO times the loss scale;
    None if there is no gradient. Gradients exist only between the last backward of a step and `step`.
    """
    place = parts.place_of(param)
    shard = None if place is None else parts.gradient(place[0], place[1])
    if place is None or shard is None:
        return None
    return parts.whole(*place, shard) * parts.gradient_unit(place[0])


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Set the parameter's mean gradient of the current step to `value`. This is possible only
    between the last backward of a step and `step`.
    """
    place = parts.place_of(param)
    shard = None if place is None else parts.gradient(place[0], place[1])
    if place is not None and shard is not None:
        parts.put(*place, shard, value / parts.gradient_unit(place[0]))


@torch.no_grad()
def safe_update_full_grad_vectorized(
    param_list: Sequence[Tensor], update_func: Callable[[Any, Any], Any]
) -> None:
    """Replace each parameter's gradient by `update_func(gradient, parameter)`."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def _local(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise BridgeError(
            f"deepspeed.utils.{name}: the engine has no separate local part of each parameter,"
            " because a shard may hold parts of several parameters; use"
            f" {name.replace('local', 'full')}"
        )

    refuse.__name__ = name
    return refuse


safe_get_local_fp32_param, safe_set_local_fp32_param = map(
    _local, ("safe_get_local_fp32_param", "safe_set_local_fp32_param")
)
safe_get_local_grad, safe_set_local_grad = map(
    _local, ("safe_get_local_grad", "safe_set_local_grad")
)
safe_get_local_optimizer_state, safe_set_local_optimizer_state = map(
    _local, ("safe_get_local_optimizer_state", "safe_set_local_optimizer_state")
)
