"""Invariant of engines that keep master weights: updates are not lost in the number format of
these weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bridge.trace.findings import Findings, TraceFinding
from bridge.trace.gather import gather_tensor
from bridge.trace.invariants.sketch import sample_tensor
from bridge.trace.source import Held, Moment, TraceSource
from bridge.trace.tracer import Sight

FORMATS = (torch.bfloat16, torch.float16)


@dataclass
class Masters:
    """The observer that checks whether updates of weights are lost in rounding. It serves engines
    whose weights can be read without communication between ranks.
    """

    source: TraceSource
    findings: Findings
    _old: dict[tuple[str, str, int], tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    def wants(self, kind: str) -> bool:
        return False

    def saw(self, sight: Sight) -> None:
        """Ignore activations."""

    def reach_moment(self, moment: Moment | None) -> None:
        if moment == "reduced":
            gradients = {
                _tensor_key(held): sample_tensor(held.local)
                for held in self.source.tensors("gradient")
            }
            weights = (
                (_tensor_key(held), sample_tensor(held.local))
                for held in self.source.tensors("weight")
            )
            self._old = {key: (weight, gradients.get(key)) for key, weight in weights}
        elif moment == "updated":
            found = list(self._find_coarse_weights(self.source.now().step))
            comm = self.source.comm
            there = gather_tensor(comm, "findings", torch.tensor([len(found)]), comm.world).view(-1)
            ranks = tuple(
                rank
                for rank, number in zip(comm.world.ranks, there.tolist(), strict=True)
                if number
            )
            # The first rank writes findings, and may have found nothing itself.
            if ranks and not found:
                found = [
                    TraceFinding(
                        "updates-lost",
                        self.source.now().step,
                        "",
                        "sampled weights on other ranks did not change, or lost precision",
                    )
                ]
            self.findings.add(found)

    def _find_coarse_weights(self, step: int) -> Iterator[TraceFinding]:
        lost = seen = coarse = moved = 0
        for held in self.source.tensors("weight"):
            old, gradient = self._old.get(_tensor_key(held), (None, None))
            now = sample_tensor(held.local)
            if old is None or old.shape != now.shape or not now.is_floating_point():
                continue
            changed = now != old
            if now.dtype in FORMATS and gradient is not None and gradient.shape == now.shape:
                wanted = gradient != 0
                seen, lost = seen + int(wanted.sum()), lost + int((wanted & ~changed).sum())
            elif now.dtype == torch.float32 and changed.any():
                values = now[changed]
                moved += len(values)
                # fp32 values that a 16-bit format holds exactly were most likely rounded to it.
                coarse += int(
                    torch.stack([values == values.to(kind).float() for kind in FORMATS])
                    .any(0)
                    .sum()
                )
        if seen >= 64 and 2 * lost > seen:
            yield TraceFinding(
                "updates-lost",
                step,
                "",
                f"{lost} of {seen} sampled 16-bit weights that have a gradient did not change",
            )
        if moved >= 64 and coarse > 0.98 * moved:
            told = (
                f"{coarse} of {moved} sampled fp32 weights have only the precision of a 16-bit format "
                "after their update"
            )
            yield TraceFinding("updates-lost", step, "", told)


def _tensor_key(held: Held) -> tuple[str, str, int]:
    return held.layer, held.tensor, held.placement.start
