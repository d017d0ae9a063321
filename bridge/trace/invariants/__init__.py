"""Invariants: what every training keeps to, held in every step, so that much that is wrong is found in one run alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bridge.trace import naming
from bridge.trace.findings import Finding, Findings
from bridge.trace.gathering import gathered, texts
from bridge.trace.invariants.causality import Causal
from bridge.trace.invariants.check import Check
from bridge.trace.invariants.copies import Buffers, Calls, Ties
from bridge.trace.invariants.explained import Explained
from bridge.trace.invariants.gradients import Cleared, Reduced
from bridge.trace.invariants.inputs import Positions, Randomness, Samples
from bridge.trace.invariants.optimizers import Clipped, Groups, Resumed, Updated
from bridge.trace.invariants.pace import Late, Schedules
from bridge.trace.invariants.recompute import Recomputed
from bridge.trace.meeting import Meeting
from bridge.trace.module import ModuleSource
from bridge.trace.sharding import flat_pieces
from bridge.trace.source import Moment
from bridge.trace.tracer import OUTPUT, Sight

CHECKS: Sequence[type[Check]] = (
    *(
        Cleared,
        Reduced,
        Groups,
        Updated,
        Resumed,
        Clipped,
        Samples,
        Randomness,
        Positions,
        Buffers,
        Calls,
        Ties,
    ),
    *(Recomputed, Causal, Late, Schedules, Explained),
)
ROWS, SAID = "invariants", "findings"


class Passes(Check):
    """A step has as many forward passes as the run was told: by that number it divides its loss."""

    def local(self, step: int) -> Iterator[Finding]:
        told, passes = self.source.accumulation, self.source.passes
        if told and (passes % told or (passes > told and self.source.strict)):
            yield Finding(
                "accumulation-differs", step, "", f"told {told} passes a step, found {passes}"
            )


@dataclass
class Invariants:
    """The observer that asks every check, tells data ranks each other's rows, and all ranks each other's findings."""

    source: ModuleSource
    findings: Findings
    checks: list[Check] = field(default_factory=list)
    _handles: list[Any] = field(default_factory=list)
    _alike: bool = True
    _kept: list[Finding] = field(default_factory=list)
    """What this rank's group of data ranks found in the step, if there are other ranks to tell."""

    def __post_init__(self) -> None:
        self.checks = [kind(self.source) for kind in (*CHECKS, Passes)]
        self.source.passing.append(self._passing)
        # Other ranks than data ranks meet in collectives inside of the model.
        if self.source.comm.mesh.world == self.source.data.size > 1:
            self.source.meeting = Meeting(self.source.comm, self._lost)
        self._handles += [root.register_forward_hook(self._passed) for root in self.source.roots]

    def _lost(self, ranks: tuple[int, ...], why: str) -> None:
        """Ranks did not come to a step."""
        self.findings.add([Finding("skipped-alone", self.source.now().step, "", why, ranks)])

    def wants(self, kind: str) -> bool:
        return kind == OUTPUT

    def saw(self, sight: Sight) -> None:
        for check in self.checks:
            check.saw(sight)

    def _passing(self, given: Sequence[Any], named: Any) -> None:
        for check in self.checks:
            check.passing(given, named)

    def _passed(self, module: Any, given: Any, output: Any) -> None:
        if self.source.quiet:
            return
        for check in self.checks:
            check.passed()
        fired: list[bool] = []

        def begins(gradient: Tensor) -> None:
            # A forward pass may have several outputs; its backward begins once.
            if not fired:
                fired.append(True)
                for check in self.checks:
                    check.backward()

        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(begins)  # type: ignore[no-untyped-call]

    def reached(self, moment: Moment | None) -> None:
        step = self.source.now().step
        if moment is None:
            self._start()
        elif moment == "reduced":
            self._gather(step, False)
        elif moment == "updated":
            self._gather(step, True)
            self._tell(finding for check in self.checks for finding in check.local(step))
        else:
            for check in self.checks:
                check.ended()

    def _start(self) -> None:
        flat = flat_pieces(self.source.module)  # whose parts have a shape of their own on each rank
        named = naming.parameters(self.source.module).items()
        own = sorted(name if flat else f"{name} {list(weight.shape)}" for name, weight in named)
        known = texts(self.source.comm, SAID, own, self.source.data)
        self._alike = all(other == known[0] for other in known)
        if not self._alike:
            odd = next(name for other in known for name in sorted(set(other) ^ set(known[0])))
            self._kept.append(
                Finding("models-differ", 0, odd.partition(" ")[0], "only some data ranks have it")
            )
        self._tell(finding for check in self.checks for finding in check.start())

    def _gather(self, step: int, updated: bool) -> None:
        """Rows of all checks in one call."""
        if not self._alike:
            return
        own = [check.later(step) if updated else check.row(step) for check in self.checks]
        # A row has as many numbers on all ranks: all leave here, or none.
        if not sum(map(len, own)):
            return
        rows = gathered(self.source.comm, ROWS, torch.cat(own), self.source.data)
        parts = torch.split(rows, [len(part) for part in own], 1)
        for check, part in zip(self.checks, parts, strict=True):
            found = check.judged_later(step, part) if updated else check.judged(step, part)
            # All ranks were given the same rows, and found the same in them.
            if self.source.data.size == self.source.comm.world.size:
                self.findings.add(found)
            else:
                self._kept += found

    def _tell(self, alone: Iterator[Finding]) -> None:
        """Tell all ranks what single ranks know, and what groups of data ranks found. In most steps there
        is nothing, and ranks exchange no more than that.
        """
        own, world = (
            [*_on(self._kept, self.source.data.ranks), *_on(alone, (self.source.comm.rank,))],
            self.source.comm.world,
        )
        self._kept = []
        if not bool(gathered(self.source.comm, SAID, torch.tensor([len(own)]), world).any()):
            return
        said: dict[tuple[str, str], tuple[dict[str, Any], set[int]]] = {}
        for every in texts(self.source.comm, SAID, [asdict(one) for one in own], world):
            for one in every:
                said.setdefault((one["id"], one["where"]), (one, set()))[1].update(one["ranks"])
        for one, ranks in said.values():
            told = tuple(sorted(ranks)) if len(ranks) < world.size else ()
            self.findings.add([Finding(**{**one, "ranks": told})])

    def close(self) -> None:
        """Take all hooks out."""
        if self.source.meeting is not None:
            self.source.meeting.leave()
        for handle in (
            *self._handles,
            *(handle for check in self.checks for handle in check.handles),
        ):
            handle.remove()


def _on(found: Iterable[Finding], ranks: Sequence[int]) -> list[Finding]:
    """The same findings, with `ranks` in those that name none."""
    return [replace(one, ranks=one.ranks or tuple(ranks)) for one in found]
