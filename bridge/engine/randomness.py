"""Randomness: seeds that follow from names and numbers, and a context after which torch's
generators are as before.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bridge.engine.device import generator


def seed_of(*parts: int | str) -> int:
    """Return a seed below 2**63 that depends on all `parts` and their order, and is the same on
    every machine.
    """
    # Python's own hash differs between processes. The zero byte keeps ("a", "bc") apart from ("ab",
    # "c").
    digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_of_script(model: torch.nn.Module) -> int:
    """Return a seed below 2**63 that follows from the state of torch's generator and from the shapes of
    `model`, so that two models of a script draw different numbers.
    """
    state = torch.get_rng_state().numpy().tobytes().hex()
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    return seed_of(state, str(shapes))


FIXED: Mapping[str, str] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
"""Environment variables that make libraries compute products and reductions in a fixed order. The
libraries read them when they start.
"""


def determine() -> None:
    """From now on, make this process compute the same bits from the same inputs.

    Torch uses deterministic algorithms, and an operation without one raises an error. Reductions
    over ranks use one ring. Call this function before the first collective; it holds for the whole
    process.
    """
    for name, value in FIXED.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # Otherwise cuDNN times its algorithms and takes the fastest, which may be another one next
    # time.
    torch.backends.cudnn.benchmark = False


States = list[tuple[torch.Generator, torch.Tensor]]


@dataclass
class _Scope:
    """What tensor ranks draw apart within a `scope`: the rank while they do, the states from before,
    and how often they have begun.
    """

    rank: int | None = None
    before: States = field(default_factory=list)
    number: int = 0


_scope: _Scope | None = None
"""The innermost `scope`."""


@contextmanager
def scope(device: torch.device) -> Iterator[None]:
    """Context after which torch's generators have the same state as before."""
    # torch.random.fork_rng does the same in several times the time, and every layer has a scope.
    global _scope
    states, outer = _states(device), _scope
    _scope = _Scope()
    try:
        yield
    finally:
        _scope = outer
        _restore(states)


def draw_apart(rank: int, device: torch.device) -> None:
    """Within a `scope`, draw other numbers on each tensor rank until `draw_together` is called. The
    ranks hold different heads or features there, whose masks must not be equal.
    """
    if _scope is not None and _scope.rank is None:
        _scope.before, _scope.number = _states(device), _scope.number + 1
        _scope.rank = rank
        # The last seed names the layer, the step and the microbatch, alike on all ranks.
        last = torch.default_generator.initial_seed()
        seed_generators(seed_of(last, _scope.number, rank), device)


def draw_together() -> None:
    """Draw the same numbers on all tensor ranks again, as if none had been drawn apart."""
    if _scope is not None and _scope.rank is not None:
        _restore(_scope.before)
        _scope.rank = None


def _states(device: torch.device) -> States:
    own = generator(device)
    return [(one, one.get_state()) for one in (torch.default_generator, own) if one is not None]


def _restore(states: States) -> None:
    for one, state in states:
        one.set_state(state)


def other_states() -> tuple[Any, ...]:
    """Return the states of the random generators of Python and numpy."""
    numpy = sys.modules.get("numpy")
    last = numpy.random.get_state() if numpy else ("", b"")
    return random.getstate(), (last[0], bytes(last[1]), *last[2:])


def restore_others(before: tuple[Any, ...]) -> None:
    """Set the generators of Python and numpy to states that `other_states` returned."""
    random.setstate(before[0])
    numpy = sys.modules.get("numpy")
    if numpy and before[1][0]:
        kind, key, *rest = before[1]
        numpy.random.set_state((kind, numpy.frombuffer(key, dtype=numpy.uint32), *rest))


class Keyed(TorchFunctionMode):
    """Context in which the random numbers of a call of torch depend on nothing but `seed`, the
    module that makes the call, the function, how often the module called it before in this context,
    and the tensor rank where ranks draw apart. `keys` has the names of modules by `id`.
    """

    def __init__(self, device: torch.device, seed: int, keys: Mapping[int, str]) -> None:
        super().__init__()
        self.device, self.seed, self.keys = device, seed, keys
        self._calls = Counter[tuple[str, str]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(getattr(func, "__name__", func))
        if name != "__get__":  # an attribute of a tensor
            frame: Any = sys._getframe(1)
            while frame is not None and id(frame.f_locals.get("self")) not in self.keys:
                frame = frame.f_back
            key = self.keys[id(frame.f_locals["self"])] if frame is not None else "", name
            self._calls[key] += 1
            apart = () if _scope is None or _scope.rank is None else (_scope.rank,)
            seed_generators(seed_of(self.seed, *key, self._calls[key], *apart), self.device)
        return func(*args, **(kwargs or {}))


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's generators for `device`."""
    torch.default_generator.manual_seed(seed)
    # By the generator of this device: `torch.cuda.manual_seed` seeds that of the current one.
    own = generator(device)
    if own is not None:
        own.manual_seed(seed)
