"""Answers Megatron-Core's requests for CUDA on the CPU, for tests and demos without a GPU."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bridge.errors import BridgeError

CPU = torch.device("cpu")


class _Index(int):
    """Index of a CUDA device that can be printed as a number and is replaced by the CPU in calls."""


INDEX = _Index(0)


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager that silences Megatron's deprecation warnings and its warnings about missing
    kernels, because nobody can act on them without a GPU.
    """
    with (
        warnings.catch_warnings(),
        patch.object(logging.getLogger("megatron.core.rerun_state_machine"), "disabled", True),
    ):
        warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed")
        yield


@contextmanager
def redirect_cuda() -> Iterator[None]:
    """Context manager in which the CPU answers requests for CUDA: devices, names of tensor types,
    random states and synchronization.

    Megatron's arithmetic and the messages between ranks do not change. Raises `BridgeError` if the
    machine has CUDA, because Megatron then needs no redirection.
    """
    if torch.cuda.is_available():
        raise BridgeError(
            "cpu.redirected: found CUDA on this machine, which Megatron-Core can use directly; "
            "do not redirect"
        )
    from megatron.core.pipeline_parallel import p2p_communication as messages
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **_CUDA))
        stack.enter_context(patch.multiple(torch.cuda.random, get_rng_state=_state))
        stack.enter_context(
            patch.multiple(random, _get_cuda_rng_state=_state, _set_cuda_rng_state=_set_state)
        )
        stack.enter_context(
            patch.multiple(messages, _p2p_ops=partial(_keep_messages, messages._p2p_ops))
        )
        stack.enter_context(
            patch.object(moe_utils, "te_general_gemm", None, create=True)
        )  # The router checks whether this function exists.
        stack.enter_context(quiet())
        stack.enter_context(_Redirection())
        yield


def _state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> Tensor:
    return torch.get_rng_state()


def _set_state(state: Tensor, device: Any = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


@dataclass(frozen=True, slots=True)
class _Sending:
    """A message that is being sent, with a reference to its tensor."""

    work: Any
    tensor: Tensor

    def wait(self) -> None:
        """Wait until the message is sent."""
        self.work.wait()


def _keep_messages(start: Callable[..., dict[str, Any]], **messages: Any) -> dict[str, Any]:
    """Start messages, and keep their tensors alive until they are sent.

    Megatron frees an output as soon as its sending has begun (deallocate_output_tensor). CUDA's
    streams allow that; gloo would send whatever is written to the memory next.
    """
    tensors = {
        name.removeprefix("tensor_"): value.detach()
        for name, value in messages.items()
        if name.startswith("tensor_send_") and value is not None
    }
    works = start(**{**messages, **{f"tensor_{name}": value for name, value in tensors.items()}})
    return {**works, **{name: _Sending(works[name], value) for name, value in tensors.items()}}


_CUDA: Mapping[str, Any] = {
    "current_device": lambda: CPU,
    "synchronize": lambda device=None: None,
    "get_rng_state": _state,
    "set_rng_state": _set_state,
    "manual_seed": lambda seed: torch.manual_seed(seed),
}
"""Replacements of functions of `torch.cuda`, by name."""


class _Redirection(TorchFunctionMode):
    """Runs torch's functions with the CPU for every CUDA device.

    `Tensor.type` still returns the name of the CUDA type.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.cuda:
            return args[0]
        result = func(
            *map(_place, args), **{name: _place(value) for name, value in (kwargs or {}).items()}
        )
        is_name = func is Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.") if is_name else result


def _place(value: Any) -> Any:
    """Return the CPU for a CUDA device, and any other value unchanged."""
    if value is INDEX:
        return CPU
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    return CPU if isinstance(value, str) and value.partition(":")[0] == "cuda" else value
