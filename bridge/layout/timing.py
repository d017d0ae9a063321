"""The schedule of a plan in time, proved first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.errors import ConfigError
from bridge.layout.partition import Layers, partition_layers
from bridge.layout.pipeline import describe_pipeline, name_of, ranks_of, schedule_of, text_of
from bridge.layout.schedule import ActionKind, Costs, Timeline, make_timeline, prove_schedule
from bridge.plan.batch import solve
from bridge.plan.plan import Plan

if TYPE_CHECKING:
    pass


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
