"""Reach: what the code of a model can change besides tensors that it computes. A trial of the model
changes it too, and must leave it as it was.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from bridge.engine.layers import HOOKS

MANY = 1000
"""How many elements a collection may have so that its elements are looked at one by one."""
LARGE = 2**20
"""How many elements a tensor may have so that its values are restored."""
DEPTH = 5
"""How many steps from a function or an attribute of a module an object may be away."""


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Context after which attributes of modules are as before, and so are collections, variables and
    small tensors that hooks and the modules' `forward` reach by their closures, globals and objects.
    """
    reach = _Reach()
    for module in model.modules():
        reach.attributes(vars(module), vars(nn.Module()).keys())
        reach.note(module.forward)
        for hook in (hook for kind in HOOKS for hook in vars(module)[kind].values()):
            reach.note(hook)
    for weight in model.parameters():
        reach.note(list((weight._backward_hooks or {}).values()))
    try:
        yield
    finally:
        for restore in reach.restores:
            restore()


class _Reach:
    """Objects that code can change, each with a function in `restores` that undoes the changes."""

    def __init__(self) -> None:
        self.restores: list[Callable[[], None]] = []
        self._visits: dict[int, Any] = {}  # the objects too, so that no other one gets their `id`

    def note(self, value: Any, depth: int = DEPTH) -> None:
        """Note `value` and what it leads to."""
        if isinstance(value, SIMPLE) or not depth or id(value) in self._visits:
            return
        self._visits[id(value)] = value
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and value.numel() <= LARGE:
                before = value.detach().clone(), value._version
                self.restores.append(partial(_copy_back, value, *before))
        elif isinstance(value, COLLECTIONS):
            if len(value) <= MANY:
                self.restores.append(partial(_refill, value, copy.copy(value)))
                for one in [*(value.values() if isinstance(value, dict) else value)]:
                    self.note(one, depth - 1)
        elif isinstance(value, CellType):
            if _filled(value):
                self.restores.append(partial(setattr, value, "cell_contents", value.cell_contents))
                self.note(value.cell_contents, depth - 1)
        elif isinstance(value, FunctionType):
            self._note_function(value, depth - 1)
        elif isinstance(value, MethodType):
            self.note(value.__func__, depth)
            self.note(value.__self__, depth - 1)
        elif isinstance(value, partial):
            self.note([value.func, *value.args, *value.keywords.values()], depth)
        elif (methods := _state_of_generator(value)) is not None:
            read, write = methods
            self.restores.append(partial(write, read()))
        elif type(value).__module__.partition(".")[0] not in FOREIGN and hasattr(value, "__dict__"):
            self.attributes(vars(value), (), depth - 1)

    def attributes(self, values: dict[str, Any], others: Any = (), depth: int = DEPTH) -> None:
        """Note the attributes `values` of an object, without those in `others`."""
        before = {name: value for name, value in values.items() if name not in others}
        self.restores.append(partial(_set_back, values, before, others))
        for value in before.values():
            self.note(value, depth)

    def _note_function(self, function: FunctionType, depth: int) -> None:
        for cell in (*(function.__closure__ or ()), *(function.__defaults__ or ())):
            self.note(cell, depth)
        space = function.__globals__
        for name in function.__code__.co_names:
            if name not in space or isinstance(space[name], type | ModuleType):
                continue
            value = space[name]
            # Of functions, those of the same file: others belong to libraries.
            if not callable(value) or getattr(value, "__globals__", None) is space:
                self.restores.append(partial(space.__setitem__, name, value))
                self.note(value, depth)


SIMPLE = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, nn.Module)
"""Values that cannot change, and modules, whose attributes are noted by themselves."""
COLLECTIONS = (list, dict, set, deque)
FOREIGN = {*sys.stdlib_module_names, "torch"}
"""Packages whose objects, such as queues that threads share, stay as they are."""


def _state_of_generator(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return functions that read and write the state of a generator of random numbers; None for any
    other object.
    """
    if hasattr(value, "bit_generator"):  # numpy's
        return lambda: value.bit_generator.state, partial(setattr, value.bit_generator, "state")
    for read, write in (("get_state", "set_state"), ("getstate", "setstate")):
        if isinstance(value, torch.Generator | random.Random) and hasattr(value, read):
            return getattr(value, read), getattr(value, write)
    return None


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return False


def _refill(collection: Any, before: Any) -> None:
    if isinstance(collection, list):
        collection[:] = before
        return
    collection.clear()
    (collection.extend if isinstance(collection, deque) else collection.update)(before)


def _set_back(values: dict[str, Any], before: dict[str, Any], others: Any) -> None:
    for name in [name for name in values if name not in before and name not in others]:
        del values[name]
    values.update(before)


def _copy_back(tensor: Tensor, before: Tensor, version: int) -> None:
    if tensor._version != version:
        tensor.data.copy_(before)
