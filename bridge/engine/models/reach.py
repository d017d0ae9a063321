"""Reach: what the code of a model can change besides tensors that it computes. A trial of the model
changes it too, and must leave it as it was.
"""

from __future__ import annotations

import operator
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from bridge.engine.layers import HOOKS
from bridge.engine.models.blocks import WHOLE, Uncut

MANY = 1000
"""How many elements a collection may have so that its elements are looked at one by one."""
LARGE = 2**20
"""How many elements a tensor may have so that its values are restored."""
DEPTH = 6
"""How many steps from a module an object may be away."""
SIMPLE = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, nn.Module)
"""Values that cannot change, and modules, whose attributes are noted by themselves."""
FOREIGN = {*sys.stdlib_module_names, "torch"}
"""Packages whose objects, such as queues that threads share, stay as they are."""


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Context after which attributes of modules are as before, and so are collections, variables,
    random generators and small tensors that hooks and the modules' `forward` reach by their closures,
    globals and objects. Raises `Uncut` if they reach an iterator, which only goes forward.
    """
    reach, usual = _Reach(), vars(nn.Module()).keys()
    for module in model.modules():
        own = vars(module)
        hooks = [hook for kind in HOOKS for hook in own[kind].values()]
        reach.restores.append(partial(_refill, own, _read_items(own)))
        own_values = [own[name] for name in own.keys() - usual | {"_buffers"}]
        reach.note([module.forward, *hooks, *own_values], DEPTH)
    for weight in model.parameters():
        reach.note([*(weight._backward_hooks or {}).values()], DEPTH)
    try:
        yield
    finally:
        for restore in reach.restores:
            restore()


class _Reach:
    """Objects that code can change, each with a function in `restores` that undoes the changes."""

    def __init__(self) -> None:
        self.restores: list[Callable[[], object]] = []
        self._visits: dict[int, Any] = {}  # the objects too, so that no other one gets their `id`

    def note(self, value: Any, depth: int) -> None:
        """Note `value` and what it leads to in fewer than `depth` steps."""
        if isinstance(value, SIMPLE) or not depth or id(value) in self._visits:
            return
        self._visits[id(value)] = value
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and value.numel() <= LARGE:
                before = value.detach().clone(), value._version
                self.restores.append(partial(_copy_back, value, *before))
        elif isinstance(value, list | dict | set | deque):
            if len(value) <= MANY:
                items = _read_items(value)
                self.restores.append(partial(_refill, value, items))
                keyed = isinstance(value, dict)
                self._note_all([item[1] for item in items] if keyed else items, depth)
        elif isinstance(value, CellType):
            with suppress(ValueError):  # a variable that has no value yet
                before = value.cell_contents
                self.restores.append(partial(setattr, value, "cell_contents", before))
                self.note(before, depth - 1)
        elif isinstance(value, FunctionType):
            self._note_all((*(value.__closure__ or ()), *(value.__defaults__ or ())), depth)
            self._note_globals(value, depth)
        elif isinstance(value, MethodType):
            self._note_all((value.__func__, value.__self__), depth)
        elif isinstance(value, partial):
            self._note_all((value.func, *value.args, *value.keywords.values()), depth)
        elif isinstance(value, torch.Generator):
            self.restores.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self.restores.append(partial(value.setstate, value.getstate()))
        elif hasattr(value, "bit_generator"):  # numpy's
            source = value.bit_generator
            self.restores.append(partial(setattr, source, "state", source.state))
        elif type(value).__module__.partition(".")[0] not in FOREIGN and hasattr(value, "__dict__"):
            self.note(vars(value), depth - 1)
        elif isinstance(value, Iterator):
            raise Uncut(
                f"its code reaches an iterator ({type(value).__name__}), of which a trial would take"
                f" elements; {WHOLE}"
            )

    def _note_all(self, values: Any, depth: int) -> None:
        for value in values:
            self.note(value, depth - 1)

    def _note_globals(self, function: FunctionType, depth: int) -> None:
        space = function.__globals__
        for name in {*function.__code__.co_names} & space.keys():
            value = space[name]
            # Of functions, those of the same file: others belong to libraries.
            if not callable(value) or getattr(value, "__globals__", None) is space:
                self.restores.append(partial(space.__setitem__, name, value))
                self.note(value, depth - 1)


def _base(collection: Any) -> Any:
    """Return the type of Python's own under a collection: a class that derives from it may read differently,
    as transformers' table of activations does, whose values are made when they are read.
    """
    return next(
        base for base in (OrderedDict, dict, list, set, deque) if isinstance(collection, base)
    )


def _read_items(collection: Any) -> list[Any]:
    """Return the elements of a collection as they are stored; of a mapping, keys with values."""
    base = _base(collection)
    keys = [*base.__iter__(collection)]
    return (
        [(key, base.__getitem__(collection, key)) for key in keys]
        if issubclass(base, dict)
        else keys
    )


def _refill(collection: Any, before: list[Any]) -> None:
    """Store the elements `before` in a collection again if it has others now."""
    base, now = _base(collection), _read_items(collection)
    keyed = issubclass(base, dict)
    parts = [
        [part for item in items for part in (item if keyed else (item,))] for items in (now, before)
    ]
    if len(parts[0]) == len(parts[1]) and all(map(operator.is_, *parts)):
        return
    base.clear(collection)
    if keyed:
        for key, value in before:
            base.__setitem__(collection, key, value)
    else:
        (base.update if base is set else base.extend)(collection, before)


def _copy_back(tensor: Tensor, before: Tensor, version: int) -> None:
    if tensor._version != version:
        tensor.data.copy_(before)
