"""Words for rules: conditions on the values of a group, values made of them, and sides of a rule that give fields
these values.

A condition and a value are functions of the group, so a function with a name stands wherever a word does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bridge.stack.effects import Effect
from bridge.stack.rules import Context, Group, Side

Condition = Callable[[Group], bool]
Truth = Callable[[Group], object]
"""A condition by any value: false, 0 and nothing do not hold."""
Value = Callable[[Group], Any]


def on(path: str) -> Condition:
    """Whether a setting has a value other than false, 0 and nothing."""
    return lambda values: bool(values.get(path))


def has_value(path: str) -> Condition:
    """Whether a setting has a value."""
    return lambda values: values.get(path) is not None


def has_field(path: str) -> Condition:
    """Whether the release has a setting, whatever its value is."""
    return lambda values: path in values


def above(path: str, bound: float = 1) -> Condition:
    """Whether a setting is a number above `bound`, which is not negative."""
    return lambda values: (values.get(path) or 0) > bound


def among(path: str, *choices: Any) -> Condition:
    """Whether the value of a setting is one of `choices`; None is the value of one that is not set."""
    return lambda values: values.get(path) in choices


def beyond(path: str, *choices: Any) -> Condition:
    """Whether a setting has a value that is none of `choices`."""
    return lambda values: values.get(path) not in (None, *choices)


def off(path: str) -> Condition:
    """Whether a setting is false; one that is not set is not."""
    return lambda values: values.get(path) is False


def no(condition: Truth) -> Condition:
    """Whether `condition` does not hold."""
    return lambda values: not condition(values)


def every(*conditions: Truth) -> Condition:
    """Whether all conditions hold. A later one is asked only if those before it hold."""
    return lambda values: all(condition(values) for condition in conditions)


def some(*conditions: Truth) -> Condition:
    """Whether one of the conditions holds. A later one is asked only if those before it do not."""
    return lambda values: any(condition(values) for condition in conditions)


def of(path: str, unset: Any = None) -> Value:
    """The value of a setting, and `unset` in place of false, 0 and nothing, unless that is None."""
    if unset is None:
        return lambda values: values.get(path)
    return lambda values: values.get(path) or unset


def nonzero(path: str) -> Value:
    """The value of a setting, and None in place of 0."""
    return lambda values: values.get(path) or None


def look_up(table: Mapping[Any, Any], path: str, other: Any = None) -> Value:
    """The value that `table` has for the value of a setting, and `other` where it has none."""
    return lambda values: table.get(values.get(path), other)


def first(*paths: str) -> Value:
    """The value of the first of the settings that has one."""
    return lambda values: next(
        (values[path] for path in paths if values.get(path) is not None), None
    )


def either(condition: Truth, value: Any, other: Any) -> Value:
    """`value` where the condition holds, and else `other`; either may be a function of the group."""
    return lambda values: _value(value if condition(values) else other, values)


def effect_if(
    condition: Truth, effect: Effect, other: Effect = Effect.NONE
) -> Callable[[Group], Effect]:
    """`effect` where the condition holds, and else `other`."""
    return lambda values: effect if condition(values) else other


def give(fields: str | Mapping[str, Any], value: Any = None, when: Truth | None = None) -> Side:
    """The side of a rule that gives a field this value, or each of several fields its own, where the condition
    holds. A value may be a function of the group.
    """
    rows = {fields: value} if isinstance(fields, str) else fields

    def side(values: Group, context: Context) -> Group:
        if when and not when(values):
            return {}
        return {path: _value(one, values) for path, one in rows.items()}

    return side


def spread(fields: tuple[str, ...], path: str) -> Side:
    """The side of a rule that gives the fields the values of a tuple, each the one at its place. Without a
    tuple they stay open.
    """

    def side(values: Group, context: Context) -> Group:
        return dict(zip(fields, values.get(path) or (None,) * len(fields), strict=True))

    return side


def _value(value: Any, values: Group) -> Any:
    return value(values) if callable(value) else value
