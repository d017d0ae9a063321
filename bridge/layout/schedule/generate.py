"""Generators: schedules by name, as functions of ranks, stages on a rank and microbatches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from bridge import limits
from bridge.errors import ConfigError
from bridge.layout.schedule.action import Action, Kind, Row, Schedule

F, B, I, W, R = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT, Kind.AGAIN  # noqa: E741 - torch's letters


@dataclass(frozen=True, slots=True)
class Shape:
    """What a schedule is made for: pipeline ranks, stages in all, microbatches.

    `group` microbatches pass one stage of a rank before its next stage runs (None: as many as ranks); `rounds` is the number
    of parts that the microbatches are cut into where a schedule finishes one before it begins the next. `short`: fewer
    microbatches than ranks, which leave most ranks idle, are taken too.
    """

    ranks: int
    stages: int
    microbatches: int
    group: int | None = None
    rounds: int = 1
    short: bool = False

    @property
    def virtual(self) -> int:
        """The most stages on a rank."""
        return -(-self.stages // self.ranks)


def contiguous(shape: Shape) -> tuple[int, ...]:
    """Ranks of stages: neighbours lie together, longer runs first."""
    size, longer = divmod(shape.stages, shape.ranks)
    return tuple(rank for rank in range(shape.ranks) for _ in range(size + (rank < longer)))


def looped(shape: Shape) -> tuple[int, ...]:
    """Ranks of stages: each next stage on the next rank, around and around."""
    return tuple(stage % shape.ranks for stage in range(shape.stages))


def in_a_v(shape: Shape) -> tuple[int, ...]:
    """Ranks of stages: up and down again, so that the first rank also has the last stage."""
    there_and_back = (*range(shape.ranks), *reversed(range(shape.ranks)))
    return tuple(there_and_back[stage % len(there_and_back)] for stage in range(shape.stages))


Make = Callable[[Shape, int, Sequence[int]], Iterable[Action]]
"""From the shape, a rank and its stages in model order, what that rank does."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a schedule is made, where its stages lie, and how many a rank may have (at least, at most)."""

    make: Make
    place: Callable[[Shape], tuple[int, ...]]
    least: int = 1
    most: float = inf
    kept: Callable[[Shape], Iterable[tuple[int, int]]] = lambda shape: ()
    microbatches: int = 1
    about: str = ""


def generate(name: str, shape: Shape) -> Schedule:
    """The schedule `name` for `shape`. Raises `ConfigError` that says what to change if it does not fit."""
    recipe = SCHEDULES[name]
    check_size(shape.stages, shape.microbatches)
    ConfigError.raise_if(problems(name, shape))
    homes = recipe.place(shape)
    local = [[stage for stage, home in enumerate(homes) if home == rank] for rank in range(shape.ranks)]
    rows = tuple(tuple(recipe.make(shape, rank, local[rank])) for rank in range(shape.ranks))
    return Schedule(name, homes, rows, frozenset(recipe.kept(shape)))


def check_size(stages: int, microbatches: int) -> None:
    """Refuse what would take for ever to write down. Raises `ConfigError`."""
    if 2 * stages * microbatches > limits.ACTIONS:
        found = f"{microbatches:,} microbatches through {stages:,} stages"
        raise ConfigError(f"batch.accumulation: found {found}, expected at most {limits.ACTIONS:,} passes in a step; use fewer")


def problems(name: str, shape: Shape) -> Iterator[str]:
    """Why the schedule `name` cannot be made for `shape`, and what to change."""
    recipe, ranks, stages, number = SCHEDULES[name], shape.ranks, shape.stages, shape.microbatches
    if stages < ranks:
        yield f"parallel.pipeline: {ranks} ranks for {stages} stages; use at most {stages} ranks, or more layers"
    elif shape.virtual < recipe.least or shape.virtual > recipe.most:
        wanted = f"{recipe.least}" if recipe.most == recipe.least else f"at least {recipe.least}"
        yield f"schedule.virtual: found {shape.virtual} stages on a rank, but {name} runs {wanted}; set schedule.virtual"
    if number < ranks and not shape.short:
        yield f"batch.accumulation: {number} microbatches for {ranks} pipeline ranks; use at least {ranks}, or fewer ranks"
    elif number < recipe.microbatches:
        yield f"batch.accumulation: {number} microbatches, but {name} needs at least {recipe.microbatches}; use more"
    if number % shape.rounds:
        yield f"schedule.depth_first: {shape.rounds} does not divide the {number} microbatches of a step; use a divisor"
    if recipe.make in (_interleaved, _zero_bubble):
        yield from _group_problems(shape)


def _group_problems(shape: Shape) -> Iterator[str]:
    """Megatron's bounds (schedules.py, forward_backward_pipelining_with_interleaving); within them no rank waits for ever."""
    group, ranks, number = shape.group or shape.ranks, shape.ranks, shape.microbatches
    if shape.virtual == 1:
        return
    if shape.stages % ranks:
        yield f"stages: {stages_of(shape)} do not divide over {ranks} pipeline ranks; make them a multiple"
    if not ranks <= group <= number:
        yield f"schedule.group: found {group}, expected {ranks} (pipeline ranks) to {number} (microbatches)"
    elif 0 < number % group < ranks:
        yield (
            f"schedule.group: {number} microbatches leave a last group of {number % group} after groups of {group}, fewer than"
            f" the {ranks} pipeline ranks; change batch.accumulation or schedule.group"
        )


def stages_of(shape: Shape) -> str:
    """The number of stages in words."""
    return f"{shape.stages} stages"


def _all_forward(shape: Shape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    """Round by round: each stage takes all microbatches of the round forward, then each takes them backward."""
    size = shape.microbatches // shape.rounds
    for start in range(0, shape.microbatches, size):
        yield from (Action(stage, F, start + index) for stage in local for index in range(size))
        yield from (Action(stage, B, start + index) for stage in reversed(local) for index in range(size))


def _depth_first(shape: Shape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    """Each microbatch forward and backward before the next begins."""
    return _all_forward(replace(shape, rounds=shape.microbatches), rank, local)


def _interleaved(shape: Shape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    """Forward alone while the pipeline fills, one forward and one backward in turn, backward alone while it drains.

    As many forwards come first as Megatron's get_pp_rank_microbatches says.
    """
    forward, backward = _order(shape, local, F), _order(shape, local[::-1], B)
    hops, group = shape.ranks - 1 - rank, shape.group or shape.ranks
    first = min(len(forward), hops * (2 if len(local) > 1 else 1) + (len(local) - 1) * group)
    yield from forward[:first]
    for ahead, behind in zip(forward[first:], backward, strict=False):
        yield from (ahead, behind)
    yield from backward[len(forward) - first :]


def _order(shape: Shape, local: Sequence[int], kind: Kind) -> list[Action]:
    """Groups of microbatches pass one stage of a rank after the other (Megatron's get_schedule_table)."""
    group, number = shape.group or shape.ranks, shape.microbatches
    starts = range(0, number, group)
    return [
        Action(stage, kind, index) for start in starts for stage in local for index in range(start, min(start + group, number))
    ]


def _zero_bubble(shape: Shape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    """Input gradients as early as can be; weight gradients `rank` actions later, where the rank would be idle.

    The first schedule of Qi et al. (arXiv 2401.10241) with several stages on a rank, as torch's InterleavedZeroBubble runs it.
    """
    forward, backward = _order(shape, local, F), _order(shape, local[::-1], I)
    group = shape.group or shape.ranks
    first = min(len(forward), shape.ranks - 1 - rank + (len(local) - 1) * group)
    yield from forward[:first]
    ahead = iter(forward[first:])
    for place, action in enumerate(backward):
        yield from (found for found in (next(ahead, None),) if found is not None)
        yield action
        if place >= rank:
            yield _weights(backward[place - rank])
    yield from map(_weights, backward[max(0, len(backward) - rank) :])


def _weights(action: Action) -> Action:
    return Action(action.stage, W, action.microbatch)


def _zero_bubble_v(shape: Shape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    """Two stages on a rank in the shape of a V, so that the last stage's gradient is on the first rank at once.

    The V schedule of Qi et al., as torch's ZBVZeroBubble runs it; it is made for enough microbatches to fill the pipeline,
    of which those beyond the real ones are left out.
    """
    enough = replace(shape, microbatches=max(2 * shape.ranks - 1, shape.microbatches))
    return (action for action in _filled_v(enough, rank, local) if action.microbatch < shape.microbatches)


def _filled_v(shape: Shape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    near, far = (_Counter(stage) for stage in local)
    hops, number = shape.ranks - rank, shape.microbatches
    yield from (near(F) for _ in range(2 * hops - 1))
    for _ in range(rank):
        yield from (far(F), near(F))
    for _ in range(hops):
        yield from (far(F), far(I), far(W))
    while far.done(F) < number:
        if near.done(F) < number:
            yield near(F)
        yield from (near(I), near(W), far(F), far(I), far(W))
    for _ in range(rank):
        yield from (near(I), far(I))
    for _ in range(hops):
        yield from (near(I), near(W))
    for counter in (far, near):
        yield from (counter(W) for _ in range(counter.done(I) - counter.done(W)))


class _Counter:
    """Hands out a stage's actions, each kind for one microbatch after the other."""

    def __init__(self, stage: int) -> None:
        self.stage, self._next = stage, dict.fromkeys((F, I, W), 0)

    def __call__(self, kind: Kind) -> Action:
        self._next[kind] += 1
        return Action(self.stage, kind, self._next[kind] - 1)

    def done(self, kind: Kind) -> int:
        """Actions of `kind` so far."""
        return self._next[kind]


def _pre_recompute(shape: Shape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    """1F1B whose last backward passes, while the pipeline drains, compute again before their gradient arrives."""
    draining = range(shape.microbatches - (shape.ranks - 1 - rank), shape.microbatches)
    return _ahead(_interleaved(shape, rank, local), draining)


def _last_no_recompute(shape: Shape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    """The same, where the last rank keeps its activations, and the one before it computes its first microbatch ahead."""
    if rank == shape.ranks - 2:
        return _ahead(_interleaved(shape, rank, local), (0,))
    return _pre_recompute(shape, rank, local)


def _shifted_critical_path(shape: Shape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    """The same, where the rank before the last runs its third forward before its first backward, so that the last never waits."""
    if rank == shape.ranks - 2:
        row = list(_interleaved(shape, rank, local))
        row[2], row[3] = row[3], row[2]
        return _ahead(row, (0, 1))
    if rank == shape.ranks - 3:
        draining = range(shape.microbatches - (shape.ranks - 1 - rank), shape.microbatches)
        return _ahead(_interleaved(shape, rank, local), (0, *draining))
    return _pre_recompute(shape, rank, local)


def _ahead(row: Iterable[Action], microbatches: Iterable[int]) -> Iterator[Action]:
    """`row`, with the forward pass of `microbatches` once more just before their backward."""
    chosen = frozenset(microbatches)
    for action in row:
        if action.kind is B and action.microbatch in chosen:
            yield Action(action.stage, R, action.microbatch)
        yield action


def _last_stage(shape: Shape) -> Iterator[tuple[int, int]]:
    return ((shape.stages - 1, microbatch) for microbatch in range(shape.microbatches))


def partly_kept(schedule: Schedule, number: int) -> Schedule:
    """`schedule` where, of the microbatches in flight on a rank at a time, the first `number` keep all activations.

    Megatron's num_microbatches_with_partial_activation_checkpoints: the i-th forward of a rank keeps its activations if
    i modulo the forwards that come before the first backward is below `number`.
    """
    kept = frozenset(pair for row in schedule.rows for pair in _kept_in(row, number))
    return replace(schedule, kept=schedule.kept | kept)


def _kept_in(row: Row, number: int) -> Iterator[tuple[int, int]]:
    window = next((place for place, action in enumerate(row) if action.kind in (B, I)), len(row))
    forward = deque(action for action in row if action.kind is F)
    return ((action.stage, action.microbatch) for place, action in enumerate(forward) if place % max(window, 1) < number)


SCHEDULES: Mapping[str, Recipe] = {
    "depth_first": Recipe(_depth_first, looped, about="one microbatch after the other, forward and backward"),
    "breadth_first": Recipe(_all_forward, looped, about="all microbatches forward stage by stage, then backward"),
    "gpipe": Recipe(_all_forward, contiguous, most=1, about="all microbatches forward, then all backward"),
    "1f1b": Recipe(_interleaved, contiguous, most=1, about="one forward, one backward once the pipeline is full"),
    "interleaved_1f1b": Recipe(_interleaved, looped, least=2, about="1F1B over several stages on a rank"),
    "looped_bfs": Recipe(_all_forward, looped, about="breadth first over several stages on a rank"),
    "zero_bubble": Recipe(_zero_bubble, looped, about="input gradients early, weight gradients where a rank would be idle"),
    "zero_bubble_v": Recipe(_zero_bubble_v, in_a_v, 2, 2, about="the same on two stages a rank, placed as a V"),
    "pre_recompute_1f1b": Recipe(_pre_recompute, contiguous, most=1, about="1F1B that computes again while it waits"),
    "last_no_recompute_1f1b": Recipe(
        _last_no_recompute, contiguous, most=1, kept=_last_stage, about="the same, and the last rank keeps its activations"
    ),
    "shifted_critical_path": Recipe(
        _shifted_critical_path, contiguous, most=1, kept=_last_stage, microbatches=4, about="the same, with one forward earlier"
    ),
}
"""Every schedule by name."""
