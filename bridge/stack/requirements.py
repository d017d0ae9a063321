"""Settings that a stack needs to start, and the search for the settings that a config lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.stack.findings import Finding
from bridge.stack.rules import Effect, How

Given = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Need:
    """A requirement: one of `paths` must be set, unless `unless` is true for the given values.
    Reports propose to add the first path.

    `words` say what stops without the setting, and `place` names the place in the stack's source.
    `sized` is true if numbers depend on the setting. `sized` decides the effect if only a fragment
    of a launch is known and this fragment lacks the setting: different numbers if `sized` is true,
    else none.
    """

    paths: tuple[str, ...]
    words: str
    place: str
    sized: bool = True
    unless: Callable[[Given], object] = lambda settings: False
    example: str = ""

    def met(self, settings: Given) -> bool:
        """Return whether one of the paths is set, or `unless` makes the setting unnecessary."""
        return any(is_given(settings, path) for path in self.paths) or bool(self.unless(settings))


def is_given(settings: Given, path: str) -> bool:
    """Return whether the setting at `path`, or a setting below it, is given. The setting may also
    be inside a section that the schema keeps as one mapping.
    """
    if settings.get(path) is not None or any(name.startswith(path + ".") for name in settings):
        return True
    # Schemas keep the unknown keys of a section as one mapping at `section.*`.
    section, _, name = path.rpartition(".")
    free = settings.get(f"{section}.*" if section else "*")
    return isinstance(free, Mapping) and free.get(name) is not None


def missing(
    settings: Given, needs: Iterable[Need], whole: bool, spell: Callable[[str], str] = str
) -> Iterator[Finding]:
    """Yield a finding for each requirement that is not met.

    A `whole` launch stops without the setting. A fragment of a launch does not stop, because other
    files may set it.
    """
    for need in needs:
        if not need.met(settings):
            if whole:
                effect = Effect.STOPS
            elif need.sized:
                effect = Effect.NUMBERS
            else:
                effect = Effect.NONE
            ways = " or ".join(spell(path) for path in need.paths)
            what = f"add {ways}{need.example}"
            yield Finding(
                need.paths[0], f"{what}: {need.words}", effect, how=How.MISSING, cause=need.words
            )
