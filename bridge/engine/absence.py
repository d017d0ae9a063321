"""Absence: parameters whose values or gradients are not whole on this rank. Whatever reads or writes
them is an error, instead of a computation with numbers of other parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bridge.errors import BridgeError

State = Literal["absent", "linked", "withheld"]
"""`absent`: reading the values is an error. `linked`: the values are whole for a while, and a graph
that uses them outlives them. `withheld`: reading the gradient is an error.
"""
HIDDEN = "_stagebridge_hidden"
"""Attribute of parameters: why reading the gradient is an error, if it is."""
ASK = "_stagebridge_ask"
"""Attribute of parameters whose gradient cannot be read: a function that tries to make it whole, and returns
whether it has. None if nothing can.
"""
NAME = "_stagebridge_name"
"""Attribute of parameters: their name, for errors."""
CALLS = frozenset(
    (
        "size",
        "dim",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "__hash__",
        "__len__",
        "storage_offset",
        "get_device",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
    )
)
ATTRIBUTES = frozenset(
    (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "is_leaf",
        "ndim",
        "layout",
        "is_sparse",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_quantized",
        "is_nested",
        "names",
        "grad",
        "_version",
        "grad_fn",
        "_post_accumulate_grad_hooks",
        "_backward_hooks",
        "output_nr",
        "itemsize",
        "nbytes",
    )
)
"""What says nothing of values."""


class Link(torch.autograd.Function):
    """A parameter as a tensor of its own, with the values that it has now."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        LINKED.add(id(ctx.parameter))
        return gradient


LINKED = set[int]()
"""Parameters (by `id`) whose next gradient comes through a `Link`."""
_MADE: dict[type, tuple[type, State]] = {}


def change(parameter: Any, state: State | None) -> None:
    """Give a parameter another state; None is that of any parameter."""
    kind, before = _MADE.get(type(parameter), (type(parameter), None))
    if state != before:
        parameter.__class__ = kind if state is None else _variant(kind, state)


def state_of(parameter: Any) -> State | None:
    """Return the state of a parameter."""
    return _MADE[type(parameter)][1] if type(parameter) in _MADE else None


def gradient_of(parameter: Any) -> Tensor | None:
    """Return the gradient of a parameter, whatever its state is. A sparse one becomes dense first."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Tensor | None = Tensor.grad.__get__(parameter)  # type: ignore[union-attr]
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
            Tensor.grad.__set__(parameter, gradient)  # type: ignore[union-attr]
        return gradient


def drop_gradient(parameter: Any) -> None:
    """Take the gradient of a parameter away, whatever its state is."""
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.grad.__set__(parameter, None)  # type: ignore[union-attr]


def hide_gradient(parameter: Any, hide: str, ask: Callable[[], bool] | None = None) -> None:
    """Make it an error to read the gradient of a parameter, which says the reason `hide`, unless `ask` makes it whole;
    an empty reason allows it again.
    """
    if state_of(parameter) in (None, "withheld"):
        change(parameter, "withheld" if hide else None)
    setattr(parameter, HIDDEN, hide)
    setattr(parameter, ASK, ask)


def is_hidden(parameter: Any) -> bool:
    """Return whether it is an error to read the gradient of a parameter."""
    return bool(vars(parameter).get(HIDDEN))


SLICE = (
    "this rank has only a slice of the gradient or only its own, or has it in another format or scale; call"
    " engine.backward(loss), read it on all ranks in fp32, call safe_get_full_grad and safe_set_full_grad, set"
    " gradient_clipping in the config, or use zero.stage 0 in fp32"
)
EARLY = (
    "the engine gathers the gradient until the last microbatch of the step; read or change it after the"
    " backward pass of that one, when engine.is_gradient_accumulation_boundary() is true"
)
"""Reasons for which a gradient cannot be read."""


def _name(parameter: Any) -> str:
    return str(vars(parameter).get(NAME, "parameter"))


def _taken(func: Any, value: Any) -> Any:
    """Return what `func` gets in place of the argument `value`."""
    state = state_of(value)
    if state == "linked" and torch.is_grad_enabled() and value.requires_grad:
        return Link.apply(value)  # type: ignore[no-untyped-call]
    if state == "absent":
        what = getattr(getattr(func, "__self__", None), "__name__", None) or getattr(
            func, "__name__", func
        )
        raise BridgeError(
            f"{_name(value)}: {what} was called while the values of this weight are not whole on this rank;"
            " call it within zero.GatheredParameters([...]), with modifier_rank=0 if it changes values, or use zero.stage 2"
        )
    return value


def _dispatch(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    name, kwargs = getattr(func, "__name__", ""), kwargs or {}
    accessor = name in ("__get__", "__set__")
    attribute = getattr(getattr(func, "__self__", None), "__name__", "") if accessor else ""
    if attribute == "grad" and vars(args[0]).get(HIDDEN):
        _reveal(args[0])
    with torch._C.DisableTorchFunctionSubclass():
        whole = accessor and not any(state_of(value) == "absent" for value in args)
        if whole or attribute in ATTRIBUTES or name in CALLS:
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, lambda value: _taken(func, value), (args, kwargs))
        return func(*args, **kwargs)


def _copy(parameter: Any, memo: dict[int, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        duplicate = memo[id(parameter)] = _MADE[type(parameter)][0](
            _taken(_copy, parameter).detach().clone(), parameter.requires_grad
        )
    return duplicate


def _reveal(parameter: Any) -> None:
    """Make the gradient of a parameter whole, or raise `BridgeError`."""
    ask = vars(parameter)[ASK]
    if ask is None or not ask() or is_hidden(parameter):
        raise BridgeError(f"{_name(parameter)}.grad: {vars(parameter)[HIDDEN]}")


def _read(parameter: Any) -> Tensor | None:
    _reveal(parameter)
    return gradient_of(parameter)


def _write(parameter: Any, gradient: Tensor | None) -> None:
    _reveal(parameter)
    parameter.grad = gradient


@cache
def _variant(kind: type, state: State) -> type:
    """Return the class of parameters of class `kind` in a state."""
    hidden: dict[str, Any] = {"grad": property(_read, _write)}
    methods: dict[str, Any] = {"__torch_function__": classmethod(_dispatch)}
    own = {"__deepcopy__": _copy, **(hidden if state == "withheld" else methods)}
    subclass = type(kind.__name__, (kind,), own)
    _MADE[subclass] = kind, state
    return subclass
