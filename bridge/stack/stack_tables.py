"""The tables of a stack: its schema, its rules and its releases."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from bridge.plan.kinds import kind
from bridge.plan.section import Section, Values, fields
from bridge.stack.findings import UNKNOWN, Disagreement, Finding
from bridge.stack.releases import Releases
from bridge.stack.rules import Effect, Rule
from bridge.stack.setting_renames import Move

T = TypeVar("T")


class StackTables(ABC):
    """What is known of a stack: its schema, its rules and its releases."""

    name: ClassVar[str]
    title: ClassVar[str]
    model: ClassVar[bool] = True
    """Whether a config of this stack defines the model. If not, the training script defines the
    model, and a translation to such a config loses no model fields.
    """
    coded: ClassVar[bool] = False
    """Whether some settings belong into the training script. Such settings are written to a second
    file, next to the config.
    """
    about: ClassVar[str] = ""
    """The one section of a plan that configs of this stack are about; empty if they are about all
    sections.
    """
    callers: ClassVar[tuple[str, ...]] = ()
    """Stacks whose flags programs that call this one take, so that a launch has settings of both."""
    decides: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the plan fields that a config of this stack decides where such a program calls it."""
    launched: ClassVar[frozenset[str]] = frozenset()
    """Options of a launch that the reader of this stack reads itself."""
    masking: ClassVar[tuple[str, ...]] = ()
    """Settings that leave some tokens out of the loss, so that microbatches have unequal numbers of
    them.
    """
    default_entry: ClassVar[str] = "file"

    @property
    def package(self) -> str:
        """The name of the package with the stack's modules."""
        return str(sys.modules[type(self).__module__].__package__)

    @property
    @abstractmethod
    def schema(self) -> type[Section]:
        """The pydantic schema of all settings that can be given."""

    @property
    @abstractmethod
    def rules(self) -> tuple[Rule, ...]:
        """The rules that convert between settings of the stack and plan fields."""

    @property
    @abstractmethod
    def versions(self) -> tuple[str, ...]:
        """Known releases, oldest first."""

    @property
    def newest(self) -> str:
        """The release that is used if none is named: the newest one published."""
        return Releases(self.name, self.versions).newest

    @property
    def moves(self) -> tuple[Move, ...]:
        """Settings that releases renamed or replaced, oldest first."""
        return ()

    def knows(self, path: str, value: Any, version: str, entry: str) -> bool:
        """Return whether release `version` has the setting `path` and lets the entry point `entry`
        set it to `value`.
        """
        return True

    def defaults(self, version: str) -> Mapping[str, Any]:
        """Return the defaults of a release by path. The default is None if the setting has none, or
        if the release derives the value.
        """
        entries = fields(self.schema).items()
        return {
            path: leaf.default
            for path, leaf in entries
            if self.knows(path, leaf.default, version, self.default_entry)
        }

    def accepts(self, path: str) -> str:
        """The values that the field at `path` accepts, in words."""
        return kind(fields(self.schema)[path].annotation)

    def spellings(self, path: str) -> tuple[str, ...]:
        """Return the names by which source files spell the field at `path`. The result is empty if
        files use the path itself.
        """
        return ()

    def section(self, path: str) -> str:
        """The heading under which a list of all fields shows the field at `path`."""
        return path.rpartition(".")[0] or "top level"

    @property
    def disagreements(self) -> tuple[Disagreement, ...]:
        """Places at which the stack's documentation and its code disagree."""
        return ()

    def editor_schema(self) -> dict[str, Any]:
        """The JSON Schema of a file of the stack, for editors and other programs."""
        return self.schema.model_json_schema()

    def as_section(self, settings: Values) -> Section:
        """`settings` as an instance of the schema."""
        return self.schema.model_validate(settings.as_nested())

    def release(self, version: str | None) -> str:
        """Return `version` if this release is known, and the newest known release for None. Raises
        `VersionError` for an unknown release.
        """
        if version is None:
            return self.newest
        Releases(self.name, self.versions).place(version)
        return version

    def nearest(self, version: str) -> tuple[str, Finding]:
        """Return the known release that is used in place of the unknown `version`, and a finding
        that says so.

        Raises `VersionError` if `version` is not a version.
        """
        near = Releases(self.name, self.versions).near(version)
        message = (
            f"{self.title} {version} is not known; the config is read as one of {near},"
            " so changes between these two releases are not noticed"
        )
        return near, Finding("release", message, Effect.NUMBERS, given=True, rule=UNKNOWN)

    def nullable(self, path: str, version: str) -> bool:
        """Whether None is a value of the setting at `path` for that release."""
        return True

    def find_part(self, part: str, name: str, default: T) -> T:
        """Return the value `name` of the dialect's module `part`, or `default` for a dialect in one module."""
        return default
