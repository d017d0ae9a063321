"""Compiling: some stacks call torch's compiler when they are imported. On a CPU, stagebridge
imports them without the compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


@contextmanager
def disable_compile() -> Iterator[None]:
    """Context in which `torch.compile` returns functions unchanged, unless there is CUDA. The
    functions compute the same without the compiler, and importing the compiler takes longer than
    importing the rest of a stack.
    """
    if torch.cuda.is_available():
        yield
        return
    with patch.object(torch, "compile", lambda function, **options: function):
        yield
