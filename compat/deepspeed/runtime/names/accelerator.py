"""DeepSpeed's accelerator object, which `get_accelerator()` returns: torch's GPU if there is one,
else the CPU.
"""

from __future__ import annotations

import os
import resource
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bridge.errors import BridgeError

__all__ = ["get_accelerator", "is_current_accelerator_supported"]
PAGES = Path("/proc/self/statm")


def _always(value: Any) -> Any:
    """Return a function that returns `value`, whatever its arguments are."""
    return lambda *_, **__: value


class Accelerator:
    """The GPU that torch uses. Attributes that this class does not define come from `torch.cuda`."""

    _name = "cuda"
    random, communication_backend_name = _always(torch.random), _always("nccl")
    is_fp16_supported, is_triton_supported = _always(True), _always(False)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of `torch.cuda`."""
        attribute = getattr(torch.cuda, name, None) if not name.startswith("__") else None
        if attribute is None:
            raise AttributeError(
                f"get_accelerator().{name}: neither the native engine's accelerator nor torch.cuda"
                " has this attribute"
            )
        return attribute

    def device_name(self, device_index: int | None = None) -> str:
        """Return torch's name of the device."""
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """Return torch's name of this process's device, with its index."""
        return self.device_name(self.current_device())

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the number of bytes of device memory."""
        return torch.cuda.get_device_properties(device_index).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the number of bytes of device memory that torch has not allocated."""
        return self.total_memory(device_index) - torch.cuda.memory_allocated(device_index)

    def range_push(self, message: str, domain: Any = None, category: Any = None) -> Any:
        """Begin a named range in the profile of NVIDIA's tools."""
        return torch.cuda.nvtx.range_push(message)  # type: ignore[no-untyped-call]

    def range_pop(self, domain: Any = None) -> Any:
        """End the current range in the profile of NVIDIA's tools."""
        return torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the number formats in which the device computes."""
        dtypes = (torch.float, torch.half, torch.bfloat16)
        has = {
            torch.float: True,
            torch.half: self.is_fp16_supported(),
            torch.bfloat16: self.is_bf16_supported(),
        }
        return [dtype for dtype in dtypes if has[dtype]]

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        """Return a copy of the tensor in pinned memory, which the device reads directly."""
        return tensor.pin_memory()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on a device of the accelerator's type."""
        return tensor.device.type == self._name

    def is_synchronized_device(self) -> bool:
        """Return whether calls on this device return only when their work is done."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = (
        is_synchronized_device
    )

    def lazy_call(self, callback: Any) -> Any:
        """Call `callback` now, because the device is always initialized."""
        return callback()

    def create_op_builder(self, name: str) -> Any:
        """Raise `BridgeError`, because the engine compiles no operators."""
        raise BridgeError(
            f"get_accelerator().create_op_builder({name!r}): the native engine builds no"
            " operators; use torch's own operators"
        )

    get_op_builder = create_op_builder


class Processor(Accelerator):
    """The CPU as an accelerator: a single device on which every call is done when it returns. The
    resident memory of the process counts as the device's memory.
    """

    _name = "cpu"
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    initial_seed, get_rng_state = (
        staticmethod(torch.initial_seed),
        staticmethod(torch.get_rng_state),
    )
    default_generator, communication_backend_name = (
        _always(torch.default_generator),
        _always("gloo"),
    )
    is_available = is_bf16_supported = _always(True)
    # There is one device, whose calls are done when they return, and no profile.
    device = set_device = synchronize = empty_cache = range_push = range_pop = _always(None)
    Stream = Event = current_stream = default_stream = create_graph = _always(None)

    def __init__(self) -> None:
        self._peak = 0

    def __getattr__(self, name: str) -> Any:
        """Return a function that measures memory, for any of torch's names of one."""
        if name.startswith(("memory_", "max_memory_", "reset_max_memory_")):
            return {"memory": self._memory_in_use, "max": self._most, "reset": self._forget}[
                name.partition("_")[0]
            ]
        raise AttributeError(f"get_accelerator().{name}: a CPU does not have this attribute")

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cpu"."""
        return self._name

    def current_device(self) -> Any:
        """Return the local rank, which DeepSpeed uses as the index of a CPU."""
        return os.environ.get("LOCAL_RANK", 0)

    def device_count(self) -> int:
        """Return the number of ranks that the launcher started on this machine; 1 if the launcher
        does not set it.
        """
        return int(os.environ.get("LOCAL_SIZE", 1))

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the state of torch's generator."""
        torch.set_rng_state(new_state)

    def stream(self, stream: Any) -> Any:
        """Return a context without effect."""
        return nullcontext()

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the number of bytes of the machine's memory."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the number of bytes of free memory of the machine."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """Return the memory of the process in bytes, under torch's names: the current value and the
        largest value measured so far.
        """
        current, most = self._memory_in_use(), self._most()
        return {"allocated_bytes.all.current": current, "allocated_bytes.all.peak": most}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Forget the largest value of memory measured so far."""
        self._forget()

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        """Return the tensor unchanged."""
        return tensor

    def _memory_in_use(self, device_index: int | None = None) -> int:
        if PAGES.is_file():
            current = int(PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        else:
            current = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._peak = max(self._peak, current)
        return current

    def _most(self, device_index: int | None = None) -> int:
        self._memory_in_use()
        return self._peak

    def _forget(self, device_index: int | None = None) -> None:
        self._peak = 0


@cache
def get_accelerator() -> Accelerator:
    """Return the accelerator object for the device that the engine computes on."""
    return Accelerator() if torch.cuda.is_available() else Processor()


def is_current_accelerator_supported() -> bool:
    """Return whether the engine supports the device that it computes on."""
    return True
