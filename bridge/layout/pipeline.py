"""Pipelines: the schedule of a plan and the layers of each stage, derived before a run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.errors import ConfigError
from bridge.layout.partition import Layers, partition_layers
from bridge.layout.schedule import ActionKind, Costs, Timeline, make_timeline, prove_schedule
from bridge.plan.batch import solve
from bridge.plan.plan import Plan

if TYPE_CHECKING:
    pass


from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.files import path_of_name, read_text
from bridge.layout.partition import cut_within
from bridge.layout.schedule import (
    SCHEDULES,
    Schedule,
    ScheduleShape,
    check_size,
    generate_schedule,
    partly_kept,
    schedule_problems,
)
from bridge.layout.schedule.table import read_schedule

Ranges = tuple[range, ...]


@dataclass(frozen=True)
class Pipeline:
    """The schedule of a step, and the layers of each stage in model order."""

    schedule: Schedule
    layers: Ranges

    @classmethod
    def of(
        cls,
        plan: Plan,
        layers: Layers,
        microbatches: int,
        table: str | None = None,
        parts: Ranges | None = None,
        short: bool = False,
    ) -> Pipeline:
        """Return the pipeline of `plan`. `table` is the text of the CSV file that the plan names as
        its schedule. `parts` are the stages, if they were not chosen by the plan's rules.

        With `short`, the number of microbatches may be smaller than the number of ranks. With
        several pipeline ranks, each stage of the plan is divided further, into single layers or
        groups of small layers (`partition.together`). So not all weights and gradients of a stage
        have to be whole at once. Stages are not divided if `parts` or `stages.layers_per_stage` is
        given. Raises `ConfigError` if sizes do not fit, or if the schedule would fail.
        """
        check_size(layers.count, microbatches)
        outer, schedule = _outline_stages(plan, layers, microbatches, table, parts, short)
        apart = parts is None and plan.stages.layers_per_stage is None and ranks_of(plan) > 1
        inner = _inner_stages(plan, layers, outer) if apart else outer
        # Number of parts in each stage of the plan.
        numbers = [sum(part.start <= stage.start < part.stop for stage in inner) for part in outer]
        pipeline = cls(schedule.split_stages(numbers) if apart else schedule, inner)
        # The parts of a stage run one after the other, so a proof for the stages holds for their parts.
        ConfigError.raise_if(f"schedule: {problem}" for problem in prove_schedule(schedule))
        return pipeline

    def local(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in model order."""
        return self.schedule.local(rank)


def ranks_of(plan: Plan) -> int:
    """Number of pipeline ranks of a plan."""
    return plan.parallel.pipeline or 1


def name_of(plan: Plan) -> str:
    """Return the name of the plan's schedule. If the plan names none, the schedule follows from
    `schedule.virtual` and `schedule.breadth_first`. A run with one pipeline rank is always depth
    first or breadth first.
    """
    schedule, wide = plan.schedule, (plan.schedule.breadth_first or 1) > 1
    if ranks_of(plan) == 1:
        return "breadth_first" if wide else "depth_first"
    if schedule.name is not None:
        return schedule.name
    if wide:
        return "looped_bfs"
    return "1f1b" if (schedule.virtual or 1) == 1 else "interleaved_1f1b"


def schedule_of(
    plan: Plan,
    microbatches: int,
    stages: int | None = None,
    table: str | None = None,
    short: bool = False,
) -> Schedule:
    """Return the plan's schedule for `stages` stages. If `stages` is None, the number is the number
    of pipeline ranks times the number of stages on a rank. Raises `ConfigError` if the schedule
    does not fit the sizes.
    """
    name = name_of(plan)
    if name == "csv":
        return _mark_kept_microbatches(plan, _from_table(plan, microbatches, stages, table))
    return _mark_kept_microbatches(
        plan, generate_schedule(name, _schedule_shape(plan, microbatches, stages, short))
    )


def describe_pipeline(
    plan: Plan, microbatches: int, layers: Layers | None = None
) -> tuple[Plan, tuple[str, ...]]:
    """Return `plan` unchanged if its schedule can run this number of microbatches, and else `plan`
    with 1F1B or breadth first as its schedule. The second result has the reasons for a change.
    """
    if name_of(plan) == "csv" or ranks_of(plan) == 1:
        return plan, ()
    plan, notes = _cut_to_layers(plan, layers) if layers else (plan, ())
    stages = stages_of(plan, layers) if layers else None
    problems = tuple(
        schedule_problems(name_of(plan), _schedule_shape(plan, microbatches, stages, True))
    )
    # Those two run any number of micro batches on any stages.
    plain = "1f1b" if _schedule_shape(plan, microbatches, stages).virtual == 1 else "looped_bfs"
    other = _with_schedule(plan, name=plain, group=None, depth_first=None)
    if not problems or any(
        schedule_problems(plain, _schedule_shape(other, microbatches, stages, True))
    ):
        return plan, notes
    return other, (*notes, *(f"{problem}; shown as {plain}" for problem in problems))


def _cut_to_layers(plan: Plan, layers: Layers) -> tuple[Plan, tuple[str, ...]]:
    """Return `plan` unchanged if it has enough layers for all virtual stages, and else `plan` with
    one stage on each rank. The second result has the reason for the change.
    """
    try:
        stages_of(plan, layers)
    except ConfigError as error:
        other = _with_schedule(plan, name="1f1b", group=None, depth_first=None, virtual=None)
        if plan.schedule.virtual in (None, 1) or plan.stages.boundaries:
            raise
        stages_of(other, layers)
        return other, (f"{error}; this schedule is shown with one stage on each rank instead",)
    return plan, ()


def _with_schedule(plan: Plan, **schedule: Any) -> Plan:
    return plan.model_copy(update={"schedule": plan.schedule.model_copy(update=schedule)})


def _schedule_shape(
    plan: Plan, microbatches: int, stages: int | None = None, short: bool = False
) -> ScheduleShape:
    name, ranks = name_of(plan), ranks_of(plan)
    virtual = _virtual_stages(plan) if ranks > 1 else 1
    rounds = (plan.schedule.depth_first or 1) if name in ("looped_bfs", "breadth_first") else 1
    return ScheduleShape(
        ranks, stages or ranks * virtual, microbatches, plan.schedule.group, rounds, short
    )


def stages_of(plan: Plan, layers: Layers) -> int:
    """Return the number of stages into which the plan cuts `layers`, or 0 if the schedule is a CSV
    file, which has its own number. Raises `ConfigError` if the layers do not fit the stages.
    """
    if name_of(plan) == "csv":
        return 0
    return len(
        partition_layers(
            plan.stages,
            layers,
            None if ranks_of(plan) == 1 else ranks_of(plan) * _virtual_stages(plan),
        )
    )


def period_of(plan: Plan, microbatches: int, stages: int) -> int:
    """Return the number of microbatches after which the plan's schedule repeats. Return 0 for a
    schedule that may not repeat: a CSV file, or a plan in which some microbatches keep their
    activations. Raises `ConfigError` if the schedule does not fit the number of microbatches.
    """
    if name_of(plan) == "csv" or plan.recompute.kept_microbatches:
        return 0
    shape = _schedule_shape(plan, microbatches, stages, True)
    ConfigError.raise_if(schedule_problems(name_of(plan), shape))
    # A group of micro batches passes all stages of a rank before the next group, in each round.
    return shape.rounds * (shape.group or shape.ranks)


def _mark_kept_microbatches(plan: Plan, schedule: Schedule) -> Schedule:
    """Mark in `schedule` the microbatches that keep their activations, by the plan's setting
    `recompute.kept_microbatches`. On one rank `schedule` is returned unchanged.
    """
    number = plan.recompute.kept_microbatches or 0
    return partly_kept(schedule, number) if number and schedule.ranks > 1 else schedule


def _from_table(plan: Plan, microbatches: int, stages: int | None, table: str | None) -> Schedule:
    if table is None:
        raise ConfigError(
            "schedule.csv: not set, but schedule.name is csv; set the path of the CSV file"
        )
    where = plan.schedule.csv or "schedule.csv"
    schedule = read_schedule(table, where)
    ConfigError.raise_if(
        _find_misfits(schedule, where, (ranks_of(plan), microbatches, stages or schedule.stages))
    )
    return schedule


def _find_misfits(schedule: Schedule, where: str, sizes: tuple[int, int, int]) -> Iterator[str]:
    what = ("pipeline ranks", "microbatches", "stages")
    for name, has, size in zip(
        what, (schedule.ranks, schedule.microbatches, schedule.stages), sizes, strict=True
    ):
        if has != size:
            yield (
                f"{where}: this schedule is made for {has} {name}, but the plan has {size};"
                " change the schedule or the plan"
            )


def _outline_stages(
    plan: Plan,
    layers: Layers,
    microbatches: int,
    table: str | None,
    parts: Ranges | None,
    short: bool,
) -> tuple[Ranges, Schedule]:
    """Return the plan's stages, each as a range of layers, and the schedule of these stages."""
    ranks = ranks_of(plan)
    if ranks == 1:
        outer = parts or partition_layers(plan.stages, layers)
        if parts is None and len(outer) == layers.count and plan.stages.layers_per_stage is None:
            outer = _inner_stages(plan, layers, [range(layers.count)])
        return outer, schedule_of(plan, microbatches, len(outer))
    count = (
        read_schedule(table, plan.schedule.csv or "schedule.csv").stages
        if table is not None
        else ranks * _virtual_stages(plan)
    )
    outer = parts or partition_layers(plan.stages, layers, count)
    if plan.schedule.virtual is not None and len(outer) != count:
        raise ConfigError(
            f"stages: found {len(outer)} stages, but the schedule runs {count}; change stages, or schedule.virtual"
        )
    return outer, schedule_of(plan, microbatches, len(outer), table, short)


def _inner_stages(plan: Plan, layers: Layers, outer: Sequence[range]) -> Ranges:
    """Return the smaller stages into which the plan's stages `outer` are divided. With
    recomputation or tensor parallelism, each layer becomes a stage.
    """
    recompute, alone = plan.recompute, (plan.parallel.tensor or 1) == 1
    again = recompute.granularity not in (None, "none", "selective") or recompute.ratio is not None
    if again or not alone:
        return tuple(range(layer, layer + 1) for layer in range(layers.count))
    return cut_within(layers, outer)


def _virtual_stages(plan: Plan) -> int:
    """Return the number of stages on a pipeline rank. If the plan does not set this number, return
    the smallest number that the plan's schedule allows.
    """
    name = name_of(plan)
    return plan.schedule.virtual or (SCHEDULES[name].least if name in SCHEDULES else 1)


def text_of(plan: Plan) -> str | None:
    """Return the text of the CSV file that the plan names as its schedule, or None if the plan
    names no such file.

    Raises `SourceError` if the file does not exist. Within `bridge.files.reaching`, also raises
    `SourceError` if the file is outside the allowed folders.
    """
    if name_of(plan) != "csv" or not plan.schedule.csv:
        return None
    return read_text(path_of_name(plan.schedule.csv))


def by_names(stages: Sequence[Sequence[str]], layers: Sequence[str]) -> Ranges:
    """Return the range of layers of each stage. `stages` has the names of the modules in each
    stage, as torch and AutoModel list them in `module_fqns_per_model_part`.

    A name stands for the layer of this name, or for all layers inside the module of this name.
    Raises `ConfigError` for a name that matches no layer, a layer that is in no stage or in several
    stages, and stages that do not follow the order of the model.
    """
    indices = [
        [index for index, layer in enumerate(layers) if _is_below(layer, names)] for names in stages
    ]
    ConfigError.raise_if(_name_problems(stages, layers, indices))
    return tuple(range(part[0], part[-1] + 1) for part in indices)


def _is_below(layer: str, names: Sequence[str]) -> bool:
    return any(layer == name or layer.startswith(f"{name}.") for name in names)


def _name_problems(
    stages: Sequence[Sequence[str]], layers: Sequence[str], indices: Sequence[Sequence[int]]
) -> Iterator[str]:
    for stage, names in enumerate(stages):
        for name in names:
            if not any(_is_below(layer, [name]) for layer in layers):
                yield f"stage {stage}: the model has no layer {name!r}; its layers are {', '.join(layers)}"
    order = [index for part in indices for index in part]
    for index, layer in enumerate(layers):
        if order.count(index) != 1:
            yield f"layer {layer}: is in {order.count(index)} stages, expected one; name it in one stage"
    if order != sorted(order):
        yield (
            "stages: found layers in another order than in the model;"
            " name the first layers in the first stage, and so on"
        )
    for stage, part in enumerate(indices):
        if not part:
            yield f"stage {stage}: no layer is named for this stage; name a layer, or use fewer stages"


def time_schedule(plan: Plan, microbatches: int | None) -> tuple[Timeline, tuple[str, ...]]:
    """Return the schedule with start times, and notes.

    If the plan's own schedule cannot be shown, a note gives the reason and the schedule shown
    instead.
    """
    count, stages = _microbatch_count(plan, microbatches), _stage_count(plan)
    pipeline_plan, notes = describe_pipeline(plan, count)
    orders = schedule_of(pipeline_plan, count, stages, text_of(plan), short=True)
    ConfigError.raise_if(f"schedule: {problem}" for problem in prove_schedule(orders))
    # A schedule that recomputes ahead has actions for it; else full recomputation makes each backward longer by a forward.
    ahead = any(action.kind is ActionKind.AGAIN for row in orders.rows for action in row)
    recomputes = ahead or plan.recompute.granularity == "full"
    return make_timeline(orders, Costs(again=float(recomputes))), notes


def _microbatch_count(plan: Plan, option: int | None) -> int:
    batch = plan.batch
    count = (
        option
        or solve(batch.micro, batch.accumulation, batch.global_, plan.parallel.data).accumulation
    )
    if count is None:
        raise ConfigError(
            "batch.accumulation: the file does not set the number of microbatches in a step; give "
            "--microbatches N"
        )
    return count


def _stage_count(plan: Plan) -> int | None:
    """Number of stages that the plan cuts the model into; None if the number follows from
    ranks and virtual stages alone.
    """
    if (
        plan.stages.layers_per_stage is None
        or plan.model.layers is None
        or plan.schedule.virtual
        or ranks_of(plan) == 1
    ):
        return None
    if name_of(plan) == "csv":
        return None
    return len(partition_layers(plan.stages, Layers(plan.model.layers + 2, 1, 1)))
