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
                _tensor_key(part): sample_tensor(part.local)
                for part in self.source.tensors("gradient")
            }
            weights = (
                (_tensor_key(part), sample_tensor(part.local))
                for part in self.source.tensors("weight")
            )
            self._old = {key: (weight, gradients.get(key)) for key, weight in weights}
        elif moment == "updated":
            findings = list(self._find_coarse_weights(self.source.now().step))
            comm = self.source.comm
            there = gather_tensor(comm, "findings", torch.tensor([len(findings)]), comm.world).view(
                -1
            )
            ranks = tuple(
                rank
                for rank, number in zip(comm.world.ranks, there.tolist(), strict=True)
                if number
            )
            # The first rank writes findings, and may have found nothing itself.
            if ranks and not findings:
                findings = [
                    TraceFinding(
                        "updates-lost",
                        self.source.now().step,
                        "",
                        "sampled weights on other ranks did not change, or lost precision",
                    )
                ]
            self.findings.add(findings)

    def _find_coarse_weights(self, step: int) -> Iterator[TraceFinding]:
        losses = short_total = coarse = fp32_total = 0
        for part in self.source.tensors("weight"):
            old, gradient = self._old.get(_tensor_key(part), (None, None))
            now = sample_tensor(part.local)
            if old is None or old.shape != now.shape or not now.is_floating_point():
                continue
            differs = now != old
            if now.dtype in FORMATS and gradient is not None and gradient.shape == now.shape:
                mask = gradient != 0
                short_total, losses = (
                    short_total + int(mask.sum()),
                    losses + int((mask & ~differs).sum()),
                )
            elif now.dtype == torch.float32 and differs.any():
                values = now[differs]
                fp32_total += len(values)
                # fp32 values that a 16-bit format holds exactly were most likely rounded to it.
                coarse += int(
                    torch.stack([values == values.to(kind).float() for kind in FORMATS])
                    .any(0)
                    .sum()
                )
        if short_total >= 64 and 2 * losses > short_total:
            yield TraceFinding(
                "updates-lost",
                step,
                "",
                f"{losses} of {short_total} sampled 16-bit weights that have a gradient did not change",
            )
        if fp32_total >= 64 and coarse > 0.98 * fp32_total:
            evidence = (
                f"{coarse} of {fp32_total} sampled fp32 weights have only the precision of a 16-bit format "
                "after their update"
            )
            yield TraceFinding("updates-lost", step, "", evidence)


def _tensor_key(part: Held) -> tuple[str, str, int]:
    return part.layer, part.tensor, part.placement.start
