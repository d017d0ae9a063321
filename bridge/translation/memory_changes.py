"""Changes of a config with which its run needs less memory, cheapest first, as the stack accepts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from bridge.errors import BridgeError
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config
from bridge.stack.rules import Effect
from bridge.translation.edit import edit_config
from bridge.translation.lift import lift

MOST, TRIED = 3, 80
"""Number of changes that are named, and number of combinations that are tried for them."""


@dataclass(frozen=True)
class Change:
    """Settings of a stack, with what they mean for memory. A setting of None is removed. `needed`
    is what a device needs with them, in bytes, and `price` says what they cost.
    """

    settings: Mapping[str, Any]
    needed: int
    price: str


@dataclass(frozen=True, eq=False)
class Candidate:
    """A change to try: values of plan fields, and arguments of the program that starts the stack;
    and the price, as a number to compare and in words.
    """

    cost: int
    price: str
    values: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def paths(self) -> frozenset[str]:
        """What the candidate changes."""
        return frozenset((*self.values, *self.arguments))


Measure = Callable[[Config, Mapping[str, Any]], int]
"""Gives the bytes that a device needs for a config with further arguments of its host; raises
`BridgeError` if they do not fit together.
"""


def find_changes(
    config: Config,
    plan: Plan,
    measure: Measure,
    memory: int,
    host: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Change]:
    """Return up to `MOST` changes of `config`, each of which makes the run fit into `memory` bytes
    by itself. `plan` is that of the run.

    `host` has the arguments of a program that starts the stack and sets parts of the run itself, by
    the candidates that they stand for. A change that the stack's parser refuses, or that has no
    effect on the plan, is left out.
    """
    found, chosen = list[Change](), list[frozenset[Candidate]]()
    for group in _groups(list(_candidates(plan, host)))[:TRIED]:
        members = frozenset(group)
        if any(other <= members for other in chosen):
            continue
        change = _try(config, group, measure, host is not None)
        if change is None or change.needed > memory:
            continue
        # Two candidates may stand for the same setting.
        if any(one.settings.items() <= change.settings.items() for one in found):
            continue
        found.append(change)
        chosen.append(members)
        if len(found) == MOST:
            break
    return found


def _groups(single: list[Candidate]) -> list[tuple[Candidate, ...]]:
    """Return the candidates and their combinations of two and three, cheapest first. Candidates for
    the same setting do not combine.
    """
    groups = [
        group
        for size in (1, 2, 3)
        for group in combinations(single, size)
        if len(frozenset[str]().union(*(one.paths for one in group)))
        == sum(len(one.paths) for one in group)
    ]
    return sorted(groups, key=lambda group: sum(one.cost for one in group))


def _try(
    config: Config, group: tuple[Candidate, ...], measure: Measure, hosted: bool
) -> Change | None:
    values = {path: value for one in group for path, value in one.values.items()}
    arguments = {path: value for one in group for path, value in one.arguments.items()}
    try:
        changed = edit_config(config, values, config.world_size) if values else config
        after = lift(changed).values()
        if any(after.get(path) != value for path, value in values.items()):
            return None
        if _stops_of(changed) - _stops_of(config):
            return None
        needed = measure(changed, arguments)
    except BridgeError:
        return None  # the stack refuses it: not a change to suggest
    settings = {
        path: changed.given.get(path)
        for path in dict.fromkeys((*config.given, *changed.given))
        if config.given.get(path) != changed.given.get(path)
    }
    if (not settings and not arguments) or (hosted and any(map(_is_code, settings))):
        return None
    return Change({**arguments, **settings}, needed, "; ".join(one.price for one in group))


def _stops_of(config: Config) -> set[str]:
    """The messages of what stops a run of `config` after its stack has accepted the settings."""
    found = config.dialect.inspect(config)
    return {one.message for one in found if one.effect is Effect.STOPS}


def _is_code(path: str) -> bool:
    """Whether a setting belongs into a script, which is not the user's if a host brings its own."""
    return path.startswith("code.")


def _candidates(plan: Plan, host: Mapping[str, Mapping[str, Any]] | None) -> Iterator[Candidate]:
    parallel, zero = plan.parallel, plan.zero
    tensor, data = parallel.tensor or 1, parallel.data or 1
    if tensor > 1 and not parallel.sequence:
        yield Candidate(
            0,
            "norms are split over tensor ranks by tokens, at no price",
            {"parallel.sequence": True},
        )
    level = zero.effective_stage or 0
    for stage, price in LEVELS.items():
        if level < stage and data > 1:
            yield Candidate(3 * stage**2, price, {"zero.stage": stage})
    if host is not None:
        yield from (
            Candidate(COSTS[name], PRICES[name], {}, values) for name, values in host.items()
        )
    else:
        yield from _own_candidates(plan)
        if data % 2 == 0:
            accumulation = plan.batch.accumulation
            values = {"parallel.tensor": tensor * 2, "parallel.data": data // 2}
            values |= {"batch.accumulation": accumulation * 2} if accumulation else {}
            yield Candidate(25, PRICES["tensor"], values)
    if zero.offload.optimizer in (None, "none"):
        yield Candidate(40, PRICES["optimizer"], {"zero.offload.optimizer": "cpu"})
    if zero.offload.parameters in (None, "none"):
        yield Candidate(60, PRICES["weights"], {"zero.offload.parameters": "cpu"})


def _own_candidates(plan: Plan) -> Iterator[Candidate]:
    """Yield the changes of microbatch and recomputation that a stack's own config may say."""
    micro, accumulation, again = plan.batch.micro, plan.batch.accumulation, plan.recompute
    if micro and accumulation and micro % 2 == 0:
        values = {"batch.micro": micro // 2, "batch.accumulation": accumulation * 2}
        yield Candidate(COSTS["micro"], PRICES["micro"], values)
    if again.granularity in (None, "none"):
        yield Candidate(5, PRICES["selective"], {"recompute.granularity": "selective"})
    if again.granularity != "full":
        full = {"recompute.granularity": "full"}
        every = full | {"recompute.method": "uniform", "recompute.layers": 1}
        # Some stacks have no method to choose.
        yield from (Candidate(COSTS["full"], PRICES["full"], one) for one in (every, full))


COSTS: Mapping[str, int] = {"micro": 8, "full": 30}
PRICES: Mapping[str, str] = {
    "micro": "the same sequences of a step, in microbatches of half the size: smaller matrix products",
    "full": "every layer is computed again in backward: about a third more computation",
    "selective": "attention is computed again in backward: a few per cent more time",
    "tensor": "matrices are split over twice the ranks: messages within every layer, and half the data ranks",
    "optimizer": "the optimizer steps on the host: a slower step, and memory of the host",
    "weights": "weights come from the host for every pass: far slower",
}
"""The price of a change, as a number to compare and in words."""
LEVELS: Mapping[int, str] = {
    1: "optimizer state is divided over data ranks: weights are gathered once a step",
    2: "gradients are divided over data ranks: they are reduced as backward goes",
    3: "weights are divided over data ranks: they are gathered for every pass, half as much traffic again",
}
"""The price of a ZeRO level, compared with the level before it."""
