"""Argument values of Megatron as attributes, and the statements that check and change them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.stack.checks import Check


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


def member_name(value: Any) -> str:
    """Return the name of an enumeration's member, without the name of the enumeration before it."""
    return str(value).rpartition(".")[2]


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
