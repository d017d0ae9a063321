"""Options that scripts and recipes set, counted by use: one set in ten of them is ten uses. A use is heard if something is seen
of it, is told if a finding names it, and else it is neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WANTED = 0.9
"""The share of uses that have to be heard."""


@dataclass
class Use:
    """An option that `where` sets, what is seen of it (empty: nothing), and whether a finding names it."""

    where: str
    option: str
    how: str = ""
    told: bool = False

    @property
    def heard(self) -> bool:
        """Whether it is followed; what is told is not counted, whatever else is seen."""
        return bool(self.how) and not self.told


def other(path: str, value: Any, known: Mapping[str, Any]) -> Any:
    """Another value of an option: a known one, the opposite, the double, or a name that nobody knows."""
    if path in known:
        return known[path]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 or 1
    return 2 if path.endswith("_size") else f"nobody.Knows{path.rpartition('.')[2].title()}"


def different(one: Mapping[str, Any], two: Mapping[str, Any], kinds: Sequence[str]) -> str:
    """What is seen otherwise of two runs; empty: nothing."""
    return ", ".join(name for name in kinds if one.get(name) != two.get(name))


def table(uses: Iterable[Use]) -> float:
    """Print what became of each option; the share of uses that are heard."""
    found: dict[str, list[Use]] = {}
    for use in uses:
        found.setdefault(use.option, []).append(use)
    print("\n| option | uses | heard | in findings | what is seen |\n|---|---|---|---|---|")
    for option, own in sorted(found.items(), key=lambda item: -len(item[1])):
        heard, told = sum(use.heard for use in own), sum(use.told for use in own)
        seen = ", ".join(sorted({use.how for use in own if use.heard})[:3])
        print(f"| {option} | {len(own)} | {heard} | {told or ''} | {seen or '**nothing**'} |")
    every = [use for own in found.values() for use in own]
    heard, told = sum(use.heard for use in every), sum(use.told for use in every)
    share = heard / len(every)
    print(
        f"\n{heard} of {len(every)} uses are heard ({share:.1%}), {told} are in findings, {len(every) - heard - told} neither"
    )
    for use in every:
        if not use.heard and not use.told:
            print(f"- {use.where}: {use.option}")
    return share
