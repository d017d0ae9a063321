"""Generators: builds each named schedule for a number of ranks, of stages on a rank, and of
microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from bridge import limits
from bridge.errors import ConfigError
from bridge.layout.schedule.action import Action, ActionKind, Schedule

F, B, I, W, R = (  # noqa: E741
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT,
    ActionKind.WEIGHT,
    ActionKind.AGAIN,
)


@dataclass(frozen=True, slots=True)
class ScheduleShape:
    """Sizes for a schedule: pipeline ranks, stages on all ranks, and microbatches.

    `group` is the number of microbatches that pass one stage of a rank before the rank's next stage
    runs (None: as many as there are ranks). Some schedules divide the microbatches into `rounds`
    and finish one round before the next. With `short`, there may be fewer microbatches than ranks,
    although some ranks are then mostly idle.
    """

    ranks: int
    stages: int
    microbatches: int
    group: int | None = None
    rounds: int = 1
    short: bool = False

    @property
    def virtual(self) -> int:
        """The largest number of stages on a rank."""
        return -(-self.stages // self.ranks)


def contiguous_ranks(shape: ScheduleShape) -> tuple[int, ...]:
    """Return the rank of each stage, such that neighbouring stages are on the same rank. If the
    stages do not divide evenly, each of the first ranks has one stage more.
    """
    size, longer = divmod(shape.stages, shape.ranks)
    return tuple(
        rank for rank in range(shape.ranks) for _ in range(size + 1 if rank < longer else size)
    )


def loop_stages(shape: ScheduleShape) -> tuple[int, ...]:
    """Return the rank of each stage, such that each stage is on the rank after the previous stage's
    rank. Rank 0 comes after the last rank.
    """
    return tuple(stage % shape.ranks for stage in range(shape.stages))


def in_a_v(shape: ScheduleShape) -> tuple[int, ...]:
    """Return the rank of each stage, such that the stages pass from rank 0 to the last rank and
    back to rank 0.
    """
    there_and_back = (*range(shape.ranks), *reversed(range(shape.ranks)))
    return tuple(there_and_back[stage % len(there_and_back)] for stage in range(shape.stages))


Make = Callable[[ScheduleShape, int, Sequence[int]], Iterable[Action]]
"""Type of a function that returns the actions of a rank. Arguments are the sizes, the rank, and the
stages on this rank in model order.
"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Description of a named schedule. `make` returns the actions of a rank, and `place` the rank
    of each stage. `least` and `most` limit the number of stages on a rank. `kept` returns the pairs
    (stage, microbatch) that keep their activations.
    """

    make: Make
    place: Callable[[ScheduleShape], tuple[int, ...]]
    least: int = 1
    most: float = inf
    kept: Callable[[ScheduleShape], Iterable[tuple[int, int]]] = lambda shape: ()
    microbatches: int = 1
    about: str = ""


def generate_schedule(name: str, shape: ScheduleShape) -> Schedule:
    """Return the schedule `name` for these sizes. Raises `ConfigError` if the schedule does not fit
    the sizes; the message says what to change.
    """
    recipe = SCHEDULES[name]
    check_size(shape.stages, shape.microbatches)
    ConfigError.raise_if(schedule_problems(name, shape))
    homes = recipe.place(shape)
    local = [
        [stage for stage, home in enumerate(homes) if home == rank] for rank in range(shape.ranks)
    ]
    rows = tuple(tuple(recipe.make(shape, rank, local[rank])) for rank in range(shape.ranks))
    return Schedule(name, homes, rows, frozenset(recipe.kept(shape)))


def check_size(stages: int, microbatches: int) -> None:
    """Raise `ConfigError` if a schedule has too many actions to build."""
    if 2 * stages * microbatches > limits.ACTIONS:
        size = f"{microbatches:,} microbatches through {stages:,} stages"
        raise ConfigError(
            f"batch.accumulation: found {size}, expected at most {limits.ACTIONS:,} passes in a step; use fewer"
        )


def schedule_problems(name: str, shape: ScheduleShape) -> Iterator[str]:
    """Yield the reasons why the schedule `name` does not fit `shape`, each with the setting to
    change.
    """
    recipe, ranks, stages, number = SCHEDULES[name], shape.ranks, shape.stages, shape.microbatches
    if stages < ranks:
        yield f"parallel.pipeline: found {ranks} ranks, but only {stages} stages; use at most {stages} ranks, or more layers"
    elif shape.virtual < recipe.least or shape.virtual > recipe.most:
        range_text = (
            f"{recipe.least}" if recipe.most == recipe.least else f"at least {recipe.least}"
        )
        yield (
            f"schedule.virtual: found {shape.virtual} stages on a rank,"
            f" but schedule {name} needs {range_text};"
            " change schedule.virtual"
        )
    if number < ranks and not shape.short:
        yield (
            f"batch.accumulation: found {number} microbatches, but {ranks} pipeline ranks;"
            f" use at least {ranks} microbatches, or fewer ranks"
        )
    elif number < recipe.microbatches:
        yield (
            f"batch.accumulation: found {number} microbatches,"
            f" but schedule {name} needs at least {recipe.microbatches};"
            " use more"
        )
    if number % shape.rounds:
        yield (
            f"schedule.depth_first: found {shape.rounds},"
            f" which does not divide the {number} microbatches of a step; use a divisor"
        )
    if recipe.make in (_interleave_actions, _zero_bubble):
        yield from _group_problems(shape)


def _group_problems(shape: ScheduleShape) -> Iterator[str]:
    """Yield a problem for each size with which the groups of microbatches could deadlock. The
    limits are those of Megatron's forward_backward_pipelining_with_interleaving.
    """
    group, ranks, number = shape.group or shape.ranks, shape.ranks, shape.microbatches
    if shape.virtual == 1:
        return
    if shape.stages % ranks:
        yield f"stages: {stages_of(shape)} do not divide evenly over {ranks} pipeline ranks; use a multiple of {ranks}"
    if not ranks <= group <= number:
        yield f"schedule.group: found {group}, expected {ranks} (pipeline ranks) to {number} (microbatches)"
    elif 0 < number % group < ranks:
        yield (
            f"schedule.group: {number} microbatches in groups of {group} leave {number % group} for the last group, which needs"
            f" at least {ranks}, one for each pipeline rank; change batch.accumulation or schedule.group"
        )


def stages_of(shape: ScheduleShape) -> str:
    """Return the number of stages with the word "stages", for messages."""
    return f"{shape.stages} stages"


def _all_forward(shape: ScheduleShape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    """Yield a rank's actions for breadth first: in each round, every stage runs all microbatches of
    the round forward, and then every stage runs them backward.
    """
    size = shape.microbatches // shape.rounds
    for start in range(0, shape.microbatches, size):
        yield from (Action(stage, F, start + index) for stage in local for index in range(size))
        yield from (
            Action(stage, B, start + index) for stage in reversed(local) for index in range(size)
        )


def _depth_first(shape: ScheduleShape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    """Return a rank's actions for depth first: a microbatch runs forward and backward through all
    stages before the next microbatch starts.
    """
    return _all_forward(replace(shape, rounds=shape.microbatches), rank, local)


def _interleave_actions(shape: ScheduleShape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    """Yield a rank's actions for 1F1B: warmup with forward only, then one forward and one backward
    in turn, then cooldown with backward only.

    The warmup has as many actions as in Megatron's get_pp_rank_microbatches.
    """
    forward, backward = _action_order(shape, local, F), _action_order(shape, local[::-1], B)
    hops, group = shape.ranks - 1 - rank, shape.group or shape.ranks
    # With several stages on a rank, Megatron runs two more warmup forwards for each rank behind, not one.
    first = min(len(forward), hops * (2 if len(local) > 1 else 1) + (len(local) - 1) * group)
    yield from forward[:first]
    for ahead, behind in zip(forward[first:], backward, strict=False):
        yield from (ahead, behind)
    yield from backward[len(forward) - first :]


def _action_order(shape: ScheduleShape, local: Sequence[int], kind: ActionKind) -> list[Action]:
    """Return a rank's actions of one `kind`, in order: a group of microbatches passes all stages of
    the rank before the next group (Megatron's get_schedule_table).
    """
    group, number = shape.group or shape.ranks, shape.microbatches
    starts = range(0, number, group)
    return [
        Action(stage, kind, index)
        for start in starts
        for stage in local
        for index in range(start, min(start + group, number))
    ]


def _zero_bubble(shape: ScheduleShape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    """Yield a rank's actions for zero bubble: gradients of inputs are computed as early as
    possible, and gradients of weights `rank` backward actions later, when the rank would otherwise
    be idle.

    This is the first schedule of Qi et al. (arXiv 2401.10241) with several stages on a rank, as
    torch's InterleavedZeroBubble runs it.
    """
    forward, backward = _action_order(shape, local, F), _action_order(shape, local[::-1], I)
    group = shape.group or shape.ranks
    # One warmup forward for each rank behind, where interleaved 1F1B has two (torch's
    # `_get_warmup_ops` with a factor of 1).
    first = min(len(forward), shape.ranks - 1 - rank + (len(local) - 1) * group)
    yield from forward[:first]
    ahead = iter(forward[first:])
    for place, action in enumerate(backward):
        if (next_forward := next(ahead, None)) is not None:
            yield next_forward
        yield action
        if place >= rank:
            yield _weight_action(backward[place - rank])
    yield from map(_weight_action, backward[max(0, len(backward) - rank) :])


def _weight_action(action: Action) -> Action:
    return Action(action.stage, W, action.microbatch)


def _zero_bubble_v(shape: ScheduleShape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    """Return a rank's actions for zero bubble with two stages on each rank, placed as a V. The last
    stage is on rank 0, as is the first one.

    This is the V schedule of Qi et al., as torch's ZBVZeroBubble runs it. If there are too few
    microbatches to fill the pipeline, the schedule is built for more, and the actions of the
    surplus microbatches are left out.
    """
    enough = replace(shape, microbatches=max(2 * shape.ranks - 1, shape.microbatches))
    return (
        action for action in _fill_v(enough, rank, local) if action.microbatch < shape.microbatches
    )


def _fill_v(shape: ScheduleShape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    """Yield a rank's actions for the V schedule with at least 2 x ranks - 1 microbatches. `near` is
    the rank's stage in the first half of the model, `far` the rank's stage in the second half.
    """
    near, far = (_Counter(stage) for stage in local)
    hops, number = shape.ranks - rank, shape.microbatches
    # Until the first micro batch has passed the ranks behind, up and down again, only `near` can run: 2 x hops - 1 times.
    yield from (near(F) for _ in range(2 * hops - 1))
    # Both directions run forward until the gradient of the first micro batch arrives from the ranks before.
    for _ in range(rank):
        yield from (far(F), near(F))
    # The gradient of `far` is here, that of `near` still has to pass the ranks behind.
    for _ in range(hops):
        yield from (far(F), far(I), far(W))
    # Steady state: one forward and one backward of both stages, until no forward is left.
    while far.count_of(F) < number:
        if near.count_of(F) < number:
            yield near(F)
        yield from (near(I), near(W), far(F), far(I), far(W))
    # Other ranks now wait for input gradients, so these come first and most weight gradients at the end.
    for _ in range(rank):
        yield from (near(I), far(I))
    for _ in range(hops):
        yield from (near(I), near(W))
    for counter in (far, near):
        yield from (counter(W) for _ in range(counter.count_of(I) - counter.count_of(W)))


class _Counter:
    """Makes the actions of one stage. Each call with a kind returns the action of this kind for the
    next microbatch, starting with microbatch 0.
    """

    def __init__(self, stage: int) -> None:
        self.stage, self._next = stage, dict.fromkeys((F, I, W), 0)

    def __call__(self, kind: ActionKind) -> Action:
        self._next[kind] += 1
        return Action(self.stage, kind, self._next[kind] - 1)

    def count_of(self, kind: ActionKind) -> int:
        """Return the number of actions of `kind` made so far."""
        return self._next[kind]


def _pre_recompute(shape: ScheduleShape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    """Return a rank's actions for 1F1B in which, during cooldown, a stage is recomputed before the
    gradient arrives.
    """
    # As many passes as there are ranks behind; before each of them the rank waits for a gradient.
    draining = range(shape.microbatches - (shape.ranks - 1 - rank), shape.microbatches)
    return _recompute_ahead(_interleave_actions(shape, rank, local), draining)


def _last_no_recompute(shape: ScheduleShape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    """Return a rank's actions for 1F1B in which stages are recomputed before the gradient arrives.

    The last rank recomputes nothing, because it keeps all activations. The second-to-last
    rank recomputes only microbatch 0 before the gradient arrives.
    """
    if rank == shape.ranks - 2:
        return _recompute_ahead(_interleave_actions(shape, rank, local), (0,))
    return _pre_recompute(shape, rank, local)


def _shift_critical_path(shape: ScheduleShape, rank: int, local: Sequence[int]) -> Iterator[Action]:
    """Return a rank's actions as in `_last_no_recompute`, with two changes. The second-to-last
    rank runs its third forward before its first backward, so that the last rank never waits. This
    rank, and the rank before it, recompute one microbatch more before the gradient arrives.
    """
    if rank == shape.ranks - 2:
        row = list(_interleave_actions(shape, rank, local))
        # 1F1B begins here with F0 F1 B0 F2.
        row[2], row[3] = row[3], row[2]
        return _recompute_ahead(row, (0, 1))
    if rank == shape.ranks - 3:
        draining = range(shape.microbatches - (shape.ranks - 1 - rank), shape.microbatches)
        return _recompute_ahead(_interleave_actions(shape, rank, local), (0, *draining))
    return _pre_recompute(shape, rank, local)


def _recompute_ahead(row: Iterable[Action], microbatches: Iterable[int]) -> Iterator[Action]:
    """Yield the actions of `row`, with a recomputation directly before the backward pass of each of
    `microbatches`.
    """
    chosen = frozenset(microbatches)
    for action in row:
        if action.kind is B and action.microbatch in chosen:
            yield Action(action.stage, R, action.microbatch)
        yield action


def _last_stage(shape: ScheduleShape) -> Iterator[tuple[int, int]]:
    return ((shape.stages - 1, microbatch) for microbatch in range(shape.microbatches))


def partly_kept(schedule: Schedule, number: int) -> Schedule:
    """Return `schedule` with more forward passes whose activations are kept: on each rank, the
    first `number` of every `warmup` forward passes, where `warmup` is the number of forward passes
    before the rank's first backward pass.

    This is Megatron's num_microbatches_with_partial_activation_checkpoints.
    """
    exemptions = set(schedule.kept)
    for row in schedule.rows:
        # All actions before the first backward are warmup forwards.
        window = next(
            (place for place, action in enumerate(row) if action.kind in (B, I)), len(row)
        )
        forward = [action for action in row if action.kind is F]
        for place, action in enumerate(forward):
            if place % max(window, 1) < number:
                exemptions.add((action.stage, action.microbatch))
    return replace(schedule, kept=frozenset(exemptions))


SCHEDULES: Mapping[str, Recipe] = {
    "depth_first": Recipe(
        _depth_first, loop_stages, about="one microbatch after the other, forward and backward"
    ),
    "breadth_first": Recipe(
        _all_forward, loop_stages, about="all microbatches forward stage by stage, then backward"
    ),
    "gpipe": Recipe(
        _all_forward, contiguous_ranks, most=1, about="all microbatches forward, then all backward"
    ),
    "1f1b": Recipe(
        _interleave_actions,
        contiguous_ranks,
        most=1,
        about="one forward and one backward in turn, as soon as the pipeline is full",
    ),
    "interleaved_1f1b": Recipe(
        _interleave_actions, loop_stages, least=2, about="1F1B over several stages on a rank"
    ),
    "looped_bfs": Recipe(
        _all_forward,
        loop_stages,
        about="all microbatches forward, then all backward, over several stages on a rank",
    ),
    "zero_bubble": Recipe(
        _zero_bubble,
        loop_stages,
        about="gradients of inputs early, gradients of weights when a rank would be idle",
    ),
    "zero_bubble_v": Recipe(
        _zero_bubble_v,
        in_a_v,
        2,
        2,
        about="zero bubble with two stages on each rank: from rank 0 to the last rank and back",
    ),
    "pre_recompute_1f1b": Recipe(
        _pre_recompute,
        contiguous_ranks,
        most=1,
        about="1F1B that recomputes activations while a rank waits for a gradient",
    ),
    "last_no_recompute_1f1b": Recipe(
        _last_no_recompute,
        contiguous_ranks,
        most=1,
        kept=_last_stage,
        about="1F1B that recomputes before the gradient arrives; the last rank keeps its activations",
    ),
    "shifted_critical_path": Recipe(
        _shift_critical_path,
        contiguous_ranks,
        most=1,
        kept=_last_stage,
        microbatches=4,
        about="last_no_recompute_1f1b, except that the second-to-last rank runs a forward pass earlier",
    ),
}
"""Every schedule by name."""
