"""Invariants of master weights: updates are not lost in the number format of the weights, and reach
the weights that forward uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bridge.trace.findings import Findings, TraceFinding
from bridge.trace.gather import gather_tensor
from bridge.trace.invariants.check import Check, few_names
from bridge.trace.invariants.sketch import sample_tensor, sample_tensors
from bridge.trace.module import SHORT, ModuleSource
from bridge.trace.sharding import local_part
from bridge.trace.source import Held, Moment, TraceSource
from bridge.trace.tracer import Sight


class Casts(Check):
    """16-bit weights that were roundings of their fp32 masters are so in each later step too."""

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.alike: set[str] = set()
        """Names of the weights that were roundings of their masters in an earlier step. Where the
        masters are a script's own, equal values show which master is which weight's.
        """
        self.stale: dict[str, float] = {}
        """By name: by how many units in the last place a weight that forward used differs from its
        master.
        """
        self.changed: dict[str, float] = {}
        """The same, of the weights of which this is so only since forward."""

    def end_forward(self) -> None:
        # What forward used: a script may cast its masters as late as in a hook of this pass.
        if self.source.passes == 1:
            self.stale = self._find_stale()

    def row(self, step: int) -> Tensor:
        stale = self._find_stale() if self.source.passes else {}
        self.changed = {} if self.stale else stale
        return super().row(step)

    def _find_stale(self) -> dict[str, float]:
        stale: dict[str, float] = {}
        pairs = {
            name: tuple(map(local_part, pair))
            for name, pair in self.source.casts().items()
            if pair[0].numel()
        }
        weights, masters = (
            sample_tensors({name: pair[at] for name, pair in pairs.items()}) for at in (0, 1)
        )
        for name, weight in weights.items():
            units = _units_apart(weight, masters[name])
            # The order of a script's masters may be another than that of the weights.
            if units > 1 and self.source.plain:
                alike = (one for one in masters.values() if one.shape == weight.shape)
                units = min(_units_apart(weight, one) for one in alike)
            # Up to one unit: rounding may be to the nearest, or up and down at random.
            if units <= 1 and bool((weight != weight[0]).any()):
                self.alike.add(name)
            # Engines say which master is which weight's.
            elif units > 1 and (name in self.alike or not self.source.plain):
                stale[name] = units
        return stale

    def local(self, step: int) -> Iterator[TraceFinding]:
        for stale, id in ((self.stale, "cast-stale"), (self.changed, "weights-changed")):
            names = list(stale)
            if not names:
                continue
            evidence = (
                f"{len(names)} 16-bit weights are no rounding of their fp32 masters: {few_names(names)}; "
                f"{names[0]} is up to {stale[names[0]]:.2g} units in the last place away"
            )
            evidence += ", but forward used roundings of them" if id != "cast-stale" else ""
            yield TraceFinding(id, step, names[0], evidence)


def _units_apart(weight: Tensor, master: Tensor) -> float:
    """Return by how many units in the last place a 16-bit weight differs from an fp32 master."""
    kind = torch.finfo(weight.dtype)
    size = master.float().abs().clamp(min=kind.tiny) * kind.eps
    return float(((weight.float() - master.float()).abs() / size).nan_to_num().max())


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
            if now.dtype in SHORT and gradient is not None and gradient.shape == now.shape:
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
                    torch.stack([values == values.to(kind).float() for kind in SHORT]).any(0).sum()
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
