"""Tables of checks: which checks of a stack hold for a config, as refusals and as findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache

from bridge.stack.checks import Check, Remark, Seen
from bridge.stack.findings import Finding, Origin
from bridge.stack.releases import Releases
from bridge.stack.rules import Effect


class Checks:
    """The checks that one stack makes at one point of its start, in the order of its source."""

    def __init__(self, releases: Releases, *rows: Check) -> None:
        self.releases, self.rows = releases, rows

    def __iter__(self) -> Iterator[Check]:
        return iter(self.rows)

    @cache  # noqa: B019 - tables live as long as the program
    def at(self, version: str) -> tuple[Check, ...]:
        """The checks that a release makes."""
        return self.releases.having(version, self.rows)

    def holding(self, view: Seen) -> Iterator[Check]:
        """The checks that hold for these values."""
        for row in self.at(view.context.version):
            if any(view[path] is None for path in row.needs):
                continue
            if row.when(view):
                yield row

    def refusal_lines(self, view: Seen) -> Iterator[str]:
        """A line for each check that holds: the path of the setting and the message."""
        return (f"{row.path}: {row.says(view.values)}" for row in self.holding(view))

    def remarks(self, view: Seen, origins: Mapping[str, Origin]) -> Iterator[Finding]:
        """A finding for each check that holds."""
        for row in self.holding(view):
            finding = remark(row.path, row.says(view.values), row.effect, view, origins, row.rule)
            yield replace(finding, surprising=row.surprising)


def report_remarks(
    remarks: Iterable[Remark], view: Seen, origins: Mapping[str, Origin]
) -> Iterator[Finding]:
    """Yield a finding for each remark. Remarks are made by code where a check would depend on any
    number of settings, because a row of a table cannot express this.
    """
    for path, message, effect in remarks:
        yield remark(path, message, effect, view, origins)


def remark(
    path: str,
    message: str,
    effect: Effect,
    view: Seen,
    origins: Mapping[str, Origin],
    rule: str = "",
) -> Finding:
    """The finding with `message` on the setting at `path`."""
    return Finding(path, message, effect, view.wrote(path), origin=origins.get(path), rule=rule)
