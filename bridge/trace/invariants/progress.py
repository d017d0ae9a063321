"""Invariant of long runs: the loss and the norm of gradients stay near what they were, which is
measured in constant memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bridge.trace import naming
from bridge.trace.findings import TraceFinding
from bridge.trace.invariants.check import Check
from bridge.trace.module import ModuleSource
from bridge.trace.roots import Roots
from bridge.trace.sharding import local_gradient

WINDOW, SPREADS = 100, 5
"""Number of steps with which a step is compared, and by how many times their spread it has to lie
above them to be a spike.
"""
LOSS, NORM = "loss", "gradient norm"
IDS: Mapping[str, str] = {LOSS: "loss-spike", NORM: "gradient-spike"}


class Progress(Check):
    """The loss and the norm of gradients of a step do not lie far above those of all recent steps.

    Both are of this rank: the sum of the losses from which backward passes started, and the norm
    of the gradients or parts of gradients that the rank holds when the optimizer begins to step.
    """

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.roots = Roots()
        self.handles.append(self.roots)
        self.recent = {name: deque[float](maxlen=WINDOW) for name in IDS}
        self.sizes = dict.fromkeys(IDS, 0.0)
        """The largest values of the first steps: what a loss has come down to is rounding beside
        them.
        """
        self.norm: Tensor | None = None

    def row(self, step: int) -> Tensor:
        gradients = [
            gradient
            for weight in naming.parameters_by_name(self.source.module).values()
            if self.source.plain
            and (gradient := local_gradient(weight)) is not None
            and gradient.layout == torch.strided
        ]
        # Fetched after the update: the host would wait for backward here.
        self.norm = torch.nn.utils.get_total_norm(gradients) if gradients else None
        return super().row(step)

    def local(self, step: int) -> Iterator[TraceFinding]:
        found = {LOSS: self.roots.take(), NORM: None if self.norm is None else float(self.norm)}
        self.source.numbers = {name: value for name, value in found.items() if value is not None}
        for name, value in self.source.numbers.items():
            recent = self.recent[name]
            if len(recent) == WINDOW and math.isfinite(value):
                most = max(recent)
                spread = max(most - min(recent), abs(most) / 2, self.sizes[name] / WINDOW)
                if value > most + SPREADS * spread:
                    evidence = f"the {name} is {value:.4g}, and was at most {most:.4g} in the {WINDOW} steps before"
                    yield TraceFinding(IDS[name], step, "", evidence)
            # A loss scale that is found by trial makes some gradients infinite.
            if math.isfinite(value):
                recent.append(value)
                if step <= WINDOW:
                    self.sizes[name] = max(self.sizes[name], abs(value))
