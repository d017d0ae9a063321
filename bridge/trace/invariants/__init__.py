"""Invariants: properties that hold in every training without faults. They are checked in every
step, so that a fault shows in one run, without a second run to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bridge.trace import naming
from bridge.trace.findings import Findings, TraceFinding
from bridge.trace.gather import gather_tensor, gather_values
from bridge.trace.hook import Hook
from bridge.trace.invariants.causality import Causal
from bridge.trace.invariants.check import NOTHING, Check
from bridge.trace.invariants.copies import Buffers, Calls, Modes, Ties
from bridge.trace.invariants.explained import Explained
from bridge.trace.invariants.gradients import Cleared, Reduced
from bridge.trace.invariants.inputs import Positions, Randomness, Samples
from bridge.trace.invariants.masters import Casts
from bridge.trace.invariants.optimizers import Clipped, Groups, Resumed, Updated
from bridge.trace.invariants.pace import Late, Schedules
from bridge.trace.invariants.progress import Progress
from bridge.trace.invariants.recompute import Recomputed
from bridge.trace.module import ModuleSource
from bridge.trace.sharding import flat_pieces
from bridge.trace.source import Moment
from bridge.trace.step_meeting import Meeting
from bridge.trace.tracer import OUTPUT, Sight

CHECKS: Sequence[type[Check]] = (
    *(
        # Before `Reduced`, which waits for the device: until then, the host is ahead of it.
        Updated,
        Cleared,
        Reduced,
        Groups,
        Resumed,
        Clipped,
        Samples,
        Randomness,
        Positions,
        Buffers,
        Calls,
        Modes,
        Ties,
    ),
    *(Recomputed, Causal, Late, Schedules, Explained, Casts, Progress),
)
POINTS = ("saw", "passing", "end_forward", "backward", "end_step")
ROWS, SAID = "invariants", "findings"


class Passes(Check):
    """Each step has as many forward passes as `accumulation` says, because the loss of each pass
    is divided by this number.
    """

    def local(self, step: int) -> Iterator[TraceFinding]:
        accumulation, passes = self.source.accumulation, self.source.passes
        if (
            accumulation
            and self.source.divides
            and (passes % accumulation or (passes > accumulation and self.source.strict))
        ):
            yield TraceFinding(
                "accumulation-differs",
                step,
                "",
                f"found {passes} passes in a step, expected {accumulation}",
            )


@dataclass
class Invariants:
    """The observer that runs all checks, exchanges their rows of numbers between data ranks, and
    sends findings to all ranks.
    """

    source: ModuleSource
    findings: Findings
    checks: list[Check] = field(default_factory=list)
    _handles: list[Any] = field(default_factory=list)
    _alike: bool = True
    _kept: list[TraceFinding] = field(default_factory=list)
    """Findings of this step that only the ranks of this rank's data group know, until `_tell` sends
    them to all other ranks.
    """
    _sizes: dict[bool, dict[Check, int]] = field(default_factory=dict)
    """For the time before the update (False) and after it (True): the length of each check's row,
    on which all ranks have agreed.
    """
    _calls: dict[str, list[Callable[..., Any]]] = field(default_factory=dict)
    """For each point of a forward pass, such as its beginning: the methods of the checks that are
    called there.
    """
    _said: set[Check] = field(default_factory=set)
    """Checks that failed with an error, and whose failure was reported."""

    def __post_init__(self) -> None:
        self.checks = [kind(self.source) for kind in (*CHECKS, Passes)]
        for name in POINTS:
            self._calls[name] = [
                check.safe(getattr(check, name))
                for check in self.checks
                if getattr(type(check), name) is not getattr(Check, name)
            ]
        self.source.passing.append(self._passing)
        if self.source.comm.mesh.world > 1:
            self.source.meeting = Meeting(self.source.comm, self._report_missing_ranks)
        self._handles += [
            root.register_forward_hook(Hook(self._hook_output)) for root in self.source.roots
        ]

    def _report_missing_ranks(self, name: str, ranks: tuple[int, ...], why: str) -> None:
        """Report that `ranks` did not take a step that other ranks took; `why` is the evidence."""
        self.findings.add([TraceFinding(name, self.source.now().step, "", why, ranks)])

    def wants(self, kind: str) -> bool:
        return kind == OUTPUT

    def saw(self, sight: Sight) -> None:
        self._point("saw", sight)

    def _point(self, name: str, *arguments: Any) -> None:
        for call in self._calls[name]:
            call(*arguments)

    def _passing(self, arguments: Sequence[Any], keywords: Any) -> None:
        self._point("passing", arguments, keywords)

    def _hook_output(self, module: Any, arguments: Any, output: Any) -> None:
        if self.source.quiet:
            return
        self._point("end_forward")
        calls: list[bool] = []

        def begins(gradient: Tensor) -> None:
            # A forward pass may have several outputs; its backward begins once.
            if not calls:
                calls.append(True)
                self._point("backward")

        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(Hook(begins))  # type: ignore[no-untyped-call]

    def reach_moment(self, moment: Moment | None) -> None:
        step = self.source.now().step
        if moment is None:
            self._start()
        elif moment == "reduced":
            self._gather(step, False)
        elif moment == "updated":
            self._gather(step, True)
            self._tell([*self._each("local", step), *self._check_failures(step)])
        else:
            self._point("end_step")

    def _each(self, name: str, *arguments: Any) -> Iterator[TraceFinding]:
        """Call the method `name` of each check, and yield the findings that it returns."""
        for check in self.checks:
            yield from self._ask_check(check, name, *arguments)

    @staticmethod
    def _ask_check(check: Check, name: str, *arguments: Any) -> Sequence[TraceFinding]:
        return check.safe(lambda: list(getattr(check, name)(*arguments)))() or ()

    def _check_failures(self, step: int) -> Iterator[TraceFinding]:
        """Yield a finding for each check that failed with an error since the last call. Such a
        check is not run any more, and the training continues.
        """
        for check in self.checks:
            error = check.error
            if error is None or check in self._said:
                continue
            self._said.add(check)
            check.close()
            evidence = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            yield TraceFinding("check-ended", step, type(check).__name__, evidence)

    def _start(self) -> None:
        flat = flat_pieces(self.source.module)  # whose parts have a shape of their own on each rank
        parameters = naming.parameters_by_name(self.source.module).items()
        own = sorted(
            name if flat else f"{name} {list(weight.shape)}" for name, weight in parameters
        )
        lists = gather_values(self.source.comm, SAID, own, self.source.data)
        self._alike = all(other == lists[0] for other in lists)
        if not self._alike:
            odd = next(name for other in lists for name in sorted(set(other) ^ set(lists[0])))
            self._kept.append(
                TraceFinding(
                    "models-differ",
                    0,
                    odd.partition(" ")[0],
                    "only some data ranks have this parameter",
                )
            )
        self._tell([*self._each("start"), *self._check_failures(0)])

    def _gather(self, step: int, after_update: bool) -> None:
        """Gather the rows of all checks from the data ranks in one collective, and collect the
        findings that each check makes from its rows.
        """
        if not self._alike:
            return
        checks = [check for check in self.checks if not check.over]
        own = {
            check: check.safe(check.later if after_update else check.row)(step) for check in checks
        }
        sizes = {
            check: size
            for check, size in self._row_lengths(after_update, own).items()
            if size and not check.over
        }
        # A row has as many numbers on all ranks: all leave here, or none.
        if not sizes:
            return
        # In front of each row, whether its check failed on this rank.
        payload = [_row_to_send(own[check], size) for check, size in sizes.items()]
        rows = gather_tensor(self.source.comm, ROWS, torch.cat(payload), self.source.data)
        for check, part in zip(
            sizes, torch.split(rows, [len(part) for part in payload], 1), strict=True
        ):
            if bool(part[:, 0].any()):
                self._stop_check(check, part[:, 0])
                continue
            findings = self._ask_check(
                check,
                "judge_rows_after_update" if after_update else "judge_rows",
                step,
                part[:, 1:],
            )
            # All ranks were given the same rows, and found the same in them.
            if self.source.data.size == self.source.comm.world.size:
                self.findings.add(findings)
            else:
                self._kept += findings

    def _row_lengths(
        self, after_update: bool, own: Mapping[Check, Tensor | None]
    ) -> Mapping[Check, int]:
        """Return the length of each check's row. Data ranks exchange the lengths in the first
        step, so that a rank whose check failed knows how many numbers to send.
        """
        if after_update not in self._sizes:
            sizes = torch.tensor([-1 if part is None else len(part) for part in own.values()])
            every = gather_tensor(self.source.comm, ROWS, sizes, self.source.data)
            self._sizes[after_update] = dict(zip(own, every.amax(0).tolist(), strict=True))
            for check, column in zip(own, every.T, strict=True):
                if column.min() < 0:
                    self._stop_check(check, column < 0)
        return self._sizes[after_update]

    def _stop_check(self, check: Check, there: Tensor) -> None:
        """Stop a check on all ranks because it failed on some of them. `there` says for each data
        rank whether it failed there.
        """
        ranks = ", ".join(str(check.at(place)) for place in there.nonzero().view(-1).tolist())
        check.over, check.error = (
            True,
            check.error or RuntimeError(f"the check failed on rank {ranks}"),
        )

    def _tell(self, alone: Iterable[TraceFinding]) -> None:
        """Send the findings that some ranks made to all ranks, and record them. In most steps
        there are no findings, and ranks only tell each other so.
        """
        own, world = (
            [
                *_findings_on_ranks(self._kept, self.source.data.ranks),
                *_findings_on_ranks(alone, (self.source.comm.rank,)),
            ],
            self.source.comm.world,
        )
        self._kept = []
        if not bool(gather_tensor(self.source.comm, SAID, torch.tensor([len(own)]), world).any()):
            return
        records: dict[tuple[str, str], tuple[dict[str, Any], set[int]]] = {}
        for every in gather_values(self.source.comm, SAID, [asdict(one) for one in own], world):
            for one in every:
                records.setdefault((one["id"], one["where"]), (one, set()))[1].update(one["ranks"])
        for one, ranks in records.values():
            few_ranks = tuple(sorted(ranks)) if len(ranks) < world.size else ()
            self.findings.add([TraceFinding(**{**one, "ranks": few_ranks})])

    def close(self) -> None:
        """Remove all hooks."""
        if self.source.meeting is not None:
            self.source.meeting.leave()
        for handle in self._handles:
            handle.remove()
        for check in self.checks:
            check.close()


def _row_to_send(own: Tensor | None, size: int) -> Tensor:
    """Return a row as it is sent to other ranks: first a flag (1 if the check failed on this
    rank), then the numbers of the row, or zeros.
    """
    return torch.cat(
        [torch.tensor([int(own is None)]), NOTHING.new_zeros(size) if own is None else own]
    )


def _findings_on_ranks(
    findings: Iterable[TraceFinding], ranks: Sequence[int]
) -> list[TraceFinding]:
    """Return the findings, with `ranks` for those that name no rank."""
    return [replace(one, ranks=one.ranks or tuple(ranks)) for one in findings]
