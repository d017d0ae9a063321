"""Megatron-Core's requests for CUDA answered by the CPU: for tests and demos where there is no accelerator."""

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
    """The number of a device, where one is spelled; the CPU, where one is asked for."""


INDEX = _Index(0)


@contextmanager
def quiet() -> Iterator[None]:
    """While inside, Megatron does not say what nobody can act upon without a GPU: which kernels it misses, and what it finds
    outdated in itself.
    """
    with (
        warnings.catch_warnings(),
        patch.object(logging.getLogger("megatron.core.rerun_state_machine"), "disabled", True),
    ):
        warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed")
        yield


@contextmanager
def redirected() -> Iterator[None]:
    """While inside, what is asked of CUDA is done by the CPU: devices, types' names, random states, waits.

    Megatron's arithmetic and its messages stay as they are. Raises `BridgeError` where there is CUDA: it needs no help.
    """
    if torch.cuda.is_available():
        raise BridgeError(
            "cpu.redirected: this machine has CUDA, which Megatron-Core uses itself; leave the redirection out"
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
        stack.enter_context(patch.multiple(messages, _p2p_ops=partial(_kept, messages._p2p_ops)))
        stack.enter_context(
            patch.object(moe_utils, "te_general_gemm", None, create=True)
        )  # a router looks whether it is there
        stack.enter_context(quiet())
        stack.enter_context(_Redirection())
        yield


def _state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> Tensor:
    return torch.get_rng_state()


def _set_state(state: Tensor, device: Any = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


@dataclass(frozen=True, slots=True)
class _Sending:
    """A message under way, with what it holds."""

    work: Any
    tensor: Tensor

    def wait(self) -> None:
        """Until it is sent."""
        self.work.wait()


def _kept(start: Callable[..., dict[str, Any]], **messages: Any) -> dict[str, Any]:
    """Messages whose contents live until they are sent. Megatron frees outputs (deallocate_output_tensor) once their sending
    has begun, which CUDA's streams allow and gloo does not: it would send what came to lie there.
    """
    sent = {
        name.removeprefix("tensor_"): value.detach()
        for name, value in messages.items()
        if name.startswith("tensor_send_") and value is not None
    }
    works = start(**{**messages, **{f"tensor_{name}": value for name, value in sent.items()}})
    return {**works, **{name: _Sending(works[name], value) for name, value in sent.items()}}


_CUDA: Mapping[str, Any] = {
    "current_device": lambda: CPU,
    "synchronize": lambda device=None: None,
    "get_rng_state": _state,
    "set_rng_state": _set_state,
    "manual_seed": lambda seed: torch.manual_seed(seed),
}
"""What is asked of `torch.cuda`, and the answer."""


class _Redirection(TorchFunctionMode):
    """Torch's functions with every device that is CUDA replaced; `Tensor.type` names the type that CUDA would have."""

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
        named = func is Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.") if named else result


def _place(value: Any) -> Any:
    """The value, or the CPU for a CUDA device."""
    if value is INDEX:
        return CPU
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    return CPU if isinstance(value, str) and value.partition(":")[0] == "cuda" else value
