"""What a stack cannot start without, and what of it a config lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.findings import Finding
from bridge.rules import Effect, How

Given = Mapping[str, Any]


def _never(given: Given) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Need:
    """One of `paths` has to be set (the first is the one to add), except where `unless` holds of what is given.

    `words` say who stops without it, `place` where in its source. `sized` is set for what the stack's own parser refuses, as
    numbers hang on it: then a fragment without it is one with other numbers, else one with the same.
    """

    paths: tuple[str, ...]
    words: str
    place: str
    sized: bool = True
    unless: Callable[[Given], object] = _never
    example: str = ""

    def met(self, given: Given) -> bool:
        """Whether it is set, or not needed."""
        return any(said(given, path) for path in self.paths) or bool(self.unless(given))


def said(given: Given, path: str) -> bool:
    """Whether a setting, or one below it, is given: also inside of a section that is kept as it stands."""
    if given.get(path) is not None or any(name.startswith(path + ".") for name in given):
        return True
    section, _, name = path.rpartition(".")
    free = given.get(f"{section}.*" if section else "*")
    return isinstance(free, Mapping) and free.get(name) is not None


def missing(given: Given, needs: Iterable[Need], whole: bool, spelled: Callable[[str], str] = str) -> Iterator[Finding]:
    """A finding for each need that is not met. A `whole` launch stops there; the rest of a fragment stands elsewhere."""
    for need in needs:
        if not need.met(given):
            effect = Effect.STOPS if whole else Effect.NUMBERS if need.sized else Effect.NONE
            ways = " or ".join(spelled(path) for path in need.paths)
            what = f"add {ways}{need.example}"
            yield Finding(need.paths[0], f"{what}: {need.words}", effect, how=How.MISSING, cause=need.words)
