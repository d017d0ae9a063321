"""Invariant of recomputation: backward recomputes the values of the forward pass, also inside
layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bridge.trace import naming
from bridge.trace.findings import TraceFinding
from bridge.trace.hook import Hook
from bridge.trace.invariants.check import Check, few_names
from bridge.trace.invariants.inputs import digest_generator, drops_elements
from bridge.trace.invariants.sketch import sample_tensor
from bridge.trace.module import ModuleSource
from bridge.trace.tracer import is_recomputing

PROBED = 2
"""Number of first steps in which every module is observed. Later, one step in `EVERY` is observed
if any module recomputes.
"""
EVERY = 50
TOLERANCE = 1e-3
"""Largest relative difference that counts as rounding, because some devices sum in any order."""


class Recomputed(Check):
    """The recomputation in backward gives the same output of every module as the forward pass, as
    far as samples show.

    Non-reentrant checkpoints of torch stop recomputing as soon as backward has all that it needs,
    so that the last modules may not be seen again. They are not made to run to the end: code that
    draws from other generators than torch's, or that counts, would give other numbers then.
    """

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.seen: dict[str, list[Tensor]] = {}
        self.odd: dict[str, float] = {}
        self.states: dict[str, list[Tensor]] = {}
        self.redrawn: dict[str, None] = {}
        self.any = False
        self.step = 1
        self._watch()

    def _watch(self) -> None:
        if self.source.hidden:
            return
        for name, module in naming.modules_by_path(self.source.module):
            if name:
                hook = self.safe(
                    lambda module, arguments, output, name=name: self._ran(name, module, output)
                )
                self.handles.append(module.register_forward_hook(Hook(hook)))
            if drops_elements(module):
                begin = self.safe(
                    lambda module, arguments, name=name: self._draws(name, module, arguments)
                )
                self.handles.append(module.register_forward_pre_hook(Hook(begin)))

    def _draws(self, name: str, module: nn.Module, arguments: Any) -> None:
        """Compare the random numbers that a dropout is about to draw with those that it drew."""
        if not module.training or self.source.quiet or not arguments:
            return
        state = digest_generator(arguments[0])
        if not is_recomputing():
            self.states.setdefault(name, []).append(state)
        elif name in self.states and not any(torch.equal(state, old) for old in self.states[name]):
            self.redrawn.setdefault(name)

    def _ran(self, name: str, module: nn.Module, output: Any) -> None:
        if not module.training or self.source.quiet:
            return
        first = next(
            (
                leaf
                for leaf in tree_leaves(output)
                if isinstance(leaf, Tensor) and leaf.is_floating_point()
            ),
            None,
        )
        if first is None:
            return
        with torch.no_grad():
            sample = sample_tensor(getattr(first, "_local_tensor", first), 32)
        if not is_recomputing():
            self.seen.setdefault(name, []).append(sample)
            return
        self.any = True
        before = [other for other in self.seen.get(name, ()) if other.shape == sample.shape]
        if before and name not in self.odd:
            # The nearest of the step's passes: which one is computed again is not known.
            apart = min(float((sample - other).float().norm()) for other in before)
            size = max(float(sample.float().norm()), 1e-30)
            if apart > TOLERANCE * size:
                self.odd[name] = apart / size

    def local(self, step: int) -> Iterator[TraceFinding]:
        names = list(self.odd or self.redrawn)
        if names:
            layer = naming.layer_of(names[0], self.source.layers)[0]
            what = (
                "the recomputed outputs differ from those of the forward pass by up to "
                f"{max(self.odd.values()):.2g} of their size"
                if self.odd
                else "recomputed with other random numbers than those of the forward pass"
            )
            evidence = f"{few_names(names)}: {what}"
            yield TraceFinding("recompute-differs", step, layer or names[0], evidence)

    def end_step(self) -> None:
        for record in (self.seen, self.odd, self.states, self.redrawn):
            record.clear()
        self.step += 1
        self.close()
        if self.step <= PROBED or (self.any and self.step % EVERY == 0):
            self._watch()
