"""Dialects in a package of their own, of which each part is imported when it is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from bridge.errors import VersionError
from bridge.plan.section import Section
from bridge.stack.checks import Check
from bridge.stack.dialect import Config, Dialect
from bridge.stack.findings import Disagreement, Finding
from bridge.stack.memory_rules import MemoryRules
from bridge.stack.rules import Rule
from bridge.stack.setting_renames import Move
from bridge.stack.stack_tables import T


class PackagedDialect(Dialect):
    """A dialect in a package of its own, whose parts are imported when they are needed.

    The package's module `schema` has the schema as `SCHEMA`, `rules.table` has the rules as `table()`,
    and `releases` has the known releases as `KNOWN`. `suffixes` gives the format of a file by its
    suffix.
    """

    suffixes: ClassVar[Mapping[str, str]] = {}

    @cached_property
    def schema(self) -> type[Section]:
        """The schema: the settings of all releases, with their types."""
        section: type[Section] = self._part("schema").SCHEMA
        return section

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that convert between settings of the stack and plan fields."""
        return tuple(self._part("rules.table").table())

    @cached_property
    def versions(self) -> tuple[str, ...]:
        """Known releases, oldest first."""
        return tuple(self._part("releases").KNOWN)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The result of `moves()` in the dialect's module `releases`; empty if there is no such
        function.
        """
        return self.find_part("releases", "moves", tuple)()

    @property
    def disagreements(self) -> tuple[Disagreement, ...]:
        """The constant `DISAGREEMENTS` of the dialect's module `documentation`; empty if there is
        none.
        """
        return self.find_part("documentation", "DISAGREEMENTS", ())

    @property
    def checks(self) -> Iterable[Check]:
        """The constants `REFUSALS` of the dialect's module `refusals` and `CHECKS` of the module
        `checks`.
        """
        return (
            *self.find_part("refusals", "REFUSALS", ()),
            *self.find_part("checks", "CHECKS", ()),
        )

    def memory_rules(self, config: Config) -> MemoryRules:
        """The result of `rules` in the dialect's module `memory`; the native engine's rules if there
        is no such function.
        """
        return self.find_part("memory", "rules", super().memory_rules)(config)

    def inspect(self, config: Config) -> tuple[Finding, ...]:
        """The findings on `config` that the function `inspect` in the dialect's module `checks`
        returns.
        """
        return tuple(self._part("checks").inspect(config))

    def format_of(self, path: str | Path | None) -> str | None:
        """Return the format of the suffix of `path` in `suffixes`. Return None without a path, or
        if the suffix is not in `suffixes`.
        """
        return self.suffixes.get(Path(path).suffix.lower()) if path is not None else None

    def chosen(self, format: str | None) -> str:
        """Return `format`, or the usual format for None. Raises `VersionError` if the dialect
        cannot write `format`.
        """
        if format not in (None, *self.formats, *self.alike):
            raise VersionError(
                f"{self.name}: cannot write {format}; it writes {' and '.join(self.formats)}"
            )
        return format or self.formats[0]

    def recognises(self, data: Any) -> int:
        """Return what the dialect's module `recognition` says of parsed `data`."""
        return int(self._part("recognition").score(data))

    def _part(self, name: str) -> ModuleType:
        return import_module(f"{self.package}.{name}")

    def find_part(self, part: str, name: str, default: T) -> T:
        """Return the value `name` of the dialect's module `part`, or `default` if there is no such
        module or name.
        """
        # `find_spec` tells a module that is missing from one whose own import fails: that error
        # must be seen.
        there = find_spec(f"{self.package}.{part}")
        value: T = getattr(self._part(part), name, default) if there else default
        return value
