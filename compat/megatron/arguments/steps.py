"""Checks and derivations: rows of an ordered table that checks and changes parsed values as a
Megatron release does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.errors import ConfigError
from bridge.stack.checks import Check
from bridge.stack.rules import Effect
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
"""Names of values that a partial config may leave open. Checks and derivations that need an open
value are skipped.
"""


class Namespace:
    """Argument values as attributes, as in upstream's code; a name that a release lacks is None."""

    def __init__(self, *values: Mapping[str, Any]) -> None:
        for more in values:
            self.__dict__.update(more)

    def __getattr__(self, name: str) -> Any:
        # Called only for names that are not in __dict__. The table holds the checks of all
        # releases, and one that reads an argument of another release must then find it unset
        # instead of ending with AttributeError.
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


Predicate = Callable[[Namespace], object]
Change = Callable[[Namespace], object]


@dataclass(frozen=True, slots=True)
class Derivation:
    """A statement that sets values from others, in releases [since, until).

    The statement is skipped if a value in `needs` is not known.

    `place` names the upstream function and statement that the row stands for.
    """

    place: str
    change: Change
    since: str = ""
    until: str = ""
    needs: tuple[str, ...] = ()


Step = Check | Derivation
"""A check or a derivation. It stands for one statement of Megatron's function."""


def check(
    place: str,
    fails: Predicate,
    problem: str,
    *,
    since: str = "",
    until: str = "",
    needs: tuple[str, ...] = (),
    last: bool = False,
    name: str = "",
) -> Check:
    """Return a row that refuses values for which `fails` is true.

    `problem` is a format string over the values: the argument, a colon, and the message. With
    `last`, Megatron stops there (see `run`). `name` keeps the id of a row whose words changed.
    """
    path, _, message = problem.partition(": ")
    return Check(path, fails, message, Effect.STOPS, place, since, until, needs, last, name)


def under(
    place: str, condition: Predicate, first: str = "", last: str = ""
) -> Callable[..., Check]:
    """Return a function that makes checks of the upstream function `place`. These checks only apply
    if `condition` holds.

    If a check has no releases of its own, it applies in releases [first, last).
    """

    def check_under(
        fails: Predicate,
        problem: str,
        since: str = first,
        until: str = last,
        needs: tuple[str, ...] = (),
        name: str = "",
    ) -> Check:
        return check(
            place,
            lambda a: condition(a) and fails(a),
            problem,
            since=since,
            until=until,
            needs=needs,
            name=name,
        )

    return check_under


def derive(
    place: str, change: Change, *, since: str = "", until: str = "", needs: tuple[str, ...] = ()
) -> Derivation:
    """Return a derivation whose `change` computes values from others."""
    return Derivation(place, change, since, until, needs)


def select(table: Iterable[Step], version: str) -> tuple[Step, ...]:
    """Return the checks and derivations of `table` that the release has, in order."""
    return RELEASES.having(version, table)


def run(steps: Iterable[Step], values: Namespace) -> None:
    """Run all checks and derivations in order on `values`. Raises one `ConfigError` with every
    problem found.

    Upstream stops at the first refusal. Here later rows run too, so that a user sees all problems
    at once. A value of `OPEN` that a row with `last` refuses counts as unknown from then on,
    because later rows divide by it. If a row with `last` refuses any other value, no further rows
    run. The only exceptions are rows with `last` that directly follow and have the same `place`.
    """
    problems: list[str] = []
    stop = ""  # the statement at which Megatron stops
    arguments = values.__dict__
    for step in steps:
        if stop and not (isinstance(step, Check) and step.last and step.place == stop):
            break
        # `get`, because a name that the release lacks is as unknown as one that is None.
        if step.needs and None in map(arguments.get, step.needs):
            continue
        if isinstance(step, Derivation):
            step.change(values)
        elif step.when(values):
            problems.append(f"{step.path}: {step.says(arguments)}")
            if step.last and step.path in OPEN:
                setattr(values, step.path, None)
            elif step.last:
                stop = step.place
    ConfigError.raise_if(problems)


def member_name(value: Any) -> str:
    """Return the name of an enumeration's member, without the name of the enumeration before it."""
    return str(value).rpartition(".")[2]


def any_given(*names: str) -> Callable[[Namespace], bool]:
    """Return a predicate that is true if any of `names` has a value."""
    return lambda values: any(getattr(values, name) is not None for name in names)


def absent(name: str) -> Callable[[Namespace], bool]:
    """Return a predicate that is true if `name` has no value."""
    return lambda values: getattr(values, name) is None


def drop(*names: str) -> Change:
    """Return a change that removes `names`."""

    def change(values: Namespace) -> None:
        for name in names:
            values.__dict__.pop(name, None)

    return change


def assign(**constants: Any) -> Change:
    """Return a change that sets names to fixed values."""
    return lambda values: values.__dict__.update(constants)


def compute_argument(
    name: str, value: Callable[[Namespace], Any], condition: Predicate | None = None
) -> Change:
    """Return a change that computes `name` from the other values, if `condition` holds."""

    def change(values: Namespace) -> None:
        if condition is None or condition(values):
            setattr(values, name, value(values))

    return change


def fallback(name: str, value: Callable[[Namespace], Any]) -> Change:
    """Return a change that computes `name` from the other values, if `name` has no value."""
    return compute_argument(name, value, absent(name))


def when(condition: Predicate, **constants: Any) -> Change:
    """Return a change that sets names to fixed values if `condition` holds."""

    def change(values: Namespace) -> None:
        if condition(values):
            values.__dict__.update(constants)

    return change


def follow(name: str, source: str) -> Change:
    """Return a change that gives `name` the value of `source` if `source` has one."""
    return compute_argument(name, lambda values: getattr(values, source), any_given(source))


def inherit(name: str, source: str) -> Change:
    """Return a change that gives `name` the value of `source` if `name` has no value."""
    return fallback(name, lambda values: getattr(values, source))
