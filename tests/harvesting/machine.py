"""Separates the refusals of a stack from errors that only say what this machine lacks: a package, a device or a file."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bridge.errors import BridgeError

LACKS = re.compile(
    r"not (be )?installed|must be installed|is not available|No module named|NVIDIA driver"
    r"|Torch not compiled with CUDA|No CUDA GPUs|requires FlashInfer|cannot be called on meta tensors"
)
"""Matches a message about a missing package or device, or about a model without values."""


class MachineError(BridgeError):
    """This machine lacks something that the config asks for, so the stack has said nothing about the config."""


def judge(error: BaseException) -> None:
    """Raise `MachineError` if `error`, or an error that led to it, says what this machine lacks."""
    for one in _causes(error):
        if isinstance(one, ImportError | OSError) or LACKS.search(str(one)):
            raise MachineError(f"{type(one).__name__}: {one}") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
