"""Pipelines: a plan's schedule over its stages, and which layers each stage has, all decided before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bridge.errors import ConfigError
from bridge.layout.partition import Layers, partition
from bridge.layout.schedule import SCHEDULES, Schedule, Shape, generate, partly_kept, prove
from bridge.layout.schedule.table import read
from bridge.plan import Plan

Ranges = tuple[range, ...]


@dataclass(frozen=True)
class Pipeline:
    """The schedule of a step, and the layers of each of its stages in model order."""

    schedule: Schedule
    layers: Ranges

    @classmethod
    def of(cls, plan: Plan, layers: Layers, microbatches: int, table: str | None = None, parts: Ranges | None = None) -> Pipeline:
        """The pipeline that `plan` asks for; `table` is the text of its CSV, `parts` are stages that were cut otherwise.

        A stage that the plan cuts for a pipeline rank is cut further, layer by layer, so that its weights and gradients need
        not be whole at once; `stages.layers_per_stage` keeps its layers together. Raises `ConfigError` if anything does not
        fit, or the ranks would not end well.
        """
        outer, schedule = _outline(plan, layers, microbatches, table, parts)
        apart = parts is None and plan.stages.layers_per_stage is None and ranks_of(plan) > 1
        inner = tuple(range(layer, layer + 1) for layer in range(layers.count)) if apart else outer
        found = cls(schedule.expanded([len(part) for part in outer]) if apart else schedule, inner)
        ConfigError.raise_if(f"schedule: {problem}" for problem in prove(found.schedule))
        return found

    def local(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in model order."""
        return self.schedule.local(rank)


def ranks_of(plan: Plan) -> int:
    """Pipeline ranks of a plan."""
    return plan.parallel.pipeline or 1


def name_of(plan: Plan) -> str:
    """The schedule that a plan names or implies: one rank accumulates depth first unless told otherwise."""
    schedule, wide = plan.schedule, (plan.schedule.breadth_first or 1) > 1
    if ranks_of(plan) == 1:
        return "breadth_first" if wide else "depth_first"
    if schedule.name is not None:
        return schedule.name
    if wide:
        return "looped_bfs"
    return "1f1b" if (schedule.virtual or 1) == 1 else "interleaved_1f1b"


def schedule_of(plan: Plan, microbatches: int, stages: int | None = None, table: str | None = None) -> Schedule:
    """The plan's schedule over `stages` (default: as many as its ranks hold). Raises `ConfigError` if it does not fit."""
    name, ranks = name_of(plan), ranks_of(plan)
    if name == "csv":
        return _kept(plan, _from_table(plan, microbatches, stages, table))
    virtual = _virtual(plan) if ranks > 1 else 1
    rounds = (plan.schedule.depth_first or 1) if name in ("looped_bfs", "breadth_first") else 1
    return _kept(plan, generate(name, Shape(ranks, stages or ranks * virtual, microbatches, plan.schedule.group, rounds)))


def _kept(plan: Plan, schedule: Schedule) -> Schedule:
    """`schedule` with the microbatches that keep their activations, where several are in flight."""
    number = plan.recompute.kept_microbatches or 0
    return partly_kept(schedule, number) if number and schedule.ranks > 1 else schedule


def _from_table(plan: Plan, microbatches: int, stages: int | None, table: str | None) -> Schedule:
    if table is None:
        raise ConfigError("schedule.csv: the plan's schedule is a table, but names no file; name one")
    where = plan.schedule.csv or "schedule.csv"
    found = read(table, where)
    ConfigError.raise_if(_misfits(found, where, (ranks_of(plan), microbatches, stages or found.stages)))
    return found


def _misfits(found: Schedule, where: str, wanted: tuple[int, int, int]) -> Iterator[str]:
    what = ("pipeline ranks", "microbatches", "stages")
    for name, has, expected in zip(what, (found.ranks, found.microbatches, found.stages), wanted, strict=True):
        if has != expected:
            yield f"{where}: is for {has} {name}, but the plan has {expected}; change one of the two"


def _outline(plan: Plan, layers: Layers, microbatches: int, table: str | None, parts: Ranges | None) -> tuple[Ranges, Schedule]:
    """Stages as the plan cuts them, and the schedule over those."""
    ranks = ranks_of(plan)
    if ranks == 1:
        outer = parts or partition(plan.stages, layers)
        return outer, schedule_of(plan, microbatches, len(outer))
    wanted = read(table, plan.schedule.csv or "schedule.csv").stages if table is not None else ranks * _virtual(plan)
    outer = parts or partition(plan.stages, layers, wanted)
    if plan.schedule.virtual is not None and len(outer) != wanted:
        raise ConfigError(f"stages: {len(outer)} where the schedule has {wanted}; change stages, or schedule.virtual")
    return outer, schedule_of(plan, microbatches, len(outer), table)


def _virtual(plan: Plan) -> int:
    """Stages on a pipeline rank: as the plan says, or as few as its schedule takes."""
    name = name_of(plan)
    return plan.schedule.virtual or (SCHEDULES[name].least if name in SCHEDULES else 1)


def text_of(plan: Plan) -> str | None:
    """The text of the plan's table of actions, if it names one. Raises `SourceError` if there is no such file."""
    from bridge.files import read_text

    return read_text(plan.schedule.csv) if name_of(plan) == "csv" and plan.schedule.csv else None


def by_names(stages: Sequence[Sequence[str]], layers: Sequence[str]) -> Ranges:
    """Stages from the names of the modules in each, such as torch's and AutoModel's `module_fqns_per_model_part`.

    A name stands for a layer of that name, or for all layers within it. Raises `ConfigError` for names that match nothing,
    layers that no stage or more than one has, and stages out of the model's order.
    """
    found = [[index for index, layer in enumerate(layers) if _named(layer, names)] for names in stages]
    ConfigError.raise_if(_name_problems(stages, layers, found))
    return tuple(range(part[0], part[-1] + 1) for part in found)


def _named(layer: str, names: Sequence[str]) -> bool:
    return any(layer == name or layer.startswith(f"{name}.") for name in names)


def _name_problems(stages: Sequence[Sequence[str]], layers: Sequence[str], found: Sequence[Sequence[int]]) -> Iterator[str]:
    for stage, names in enumerate(stages):
        for name in names:
            if not any(_named(layer, [name]) for layer in layers):
                yield f"stage {stage}: the model has no layer {name!r}; its layers are {', '.join(layers)}"
    order = [index for part in found for index in part]
    for index, layer in enumerate(layers):
        if order.count(index) != 1:
            yield f"layer {layer}: is in {order.count(index)} stages, expected one; name it in one stage"
    if order != sorted(order):
        yield "stages: are not in the order of the model's layers; let each go on where the one before ends"
    for stage, part in enumerate(found):
        if not part:
            yield f"stage {stage}: has no layers; name some, or use fewer stages"
