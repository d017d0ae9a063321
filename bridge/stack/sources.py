"""A run is a stack of sources: which of them sets each value, which it overrules, and which nobody hears."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.files.shown import show_value
from bridge.stack.findings import Finding, Origin
from bridge.stack.rules import Effect

DEFAULT = ", default"
"""The end of the name of a source that is a program's default."""


@dataclass(frozen=True, slots=True)
class Said:
    """What one source says: the setting as it is spelled there, its value, and the place. `source` is
    a file or a program; empty for the file that the user gave. Lines are counted from 1.
    """

    setting: str
    value: Any
    source: str = ""
    line: int | None = None

    @property
    def place(self) -> str:
        """The place as `file:line`, `line N` for the file that the user gave, or the program."""
        if not self.line:
            return self.source
        return f"{self.source}:{self.line}" if self.source else f"line {self.line}"


class Placed(dict[str, Any]):
    """Settings of a source by name; `places` has what each says and where. `lost` are those that do
    not count, as the same or another source says them again, or as no program is known to read them. `unknown` has
    settings whose value in force nobody knows, as a program changes it.
    """

    def __init__(
        self, values: Mapping[str, Any], places: Mapping[str, Said], lost: Iterable[Unheard] = ()
    ) -> None:
        super().__init__(values)
        self.places, self.lost = dict(places), list(lost)
        self.unknown: dict[str, Said] = {}

    def overlay(self, other: Mapping[str, Any], rule: str = "the later source counts") -> Placed:
        """Return these settings with those of `other`, which count where both have one by `rule`."""
        places, before = (other.places, other.lost) if isinstance(other, Placed) else ({}, [])
        lost = [
            Unheard(self.places[name], f"{said.setting} ({said.place}) is read instead: {rule}")
            for name, said in places.items()
            if name in self.places and self[name] != other[name]
            if not self.places[name].source.endswith(DEFAULT)
        ]
        found = Placed({**self, **other}, {**self.places, **places}, [*self.lost, *before, *lost])
        unknown = (self.unknown, getattr(other, "unknown", {}))
        found.unknown = {
            name: one for name, one in unknown[0].items() if name not in other
        } | unknown[1]
        return found


@dataclass(frozen=True, slots=True)
class Claim:
    """What a source beside the stack's own file says of the setting `path`.

    `value` is what the setting has if this source is heard; with `part`, what the setting's item
    of this index has. `advice` says what follows where it is not heard, and what to do.
    """

    path: str
    value: Any
    said: Said
    advice: str
    effect: Effect = Effect.NUMBERS
    part: int | None = None

    def is_met_by(self, value: Any) -> bool:
        """Whether the setting's value in force is the one of this claim."""
        if self.part is not None and isinstance(value, list | tuple):
            value = value[self.part]
        own, found = (list(one) if isinstance(one, tuple) else one for one in (self.value, value))
        return bool(own == found)


@dataclass(frozen=True, slots=True)
class Unheard:
    """What a source says and nobody hears, and why."""

    said: Said
    why: str
    effect: Effect = Effect.NUMBERS


@dataclass(frozen=True, slots=True)
class Settled:
    """A setting of the run: its value in force, who set it, the claims that were overruled, and a
    reason where the value alone says too little.
    """

    setting: str
    value: Any
    winner: Said
    overruled: tuple[Claim, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Sources:
    """What the sources of a run beside the stack's own file say.

    `winners` has, by path, who set a value that is not the file's. `values` are values in force
    that differ from the config's effective ones. `own` are settings that a host of the stack takes
    itself; the paths in `hidden` stand for them in the config.
    """

    claims: tuple[Claim, ...] = ()
    winners: Mapping[str, Said] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    unheard: tuple[Unheard, ...] = ()
    own: tuple[Settled, ...] = ()
    hidden: frozenset[str] = frozenset()

    def beside(self, launcher: Sources) -> Sources:
        """Return these sources of a program next to those of its launcher, whose winners and values count where
        the program has none.
        """
        own = {(one.path, one.said.setting) for one in self.claims}
        return replace(
            self,
            claims=(
                *self.claims,
                *(one for one in launcher.claims if (one.path, one.said.setting) not in own),
            ),
            winners={**launcher.winners, **self.winners},
            values={**launcher.values, **self.values},
            unheard=(*self.unheard, *launcher.unheard),
        )


NO_SOURCES = Sources()
"""The sources of a run that is told by one file alone."""


@dataclass(frozen=True)
class Resolution:
    """All settings of a run, and everything that was said and is not heard."""

    settings: tuple[Settled, ...]
    unheard: tuple[Unheard, ...]


@dataclass(frozen=True)
class ResolvedRun:
    """A resolved run: the program that takes its settings by name, title and release, the number of its ranks
    if known, the source of its defaults, the resolution, and findings.
    """

    name: str
    title: str
    version: str
    world_size: int | None
    default: str
    resolution: Resolution
    findings: tuple[Finding, ...] = ()


def report_contradictions(found: Resolution) -> Iterator[Finding]:
    """Yield a finding for each value that another source overrules, and for each that nobody hears."""
    for setting in found.settings:
        for claim in setting.overruled:
            winner = setting.winner
            # Next to a place in another file, a line alone is not enough.
            apart = claim.said.source != winner.source and winner.setting != setting.setting
            parts = (winner.setting if apart else "", winner.place)
            at = f" ({', '.join(filter(None, parts))})" if winner.place else ""
            message = (
                f"{show_value(claim.said.value)} is not used: {setting.setting}"
                f" {show_value(setting.value)}{at} wins; {claim.advice}"
            )
            yield _finding(claim.said, message, claim.effect, "overruled", setting.winner)
    for one in found.unheard:
        message = f"{show_value(one.said.value)} is not used: {one.why}"
        yield _finding(one.said, message, one.effect, "unheard", one.said)


def _finding(said: Said, message: str, effect: Effect, kind: str, winner: Said) -> Finding:
    # What has no line, such as a variable, is shown at the winner's.
    at = said if said.line or not winner.line else winner
    return Finding(
        said.setting,
        message,
        effect,
        given=effect is not Effect.NONE,
        origin=Origin(at.line, "", at.source),
        rule=f"{said.setting.lstrip('-')}/{kind}",
        surprising=True,
    )
