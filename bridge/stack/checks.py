"""Checks: rows of a table. Each row stands for a place in a stack's source where the stack refuses
or ignores a setting, gets it wrong, or stops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.files.shown import brief
from bridge.stack.rules import Context, Effect

Condition = Callable[[Any], object]
WORDS = 5
"""Number of words that are taken from the beginning of a check's message to form the last part of
the check's id.
"""

NAME = re.compile(r"\{([a-z0-9_.]+)\}")
"""Matches the path of a value in braces."""

LONG = 200
"""Characters of a value beyond which a message does not show the value as a whole."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The input of a check: the effective values and the given values by path. `context` has the
    release and the number of ranks.
    """

    values: Mapping[str, Any]
    given: Mapping[str, Any]
    context: Context

    def __getitem__(self, path: str) -> Any:
        return self.values.get(path)

    def wrote(self, *paths: str) -> bool:
        """Whether one of `paths`, or a key below it, was given."""
        return any(
            key == path or key.startswith(path + ".") for path in paths for key in self.given
        )


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """One case in which a stack refuses, ignores or misuses a setting, in the releases [since,
    until).

    `path` is the setting, and `when` decides from the values whether the check holds. `message`, a
    format string over the values, says what is wrong and what to do; `effect` is the effect on the
    run. `place` is the function in the stack's source that the check is taken from. A check is
    skipped if a value in `needs` is None. If a check with `last` holds, the checks after it are
    skipped, because the stack stops there. `surprising`: see `Finding`.
    """

    path: str
    when: Condition
    message: str
    effect: Effect
    place: str
    since: str = ""
    until: str = ""
    needs: tuple[str, ...] = ()
    last: bool = False
    name: str = ""
    surprising: bool = False

    @property
    def rule(self) -> str:
        """The id of the check, which never changes. If the message of a check changes, `name` holds
        the last part of the old id.
        """
        # Values in braces are no part of the id: they are names of fields, and releases rename
        # those.
        words = re.findall(r"[a-z0-9_]+", re.sub(r"\{.*?\}", "", self.message).lower())
        return f"{self.path}/{self.name or '-'.join(words[:WORDS])}"

    @property
    def window(self) -> str:
        """The releases in which the check applies, in words; empty for all releases."""
        ends = (("since", self.since), ("before", self.until))
        return ", ".join(f"{word} {end}" for word, end in ends if end)

    def says(self, values: Mapping[str, Any]) -> str:
        """The message, with `values` in place of the fields in braces. A missing value is shown as
        None.
        """
        texts = _Shown(values)
        # Not by `format`: a path has dots, which `format` takes for attributes.
        return NAME.sub(lambda match: str(texts[match[1]]), self.message)


@dataclass(frozen=True, slots=True)
class Term:
    """A condition on one setting. `words` states the condition in a message."""

    path: str
    holds: Callable[[Any], object]
    words: str

    def __call__(self, view: Any) -> bool:
        return bool(self.holds(view[self.path]))


def on(path: str) -> Term:
    """A term that holds if the setting is on, that is, if Python takes the setting's value for
    true.
    """
    return Term(path, bool, path)


def set_(path: str) -> Term:
    """A term that holds if the setting is not None."""
    return Term(path, lambda value: value is not None, f"{path} {{{path}}}")


def equals(path: str, target: Any) -> Term:
    """A term that holds if the setting has the value `target`."""
    return Term(path, lambda value: value == target, f"{path} {target}")


def above(path: str, limit: float) -> Term:
    """A term that holds if the setting is above `limit`."""
    return Term(path, lambda value: value > limit, f"{path} {{{path}}}")


def _term(term: Term | str) -> Term:
    return on(term) if isinstance(term, str) else term


def excludes(
    first: Term | str,
    other: Term | str,
    place: str,
    advice: str = "keep one of them",
    **window: Any,
) -> Check:
    """Return a check that holds if the terms `first` and `other` both hold."""
    one, beside = _term(first), _term(other)
    words = one.words.removeprefix(one.path)
    message = f"found{words} with {beside.words}; {advice}"
    return Check(
        one.path, lambda view: one(view) and beside(view), message, Effect.STOPS, place, **window
    )


def needs(first: Term | str, other: Term | str, place: str, advice: str, **window: Any) -> Check:
    """Return a check that holds if the term `first` holds and the term `other` does not."""
    one, beside = _term(first), _term(other)
    words = one.words.removeprefix(one.path)
    # A value of the missing setting says nothing here: either it has none, or the reader only needs
    # the name of the switch.
    without = beside.path if beside.holds is bool or "{" in beside.words else beside.words
    message = f"found{words} without {without}; {advice}"
    return Check(
        one.path,
        lambda view: one(view) and not beside(view),
        message,
        Effect.STOPS,
        place,
        **window,
    )


def multiple_of(path: str, divisor: str, place: str, **window: Any) -> Check:
    """Return a check that holds if the value at `path` is no multiple of the value at `divisor`.
    The check is skipped if one of the two is None.
    """
    message = f"found {{{path}}}; expected a multiple of {divisor} ({{{divisor}}})"
    return Check(
        path,
        lambda view: view[path] % view[divisor] != 0,
        message,
        Effect.STOPS,
        place,
        needs=(path, divisor),
        **window,
    )


def positive(path: str, place: str, **window: Any) -> Check:
    """Return a check that holds if the value at `path` is 0 or less. The check is skipped if the
    value is None.
    """
    message = f"found {{{path}}}; expected a positive number"
    return Check(
        path, lambda view: view[path] <= 0, message, Effect.STOPS, place, needs=(path,), **window
    )


def one_of(path: str, choices: tuple[Any, ...], place: str, **window: Any) -> Check:
    """Return a check that holds if the value at `path` is none of the allowed values."""
    words = [str(value) for value in choices if value is not None]
    choices_text = " or ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]
    return Check(
        path,
        lambda view: view[path] not in choices,
        f"found {{{path}}}; expected {choices_text}",
        Effect.STOPS,
        place,
        **window,
    )


class _Shown(dict[str, Any]):
    """Values as a message shows them: a long text is cut, and a value that is missing is None."""

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        return brief(value, LONG) if isinstance(value, str) else value


Remark = tuple[str, str, Effect]
"""A remark made by code: the path of a setting, a message about it, and the effect on the run."""
