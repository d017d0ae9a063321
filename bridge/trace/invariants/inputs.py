"""Invariants of a pass's inputs: its samples, its random numbers and its positions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bridge.engine.comm import Group
from bridge.trace.digest import digest_tensor
from bridge.trace.findings import Findings, TraceFinding
from bridge.trace.gather import gather_tensor
from bridge.trace.hook import Hook
from bridge.trace.invariants.check import Check
from bridge.trace.module import ModuleSource
from bridge.trace.source import Moment, TraceSource
from bridge.trace.tracer import INPUT, Sight

KEPT = 64
"""Number of passes whose random states are kept for the comparison with later passes."""


def drops_elements(module: nn.Module) -> bool:
    """Return whether a module is a dropout that drops something."""
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


def digest_generator(where: Tensor | None) -> Tensor:
    """Return the digest of the state of torch's random generator on the device of a tensor."""
    if where is not None and where.is_cuda:
        return digest_tensor(torch.cuda.default_generators[where.get_device()].get_state())
    return digest_tensor(torch.get_rng_state())


class Samples(Check):
    """Data ranks get different samples, and no pass gets the samples of another pass in the same
    step or in the step before.
    """

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.seen = 0
        self.passes: list[int] = []
        self.before: list[int] = []

    def passing(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        tensors = [
            leaf
            for leaf in tree_leaves((list(arguments), dict(keywords)))
            if isinstance(leaf, Tensor) and leaf.numel() > 1
        ]
        fed = 0
        for tensor in tensors:
            fed = _add_digest(fed, tensor)
        self.passes += [fed] if tensors else []
        self.seen = (self.seen * 1_000_033 + fed) % (1 << 62)

    def row(self, step: int) -> Tensor:
        return torch.tensor([self.seen, self.source.passes])

    def judge_rows(self, step: int, rows: Tensor) -> Iterator[TraceFinding]:
        yield from _find_same_data(step, rows[:, 0], self.source.data, int(rows[0, 1]))

    def local(self, step: int) -> Iterator[TraceFinding]:
        within = len(self.passes) - len(set(self.passes))
        earlier = len(set(self.passes) & set(self.before))
        if within or earlier:
            evidence = (
                f"of {len(self.passes)} passes, {within} get the samples of another pass of this step, "
                f"and {earlier} those of a pass of the step before"
            )
            yield TraceFinding("data-repeated", step, "", evidence)

    def end_step(self) -> None:
        self.seen, self.before, self.passes = 0, self.passes, []


def _add_digest(digest: int, tensor: Tensor) -> int:
    # Order matters. Below 2^62, it fits the int64 of a row.
    return (digest * 1_000_003 + int(digest_tensor(tensor)[0])) % (1 << 62)


def _find_same_data(step: int, digests: Tensor, data: Group, passes: int) -> Iterator[TraceFinding]:
    """Yield a finding for each set of data ranks that were fed the same tensors. `digests` has a
    number for each data rank; 0 stands for a rank that was fed nothing.
    """
    ranks_by_digest: dict[int, list[int]] = {}
    for rank, digest in zip(data.ranks, digests.tolist(), strict=True):
        ranks_by_digest.setdefault(digest, []).append(rank)
    for digest, ranks in ranks_by_digest.items():
        if digest and len(ranks) > 1:
            evidence = f"ranks {', '.join(map(str, ranks))} got the same tensors in all {passes} passes of the step"
            some = tuple(ranks) if len(ranks) < data.size else ()
            yield TraceFinding("same-data", step, "", evidence, some)


@dataclass
class SampleObserver:
    """The observer that checks whether data ranks of an engine get different samples."""

    source: TraceSource
    findings: Findings
    _fed: int = 0
    _passes: int = 0

    def wants(self, kind: str) -> bool:
        return kind == INPUT

    def saw(self, sight: Sight) -> None:
        """Add an input of the model to the digest of this step."""
        if sight.name.kind == INPUT and not sight.again:
            self._fed = _add_digest(self._fed, sight.tensor)
            self._passes += sight.name.tensor == "0"

    def reach_moment(self, moment: Moment | None) -> None:
        if moment == "reduced":
            data = self.source.comm.group("data")
            own = torch.tensor([self._fed])
            rows = gather_tensor(self.source.comm, "samples", own, data).view(-1)
            step = self.source.now().step
            self.findings.add(_find_same_data(step, rows, data, self._passes))
            self._fed = self._passes = 0


class Randomness(Check):
    """No two passes of a rank that drop elements begin with the same random state, and data ranks
    begin a step with different random states.
    """

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.drops = any(drops_elements(part) for part in source.model.modules())
        self.states: deque[int] = deque(maxlen=KEPT)
        self.begun = self.first = 0
        self.used = False
        self.repeated = 0

    def _state(self) -> int:
        return int(digest_generator(next(self.source.model.parameters(), None))[0])

    def passing(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        if self.drops:
            self.begun = self._state()
            self.first = self.first or self.begun

    def end_forward(self) -> None:
        # A pass that drew no number leaves its state to the next one, which is right.
        if self.drops and self._state() != self.begun:
            self.used = True
            if self.begun in self.states:
                self.repeated += 1
            self.states.append(self.begun)

    def row(self, step: int) -> Tensor:
        return torch.tensor([self.first if self.used else 0, self.repeated])

    def judge_rows(self, step: int, rows: Tensor) -> Iterator[TraceFinding]:
        states, repeats = rows.T
        if repeats.any():
            ranks = tuple(self.at(place) for place in repeats.nonzero().view(-1).tolist())
            evidence = (
                f"{int(repeats.max())} passes of the step began with the random state of an "
                "earlier pass"
            )
            yield TraceFinding(
                "dropout-repeated", step, "", evidence, ranks if len(ranks) < len(rows) else ()
            )
        if len(rows) > 1 and states.all() and len(set(states.tolist())) < len(rows):
            yield TraceFinding(
                "dropout-alike",
                step,
                "",
                f"{len(rows)} data ranks have only {len(set(states.tolist()))} different random "
                "states",
            )

    def end_step(self) -> None:
        self.first = self.repeated = 0
        self.used = False


class Positions(Check):
    """If an embedding receives consecutive numbers, taken for positions, they begin with the same
    number in every pass.
    """

    def __init__(self, source: ModuleSource) -> None:
        super().__init__(source)
        self.starts: dict[str, int | None] = {}
        """The number with which the positions of each embedding begin; None if the embedding
        receives something else than positions.
        """
        self.times: dict[str, int] = {}
        self.moved: dict[str, str] = {}
        for name, module in source.model.named_modules():
            if isinstance(module, nn.Embedding) and not source.hidden:
                hook = self.safe(
                    lambda module, arguments, name=name: self._record_start(name, module, arguments)
                )
                self.handles.append(module.register_forward_pre_hook(Hook(hook)))

    def _record_start(self, name: str, module: nn.Module, arguments: Any) -> None:
        if (
            not (module.training and arguments and isinstance(arguments[0], Tensor))
            or self.source.quiet
            or name in self.moved
        ):
            return
        numbers = arguments[0].detach()
        # Two numbers follow each other by chance.
        if numbers.dim() < 1 or numbers.shape[-1] < 3:
            return
        row = numbers.reshape(-1, numbers.shape[-1])[0]
        start = int(row[0]) if bool((row[1:] - row[:-1] == 1).all()) else None
        first = self.starts.setdefault(name, start)
        self.times[name] = self.times.get(name, 0) + 1
        if first is not None and start is None:
            self.starts[name] = None
        elif first is not None and start != first:
            self.moved[name] = (
                f"the positions begin with {start}, and began with {first} in the {self.times[name] - 1} passes before"
            )

    def local(self, step: int) -> Iterator[TraceFinding]:
        for name, evidence in self.moved.items():
            if self.starts.get(name) is not None:
                yield TraceFinding("positions-moved", step, name, evidence)
