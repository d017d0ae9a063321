"""Makes two configs of a user small, and finds the engine that runs each of them.

Nothing runs here, and torch is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.engine.interface import Backend, Trainer, Workload
from bridge.errors import BridgeError, nearest
from bridge.plan.batch import solve
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config
from bridge.translation.lift import lift
from bridge.verify.pair import Side, TranslationPair, in_small, meaning_of, unread
from bridge.verify.size import Size, change_plan, changes, changes_like

SIDES: tuple[Side, Side] = ("source", "target")
ASKED = ("model.", "parallel.", "stages.", "schedule.", "recompute.", "debug.", "batch.")
"""Prefixes of plan fields that are removed from a config's plan before it runs on the native
engine. On that engine, the model is the user's, all ranks are data ranks, and the batch is made
small.
"""


class AsMeant(Backend):
    """An engine that runs the plan of a config, for configs of another stack than the engine's own."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    name = property(lambda self: self.inner.name)
    title = property(lambda self: self.inner.title)
    least = property(lambda self: self.inner.least)

    @property
    def release(self) -> str | None:
        return self.inner.release

    def load(self) -> None:
        self.inner.load()

    def refusals(self, plan: Plan, world: int) -> tuple[str, ...]:
        return self.inner.refusals(plan, world)

    def open(self, run: Config | Plan, workload: Workload) -> Trainer:
        from bridge.engine.comm import rank_and_world

        plan = lift(run) if isinstance(run, Config) else run
        plan = Plan.of(
            {path: value for path, value in plan.values().items() if not path.startswith("model.")}
        )
        BridgeError.raise_if(self.inner.refusals(plan, (rank_and_world() or (0, 1))[1]))
        return self.inner.open(plan, workload)


def engine_named(name: str, backends: Mapping[str, Backend]) -> Backend:
    """Return the engine with this name. If there is none, raises `BridgeError` and suggests the
    most similar name.
    """
    if name not in backends:
        raise BridgeError(
            f"--on: found {name}, expected two engines of {', '.join(sorted(backends))}{nearest(name, backends)}"
        )
    return backends[name]


def engines_of(
    configs: tuple[Config, Config], on: tuple[str, str] | None, backends: Mapping[str, Backend]
) -> dict[Side, Backend]:
    """Return the engines that run the two configs: the engines named by `on`, or else those of the
    configs' own stacks.
    """
    engines: dict[Side, Backend] = {}
    for at, (side, config) in enumerate(zip(SIDES, configs, strict=True)):
        own = config.dialect.name
        name = on[at] if on else own
        if name == own:
            BridgeError.raise_if(
                []
                if own in backends
                else [f"{own}: there is no engine of this stack; name one with --on A,B"]
            )
            engines[side] = backends[own]
        else:
            engines[side] = AsMeant(engine_named(name, backends))
    return engines


def pair_configs(
    configs: tuple[Config, Config], engines: Mapping[Side, Backend], limit: int
) -> TranslationPair:
    """Return both configs, made small for the same few ranks of this machine.

    The ratio between the two batch sizes and the model stay as they are.
    """
    plans = [
        meaning_of(config, {config.dialect.name: engines[side]})
        for side, config in zip(SIDES, configs, strict=True)
    ]
    # With an open number of data ranks there are two of them, whatever the configs ask for.
    open_ = [change_plan(plan, {"parallel.data": None}) for plan in plans]
    size = _whole(Size.of(open_[0], max(limit, *(engine.least for engine in engines.values()))))
    other = _like(size, open_[0], open_[1])
    edits = _without_model(changes(plans[0], size))
    theirs = _without_model(changes_like(plans[1], other, plans[0], edits))
    small = [
        in_small(config, wish, place, {config.dialect.name: engines[side]})
        for side, config, wish, place in zip(
            SIDES, configs, (edits, theirs), (size, other), strict=True
        )
    ]
    differences = {
        path: (plans[0].values().get(path), value)
        for path, value in edits.items()
        if not path.startswith("debug.")
    }
    after = [
        meaning_of(config, {config.dialect.name: engines[side]})
        for side, config in zip(SIDES, small, strict=True)
    ]
    meanings: dict[Side, Plan] = {"source": alone(after[0], size), "target": alone(after[1], other)}
    return TranslationPair(
        small[0], small[1], meanings, differences, size, unread=unread(*configs), translated=False
    )


def _whole(size: Size) -> Size:
    """Return `size` with at least one microbatch for each rank, because some engines use all ranks
    as data ranks.
    """
    return replace(size, accumulation=max(size.accumulation, size.world // size.data))


def _like(size: Size, first: Plan, second: Plan) -> Size:
    """Return the size for the second plan, given the `size` for the first plan. If the microbatches
    of the second plan are smaller or larger than those of the first plan, they stay so in the small
    runs.
    """
    result = size.like(first, second)
    solutions = [
        solve(it.batch.micro, it.batch.accumulation, it.batch.global_, it.parallel.data)
        for it in (first, second)
    ]
    mine, theirs = (one.micro for one in solutions)  # None if the plan leaves it open
    if mine and theirs and theirs < mine and result.micro > 1:
        result = replace(result, micro=result.micro // 2, accumulation=result.accumulation * 2)
    elif mine and theirs and theirs > mine and result.accumulation % 2 == 0:
        result = replace(result, micro=result.micro * 2, accumulation=result.accumulation // 2)
    return _whole(result)


def _without_model(edits: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in edits.items() if not path.startswith("model.")}


def alone(plan: Plan, size: Size) -> Plan:
    """Return the plan with data ranks only, and with the batch of `size`.

    Only fields that change numbers are kept.
    """
    values = {path: value for path, value in plan.values().items() if not path.startswith(ASKED)}
    accumulation = max(1, size.batch // (size.micro * size.world))
    micro = size.batch // (accumulation * size.world)
    batch = {"batch.micro": micro, "batch.accumulation": accumulation, "batch.global_": size.batch}
    return Plan.of({**values, **batch, "parallel.data": size.world})
