"""Steps: rows of an ordered table that turns parsed values into what a release of Megatron makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.errors import ConfigError
from compat.megatron.releases import RELEASES

OPEN = frozenset(
    (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
        "seq_length",
        "micro_batch_size",
        "world_size",
    )
)
"""Values that a partial config may leave open: steps that need one are skipped while it is missing."""


class Namespace:
    """Values by attribute, as the stack's own code sees them; a name that the release lacks reads as None."""

    def __init__(self, *values: Mapping[str, Any]) -> None:
        for more in values:
            self.__dict__.update(more)

    def __getattr__(self, name: str) -> Any:
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value


Predicate = Callable[[Namespace], object]
Inspection = Callable[[Namespace], Iterable[str]]
Change = Callable[[Namespace], object]


@dataclass(frozen=True, slots=True)
class Step:
    """One statement of the stack, in [since, until): one check (`fails`), several (`finds`), or a `change`.

    `place` names the upstream function and statement that the row stands for, `needs` the values without
    which it says nothing, `last` a check after whose failure later steps would only repeat the same problem.
    """

    place: str
    since: str
    until: str
    needs: tuple[str, ...]
    fails: Predicate | None = None
    problem: str = ""
    last: bool = False
    finds: Inspection | None = None
    change: Change | None = None

    def applies(self, version: str) -> bool:
        """Whether the release has this statement."""
        return RELEASES.within(version, self.since, self.until)


def check(
    place: str,
    fails: Predicate,
    problem: str,
    *,
    since: str = "",
    until: str = "",
    needs: tuple[str, ...] = (),
    last: bool = False,
) -> Step:
    """A refusal: when `fails` is true of the values, `problem`, a format string over them, says why."""
    return Step(place, since, until, needs, fails, problem, last)


def derive(place: str, change: Change, *, since: str = "", until: str = "", needs: tuple[str, ...] = ()) -> Step:
    """A derivation: `change` sets values from others."""
    return Step(place, since, until, needs, change=change)


def inspect(place: str, finds: Inspection, *, since: str = "", until: str = "", needs: tuple[str, ...] = ()) -> Step:
    """Several refusals at once: `finds` yields what is wrong."""
    return Step(place, since, until, needs, finds=finds)


def select(table: Iterable[Step], version: str) -> tuple[Step, ...]:
    """The steps of `table` that the release has, in order."""
    return tuple(step for step in table if step.applies(version))


def run(steps: Iterable[Step], values: Namespace) -> None:
    """Take all steps in order; raises one `ConfigError` with every problem found."""
    problems: list[str] = []
    known = values.__dict__
    for step in steps:
        if None in map(known.get, step.needs):
            continue
        try:
            if not _take(step, values, problems):
                break
        except ConfigError as error:
            problems.extend(error.problems)
    ConfigError.raise_if(problems)


def _take(step: Step, values: Namespace, problems: list[str]) -> bool:
    """Take one step; whether to go on."""
    if step.change is not None:
        step.change(values)
    elif step.finds is not None:
        problems.extend(step.finds(values))
    elif step.fails is not None and step.fails(values):
        problems.append(step.problem.format_map(_Shown(values.__dict__)))
        return not step.last
    return True


class _Shown(dict[str, Any]):
    """Values for a message; what is not there shows as None."""

    def __missing__(self, name: str) -> None:
        return None


def named(value: Any) -> str:
    """The name of an enumeration's member, with or without the enumeration's own name before it."""
    return str(value).rpartition(".")[2]


def given(*names: str) -> Callable[[Namespace], bool]:
    """Whether any of `names` has a value."""
    return lambda values: any(getattr(values, name) is not None for name in names)


def absent(name: str) -> Callable[[Namespace], bool]:
    """Whether `name` has no value."""
    return lambda values: getattr(values, name) is None


def drop(*names: str) -> Change:
    """A change that removes `names`."""

    def change(values: Namespace) -> None:
        for name in names:
            values.__dict__.pop(name, None)

    return change


def assign(**fixed: Any) -> Change:
    """A change that sets fixed values."""
    return lambda values: values.__dict__.update(fixed)


def when(condition: Predicate, **fixed: Any) -> Change:
    """A change that sets fixed values where `condition` holds."""

    def change(values: Namespace) -> None:
        if condition(values):
            values.__dict__.update(fixed)

    return change


def follow(name: str, source: str) -> Change:
    """A change that gives `name` the value of `source` where that has one."""

    def change(values: Namespace) -> None:
        if getattr(values, source) is not None:
            setattr(values, name, getattr(values, source))

    return change


def inherit(name: str, source: str) -> Change:
    """A change that gives `name` the value of `source` where it has none."""

    def change(values: Namespace) -> None:
        if getattr(values, name) is None:
            setattr(values, name, getattr(values, source))

    return change
