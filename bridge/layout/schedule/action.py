"""Actions and schedules: the work of one rank on one microbatch in one stage, and the actions of
all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple


class ActionKind(StrEnum):
    """Kind of an action. The value is the letter of the kind in torch.distributed.pipelining, or a
    longer name for kinds without a letter there.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    """The half of a backward pass that computes the gradient of the stage's input."""
    WEIGHT = "W"
    """The half of a backward pass that computes the gradients of the stage's weights."""
    AGAIN = "R"
    """Recomputation of a stage's activations as an action of its own, before the backward pass."""
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"
    REDUCE = "REDUCE_GRAD"
    """Reduction of a stage's gradients over data ranks, after the last microbatch has added to
    these gradients.
    """


COMPUTE = frozenset(
    (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT, ActionKind.AGAIN)
)
WRITES = frozenset((ActionKind.BACKWARD, ActionKind.WEIGHT))
"""Kinds of actions that compute gradients of weights."""
DOWN = frozenset((ActionKind.BACKWARD, ActionKind.INPUT))
"""Kinds of actions that compute the gradient of a stage's input, which the stage before needs."""


class Action(NamedTuple):
    """One action of a rank: the stage, the kind of the action, and the microbatch. `microbatch` is
    -1 if the action concerns all microbatches.
    """

    stage: int
    kind: ActionKind
    microbatch: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch if self.microbatch >= 0 else ''}"


Row = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """The actions of each pipeline rank, in order. `homes` has the rank of each stage, in model
    order. `kept` has a pair (stage, microbatch) for each forward pass whose activations are kept
    although recomputation is on.
    """

    name: str
    homes: tuple[int, ...]
    rows: tuple[Row, ...]
    kept: frozenset[tuple[int, int]] = frozenset()

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Number of stages on all ranks."""
        return len(self.homes)

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches in a step."""
        return 1 + max((action.microbatch for row in self.rows for action in row), default=-1)

    def local(self, rank: int) -> tuple[int, ...]:
        """The stages on `rank`, in model order."""
        return self._local.get(rank, ())

    @cached_property
    def _local(self) -> dict[int, tuple[int, ...]]:
        by_rank: dict[int, list[int]] = {}
        for stage, home in enumerate(self.homes):
            by_rank.setdefault(home, []).append(stage)
        return {rank: tuple(stages) for rank, stages in by_rank.items()}

    def split_stages(self, parts: Sequence[int]) -> Schedule:
        """Return this schedule for smaller stages: stage i is divided into `parts[i]` stages on the
        same rank.
        """
        starts = tuple(accumulate(parts, initial=0))
        homes = tuple(
            home for home, number in zip(self.homes, parts, strict=True) for _ in range(number)
        )
        rows = tuple(tuple(_split_actions(row, starts)) for row in self.rows)
        exemptions = frozenset(
            (part, microbatch)
            for stage, microbatch in self.kept
            for part in range(starts[stage], starts[stage + 1])
        )
        return Schedule(self.name, homes, rows, exemptions)


def _split_actions(row: Iterable[Action], starts: Sequence[int]) -> Iterator[Action]:
    for stage, kind, microbatch in row:
        inner = range(starts[stage], starts[stage + 1])
        for part in inner if kind in (ActionKind.FORWARD, ActionKind.AGAIN) else reversed(inner):
            yield Action(part, kind, microbatch)
