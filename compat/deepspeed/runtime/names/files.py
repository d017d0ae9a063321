"""DeepSpeed's handle for asynchronous file access, implemented with Python threads. Source:
csrc/aio/py_lib/py_ds_aio.cpp, deepspeed_py_io_handle.cpp; op_builder/async_io.py.
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
"""In DeepSpeed, the number of bytes that each thread transfers must be a multiple of this number.
"""


class AIOHandle:
    """Reads files into tensors and writes tensors into files, synchronously or asynchronously. The
    sizes of blocks and queues that a script sets have no effect, because the operating system's
    file cache does this work.
    """

    def __init__(
        self,
        block_size: int = 1024 * 1024,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        settings = {name: value for name, value in locals().items() if name != "self"}
        self._kept, self._pool = settings, ThreadPoolExecutor(max(intra_op_parallelism, 1))
        self._waiting: list[Future[int]] = []
        self._locked: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Callable[[], Any]:
        """Return a function that returns a stored setting, such as `get_block_size`."""
        settings, setting = self.__dict__.get("_kept", {}), name.removeprefix("get_")
        if setting == name or setting not in settings:
            raise AttributeError(name)
        return lambda: settings[setting]

    def get_alignment(self) -> int:
        """Return the alignment in bytes that DeepSpeed needs for the size of a tensor. This
        implementation works with any size.
        """
        return int(self._kept["intra_op_parallelism"]) * ALIGNED

    def read(
        self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0
    ) -> int:
        """Fill a tensor from a file. Returns 1."""
        return _read(buffer, filename, file_offset)

    def write(
        self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0
    ) -> int:
        """Write a tensor into a file. Returns 1."""
        return _write(buffer, filename, file_offset)

    def sync_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill a tensor from a file and wait for all pending work. Returns the number of finished
        transfers.
        """
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Write a tensor into a file and wait for all pending work. Returns the number of finished
        transfers.
        """
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Start to fill a tensor from a file. Returns 0. `wait` later returns the number of
        finished transfers.
        """
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Start to write a tensor into a file, given by name or by its descriptor. Returns 0.
        `wait` later returns the number of finished transfers.
        """
        return self._start_work(partial(_write, buffer, filename, file_offset), True)

    def pread(
        self, buffer: Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0
    ) -> int:
        """Fill a tensor from a file, synchronously or asynchronously."""
        return self._start_work(partial(_read, buffer, filename, file_offset), async_)

    def pwrite(
        self, buffer: Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0
    ) -> int:
        """Write a tensor into a file, synchronously or asynchronously."""
        return self._start_work(partial(_write, buffer, filename, file_offset), async_)

    def wait(self) -> int:
        """Wait for all started transfers. Returns the number of transfers. Raises the error of a
        transfer that failed.
        """
        waiting, self._waiting = self._waiting, []
        return sum(each.result() for each in waiting)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """Return a tensor of `num_elem` elements in the format of `example_tensor`. On a machine
        with a GPU, its memory is pinned.
        """
        tensor = torch.empty(
            num_elem, dtype=example_tensor.dtype, pin_memory=torch.cuda.is_available()
        )
        self._locked[tensor.data_ptr()] = tensor
        return tensor

    def free_cpu_locked_tensor(self, locked_tensor: Tensor) -> bool:
        """Release a tensor that `new_cpu_locked_tensor` returned, and return True. Return False for
        any other tensor.
        """
        return self._locked.pop(locked_tensor.data_ptr(), None) is not None

    def _start_work(self, work: Callable[[], int], beside: bool) -> int:
        self._waiting.append(self._pool.submit(work))
        return 0 if beside else self.wait()


def _bytes(buffer: Tensor) -> memoryview:
    """Return a view of the bytes of a CPU tensor."""
    if not buffer.is_contiguous():
        raise BridgeError("aio_handle: the tensor is not contiguous; call .contiguous() on it")
    whole: Any = buffer.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(whole)


def _read(buffer: Tensor, filename: str, offset: int) -> int:
    target = buffer if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")
    size = target.numel() * target.element_size()
    with Path(filename).open("rb", buffering=0) as file:
        file.seek(offset)
        view, count = _bytes(target), 0
        while count < size and (got := file.readinto(view[count:])):
            count += got
    if count < size:
        raise BridgeError(
            f"{filename}: found {count} bytes after offset {offset}, expected {size}; read a"
            " larger file, or use a smaller tensor"
        )
    if target is not buffer:
        buffer.copy_(target)
    return 1


def _write(buffer: Tensor, filename: str | int, offset: int) -> int:
    view, count = _bytes(buffer.cpu()), 0
    number = (
        filename
        if isinstance(filename, int)
        else os.open(filename, os.O_WRONLY | os.O_CREAT, 0o644)
    )
    try:
        while count < len(view):
            count += os.pwrite(number, view[count:], offset + count)
    finally:
        if not isinstance(filename, int):
            os.close(number)
    return 1


class AsyncIOBuilder:
    """Replaces DeepSpeed's builder of the file-access operator. This implementation compiles
    nothing.
    """

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True, because Python's threads and files work on every system."""
        return True

    def load(self, verbose: bool = True) -> Any:
        """Return the module that has `aio_handle`."""
        return SimpleNamespace(aio_handle=AIOHandle)
