"""DeepSpeed's handle for files that are read and written beside other work, with threads of Python.

Source: csrc/aio/py_lib/py_ds_aio.cpp, deepspeed_py_io_handle.cpp; op_builder/async_io.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bridge.errors import BridgeError

__all__ = ["AsyncIOBuilder"]
ALIGNED = 512
"""Bytes to a multiple of which each thread's part of a tensor has to come out in DeepSpeed."""


class AIOHandle:
    """Reads files into tensors and writes tensors into files, at once or beside other work.

    Sizes of blocks and queues are kept and change nothing: the system's own cache does that work.
    """

    def __init__(
        self,
        block_size: int = 1024 * 1024,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        kept = {name: value for name, value in locals().items() if name != "self"}
        self._kept, self._pool = kept, ThreadPoolExecutor(max(intra_op_parallelism, 1))
        self._waiting: list[Future[int]] = []
        self._locked: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Callable[[], Any]:
        """`get_block_size` and so on."""
        kept, setting = self.__dict__.get("_kept", {}), name.removeprefix("get_")
        if setting == name or setting not in kept:
            raise AttributeError(name)
        return lambda: kept[setting]

    def get_alignment(self) -> int:
        """Bytes that a tensor's size should be a multiple of in DeepSpeed; here any will do."""
        return int(self._kept["intra_op_parallelism"]) * ALIGNED

    def read(
        self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0
    ) -> int:
        """Fill a tensor from a file; 1."""
        return _read(buffer, filename, file_offset)

    def write(
        self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0
    ) -> int:
        """Write a tensor into a file; 1."""
        return _write(buffer, filename, file_offset)

    def sync_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill a tensor from a file, once everything that is under way is done; how many that were."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Write a tensor into a file, once everything that is under way is done; how many that were."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Start to fill a tensor from a file; 0. `wait` says how many were done."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Start to write a tensor into a file, or into an open one by its number; 0. `wait` says how many were done."""
        return self._started(partial(_write, buffer, filename, file_offset), True)

    def pread(
        self, buffer: Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0
    ) -> int:
        """Fill a tensor from a file, at once or beside other work."""
        return self._started(partial(_read, buffer, filename, file_offset), async_)

    def pwrite(
        self, buffer: Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0
    ) -> int:
        """Write a tensor into a file, at once or beside other work."""
        return self._started(partial(_write, buffer, filename, file_offset), async_)

    def wait(self) -> int:
        """Wait for all that was started; how many those were. Raises what went wrong in any of them."""
        waiting, self._waiting = self._waiting, []
        return sum(each.result() for each in waiting)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """A tensor of so many elements in the format of the other one, in memory that stays in place where there is a device."""
        found = torch.empty(
            num_elem, dtype=example_tensor.dtype, pin_memory=torch.cuda.is_available()
        )
        self._locked[found.data_ptr()] = found
        return found

    def free_cpu_locked_tensor(self, locked_tensor: Tensor) -> bool:
        """Let go of such a tensor; whether it was one."""
        return self._locked.pop(locked_tensor.data_ptr(), None) is not None

    def _started(self, work: Callable[[], int], beside: bool) -> int:
        self._waiting.append(self._pool.submit(work))
        return 0 if beside else self.wait()


def _bytes(buffer: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU."""
    if not buffer.is_contiguous():
        raise BridgeError("aio_handle: the tensor is not contiguous; call .contiguous() on it")
    whole: Any = buffer.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(whole)


def _read(buffer: Tensor, filename: str, offset: int) -> int:
    held = buffer if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")
    size = held.numel() * held.element_size()
    with Path(filename).open("rb", buffering=0) as file:
        file.seek(offset)
        view, done = _bytes(held), 0
        while done < size and (got := file.readinto(view[done:])):
            done += got
    if done < size:
        raise BridgeError(
            f"{filename}: found {done} bytes from {offset} on, expected {size}; read a file that is as large"
        )
    if held is not buffer:
        buffer.copy_(held)
    return 1


def _write(buffer: Tensor, filename: str | int, offset: int) -> int:
    view, done = _bytes(buffer.cpu()), 0
    number = (
        filename
        if isinstance(filename, int)
        else os.open(filename, os.O_WRONLY | os.O_CREAT, 0o644)
    )
    try:
        while done < len(view):
            done += os.pwrite(number, view[done:], offset + done)
    finally:
        if not isinstance(filename, int):
            os.close(number)
    return 1


class AsyncIOBuilder:
    """What DeepSpeed compiles; here there is nothing to build."""

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Threads and files are everywhere."""
        return True

    def load(self, verbose: bool = True) -> Any:
        """The module with `aio_handle`."""
        return SimpleNamespace(aio_handle=AIOHandle)
