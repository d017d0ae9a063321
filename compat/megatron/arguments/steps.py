"""Checks and derivations: rows of an ordered table that checks and changes parsed values as a
Megatron release does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bridge.stack.checks import Check
from bridge.stack.rules import Effect
from compat.megatron.arguments.evaluation import hold_both, set_argument, set_constants
from compat.megatron.arguments.namespace import Change, Derivation, Namespace, Predicate


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
            partial(hold_both, condition, fails),
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
    return partial(set_argument, name, value, condition)


def fallback(name: str, value: Callable[[Namespace], Any]) -> Change:
    """Return a change that computes `name` from the other values, if `name` has no value."""
    return compute_argument(name, value, absent(name))


def when(condition: Predicate, **constants: Any) -> Change:
    """Return a change that sets names to fixed values if `condition` holds."""
    return partial(set_constants, condition, constants)


def follow(name: str, source: str) -> Change:
    """Return a change that gives `name` the value of `source` if `source` has one."""
    return compute_argument(name, lambda values: getattr(values, source), any_given(source))


def inherit(name: str, source: str) -> Change:
    """Return a change that gives `name` the value of `source` if `name` has no value."""
    return fallback(name, lambda values: getattr(values, source))
