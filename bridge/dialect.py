"""Dialects: schema + table + formats of one stack, and the configs read with them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from bridge import limits
from bridge.checks import Check
from bridge.config import Section, Values, fields
from bridge.errors import BridgeError, ConfigError, TranslationError, VersionError
from bridge.findings import UNKNOWN, Disagreement, Finding, Origin
from bridge.kinds import kind
from bridge.launching import fed, torchrun
from bridge.moves import Move
from bridge.refusing import every
from bridge.releases import Releases
from bridge.rules import Context, Effect, Rule

if TYPE_CHECKING:
    from bridge.files import Original
    from bridge.state.formats import Format
    from bridge.state.hub import Hub
    from bridge.state.names import Naming


@dataclass(frozen=True)
class Reading:
    """What a reader found in a source, before its meaning is worked out.

    `given` holds typed values by schema path, exactly those that the user wrote; `entry` names the entry point that such a
    source goes through (it decides which defaults and derivations apply). `world_size` is there where the source says it.
    `gaps` are what the source leaves open and may settle what else is missing.
    """

    given: Values
    entry: str
    origins: Mapping[str, Origin] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    opaque: Mapping[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    gaps: tuple[str, ...] = ()

    def unless(self, problems: Iterable[str], words: tuple[str, ...] = ()) -> Reading:
        """The reading itself; where there are `problems`, one error with all of them that holds what could be read."""
        try:
            ConfigError.raise_if(problems)
        except ConfigError as error:
            error.part, error.words = self, words
            raise
        return self


@dataclass(frozen=True)
class Written:
    """A config in its stack's own form: the text of the file, and what the stack keeps outside of it.

    `code` is what belongs into the training script, as data, and `snippet` the same as Python; `environment` holds the
    variables that the run needs, `launch` the command. `file` is what the last three call the file; where it holds
    `arguments`, these stand behind the command. `beside` are further texts by the suffix of their files.
    """

    dialect: str
    text: str
    format: str
    code: Mapping[str, Any] = field(default_factory=dict)
    snippet: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    launch: tuple[str, ...] = ()
    file: str = ""
    arguments: bool = False
    beside: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> tuple[str, ...]:
        """The command with all that it is given; nothing where no command starts the file as it is."""
        return fed(self.launch, self.file, self.text) if self.arguments else self.launch

    def named(self, name: str) -> Written:
        """The same for a file of that name."""
        launch = tuple(name if word == self.file else word for word in self.launch)
        snippet = self.snippet.replace(json.dumps(self.file), json.dumps(name)) if self.file else self.snippet
        return replace(self, launch=launch, snippet=snippet, file=name)


@dataclass(frozen=True)
class Saves:
    """How a run of a config keeps its checkpoints: their format, and where it has them, level of sharding, data ranks and the
    number format of its weights; whether its schedule counts samples. `schedule` is the state of a scheduler that the run's
    script makes as a plan means it, `instead` what the config has to say otherwise (None: nothing), and `findings` what
    that does; `client` is what its own script would have saved beside, where the checkpoint has none, and `config` what it has
    as its config.
    """

    format: str
    level: int | None = None
    ranks: int | None = None
    dtype: str | None = None
    samples: bool = False
    schedule: Mapping[str, Any] | None = None
    client: Mapping[str, Any] = field(default_factory=dict)
    instead: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Program:
    """A config with the whole script that starts it beside it, and what only the user can add."""

    written: Written
    lacking: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Config:
    """A config of one stack: `given` as the user wrote it, `effective` as the stack would see it; never both in one place."""

    dialect: Dialect
    given: Values
    version: str
    world_size: int | None = None
    entry: str = ""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    remarks: tuple[Finding, ...] = ()
    opaque: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def context(self) -> Context:
        """Release and world size, as rules see them."""
        return Context(self.version, self.world_size)

    @cached_property
    def effective(self) -> Values:
        """What the stack would leave of `given`: computed, never stored, never written. Raises `BridgeError` if it refuses."""
        return self.dialect.effective(self)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What the stack accepts and then ignores or gets wrong, and what was odd about the source."""
        stopped = (finding for finding in self.missing if finding.effect is Effect.STOPS)
        return (*self.remarks, *self.dialect.inspect(self), *self.dialect.beyond(self), *stopped)

    @cached_property
    def missing(self) -> tuple[Finding, ...]:
        """What its stack cannot start without and it does not say.

        For a part of a launch, where that stands elsewhere, none of it stops the run, and `findings` leave it out.
        """
        return tuple(self.dialect.missing(self))

    @property
    def typed(self) -> Section:
        """`given` as an instance of the dialect's pydantic schema."""
        return self.dialect.typed(self.given)

    def text(self, format: str | None = None) -> str:
        """The config as text in one of the dialect's formats."""
        return self.dialect.render(self, format).text

    def to_object(self) -> Any:
        """The stack's own config object, of the installed release; `VersionError` if that is another one."""
        return self.dialect.to_object(self)


class Dialect(ABC):
    """One stack: its schema, its table, and its formats. Subclasses live in `compat/<name>/`."""

    name: ClassVar[str]
    title: ClassVar[str]
    formats: ClassVar[tuple[str, ...]]
    rewrites: ClassVar[tuple[str, ...]] = ()
    """Formats whose text is kept, comments and all, where a config comes back into it."""
    model: ClassVar[bool] = True
    """Whether its config defines the model; else the training script brings it, and loses nothing that a config says of it."""
    coded: ClassVar[bool] = False
    """Whether a part of what its configs mean stands in the training script, and is kept beside a file."""
    about: ClassVar[str] = ""
    """The one section of a plan that its config is about; it leaves the others to whoever uses it. Empty: all of them."""
    config_type: ClassVar[type[Config]] = Config
    loads: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Formats of checkpoints that its engine goes on from, each with the settings that this takes."""
    native_parameters: ClassVar[str | None] = None
    """Names that they have where the native engine trains the model that its config describes."""
    scheduled: ClassVar[tuple[str, ...]] = ()
    """Settings of an optimizer that its scheduler sets in each step by the config, whatever a checkpoint has."""
    grouping: ClassVar[bool] = False
    """Whether a script of its users builds the optimizer's groups, any groups of parameters; else the stack makes its own."""
    scoped: ClassVar[bool] = True
    """Whether its optimizer, where it goes on from a checkpoint, spares what the config takes out of weight decay."""
    spared: ClassVar[tuple[str, ...]] = ()
    """Words of `--code` that say of a script what no file does: biases and norms are in a group without weight decay."""
    by_place: ClassVar[bool] = False
    """Whether its own checkpoints find parameters by their place in the optimizer's groups, of which another stack has others."""

    @property
    @abstractmethod
    def schema(self) -> type[Section]:
        """The pydantic schema of what can be given."""

    @property
    @abstractmethod
    def rules(self) -> tuple[Rule, ...]:
        """The table to and from `Plan`."""

    @property
    @abstractmethod
    def versions(self) -> tuple[str, ...]:
        """Known releases, oldest first."""

    @property
    def newest(self) -> str:
        """The release that is taken where none is named: the newest that is out."""
        return Releases(self.name, self.versions).newest

    @abstractmethod
    def parse(self, source: Any, version: str, lenient: bool) -> Reading:
        """Read `source` (path, text, mapping, list of flags, live object) into typed given values."""

    @abstractmethod
    def effective(self, config: Config) -> Values:
        """What the stack's own entry point would leave of `config.given`; raises `BridgeError` with every reason to refuse."""

    @abstractmethod
    def render(self, config: Config, format: str | None = None) -> Written:
        """The config as a file of its stack, and what belongs beside the file."""

    def program(self, written: Written, config: Config, plan: Mapping[str, Any], model: Config | None) -> Program:
        """`written`, whose file has a name, with the script that starts it; `model` is its model's own config, if it is known."""
        raise BridgeError(f"--script: no script is written for {self.title}; drop it, and start what the report names")

    def held(self, plan: Mapping[str, Any], model: Config | None) -> frozenset[str]:
        """Fields of the plan's model that the script of `program` holds, where the model's own config has no key for them."""
        return frozenset()

    def saves(self, config: Config, hub: Hub) -> Saves:
        """How a run of `config` keeps its checkpoints, where one is to be made of `hub`. Raises `BridgeError` if none can."""
        raise BridgeError(f"move: no checkpoint is written for {self.title} yet; use `stagebridge checkpoint convert`")

    def parameters(self, config: Config) -> str | None:
        """The names that parameters have in a run of `config`; None: those of the model that its script brings."""
        return None

    def grouped(self, file: str) -> Mapping[str, Any]:
        """Settings by which a config says that its script builds the optimizer's groups from `file`."""
        return {}

    def resuming(self, written: Written, folder: str, groups: str = "") -> Written:
        """`written` with the words by which its run goes on from the checkpoint in `folder`, with the groups of a file."""
        return written

    def natively(self, written: Written, world: int, folder: str, groups: str = "", model: str = "") -> Written:
        """`written` as the native engine runs it on so many ranks, from the checkpoint in `folder`, with the groups of a file and
        the model of a folder (or "file": the one that the config states).
        """
        told = [word for option, name in (("--model", model), ("--groups", groups)) if name for word in (option, name)]
        launch = torchrun(world, "-m", "stagebridge", "train", written.file, "--resume", folder, *told)
        return replace(written, launch=launch, arguments=False, snippet="", environment={"PYTHONSAFEPATH": "1"})

    @property
    def moves(self) -> tuple[Move, ...]:
        """What releases came to say in other words, oldest first."""
        return ()

    def recognises(self, data: Any) -> int:
        """How sure the dialect is that parsed `data` (mapping or list) is its own: 0 no, then rising."""
        return 0

    def mistaken(self, data: Any) -> str:
        """What parsed `data` is where people take it for a config of the stack, and what to name instead; else empty."""
        return ""

    def knows(self, path: str, value: Any, version: str, entry: str) -> bool:
        """Whether a source of kind `entry` can tell that release to set `path` to `value`."""
        return True

    def defaults(self, version: str) -> Mapping[str, Any]:
        """Every path that a release has, with what it takes where nothing is given; None: open, or worked out."""
        known = fields(self.schema).items()
        return {path: leaf.default for path, leaf in known if self.knows(path, leaf.default, version, self.default_entry)}

    def accepts(self, path: str) -> str:
        """What the field at `path` may be, in words."""
        return kind(fields(self.schema)[path].annotation)

    def spellings(self, path: str) -> tuple[str, ...]:
        """How sources spell the field at `path`, where that is not its path."""
        return ()

    def section(self, path: str) -> str:
        """The heading that the field at `path` stands under in a list of all fields."""
        return path.rpartition(".")[0] or "top level"

    @property
    def disagreements(self) -> tuple[Disagreement, ...]:
        """Where the stack's documentation and its code disagree."""
        return ()

    @property
    def checks(self) -> Iterable[Check]:
        """What the stack refuses, ignores or gets wrong, in the order of its source, all releases together."""
        return ()

    @property
    def checkpoints(self) -> tuple[Format, ...]:
        """The formats that the stack writes checkpoints in."""
        return ()

    @property
    def namings(self) -> tuple[Naming, ...]:
        """How the stack names the parameters of models."""
        return ()

    def editor_schema(self) -> dict[str, Any]:
        """What a file of the stack may be, as JSON Schema, for editors and other programs."""
        return self.schema.model_json_schema()

    def inspect(self, config: Config) -> tuple[Finding, ...]:
        """What the stack accepts and then ignores or gets wrong."""
        return ()

    def beyond(self, config: Config) -> Iterable[Finding]:
        """Given numbers that no run can mean."""
        from bridge.bounds import beyond

        package = f"{type(self).__module__}.releases"
        return beyond(config.given, package, config.origins) if type(self).__module__.startswith("compat.") else ()

    def missing(self, config: Config) -> Iterable[Finding]:
        """What the stack cannot start without and `config` lacks."""
        return ()

    def whole(self, config: Config) -> bool:
        """Whether `config` is meant as all that the stack is started with, rather than as a part of it."""
        return False

    def names_run(self, config: Config) -> bool:
        """Whether it names the model and the data that it trains, so that `stacks.opener` has what runs it."""
        return False

    def to_object(self, config: Config) -> Any:
        """The stack's own config object; dialects without one say so."""
        raise VersionError(f"{self.name}: has no config object; write it as {' or '.join(self.formats)}")

    def typed(self, given: Values) -> Section:
        """`given` as an instance of the schema."""
        return self.schema.model_validate(given.nested())

    def release(self, version: str | None) -> str:
        """`version` if it is known, the newest known one for None; `VersionError` otherwise."""
        if version is None:
            return self.newest
        Releases(self.name, self.versions).place(version)
        return version

    def nearest(self, version: str) -> tuple[str, Finding]:
        """The known release that stands for an unknown `version`, and that it does; `VersionError` if that is no version."""
        near = Releases(self.name, self.versions).near(version)
        message = f"{self.title} {version} is not known; taken as {near}, so that what changed between them is not seen"
        return near, Finding("release", message, Effect.NUMBERS, given=True, rule=UNKNOWN)

    def read(self, source: Any, version: str | None = None, world_size: int | None = None, lenient: bool = False) -> Config:
        """Read a source of this stack and check it as that release would; raises `BridgeError` with every problem."""
        release = self.release(version)
        return self.settled(lambda: self.parse(source, release, lenient), release, world_size)

    def settled(self, parse: Callable[[], Reading], version: str, world_size: int | None) -> Config:
        """The config of what `parse` reads, checked. One `ConfigError` has the problems of reading and of checking together."""
        reading = None
        try:
            reading = parse()
            return self._checked(reading, version, world_size)
        except ConfigError as error:
            if (part := reading or error.part) is None:
                raise
            raise self._refusal(error, part, version, world_size) from None

    def _checked(self, reading: Reading, version: str, world_size: int | None) -> Config:
        config = self.build(reading, version, world_size)
        _ = config.effective
        return config

    def _refusal(self, first: ConfigError, part: Reading, version: str, world_size: int | None) -> ConfigError:
        """`first` with what is wrong beside it in the `part` that could be read."""

        def judge(given: Values, world: int | None) -> None:
            self._checked(replace(part, given=given, world_size=world), version, world)

        found = every(first.problems, part.given, world_size or part.world_size, judge)
        error = ConfigError(*(located(problem, part.origins) for problem in found), *part.gaps)
        error.words = first.words
        return error

    def build(self, reading: Reading, version: str, world_size: int | None) -> Config:
        """A config from a reading, without checking it; no number in it is beyond 64 bits, infinite, or none."""
        ConfigError.raise_if(f"{path}: {flaw}" for path, value in reading.given.items() for flaw in _out_of_range(value))
        world_size = world_size or reading.world_size
        return self.config_type(
            self, reading.given, version, world_size, reading.entry, reading.origins, reading.findings, reading.opaque
        )

    def write(self, config: Config, path: str | Path | None = None, format: str | None = None) -> Written:
        """Render `config`, and write it to `path` if there is one; the suffix picks the format. All files or none."""
        from bridge.files import write_all

        written = self.render(config, format or self.format_of(path))
        if path is not None:
            written = written.named(Path(path).name)
            texts = self.files(written, Path(path))
            write_all(texts, texts.keys() - {Path(path)})
        return written

    def rewritten(self, config: Config, original: Original, was: str, path: Path) -> Written | None:
        """`config` written into the text that one of release `was` was read from, what stays the same untouched.

        None where `path` wants another format, or the dialect writes this one anew.
        """
        format = self.format_of(path)
        if format is None or format not in self.rewrites or original.document.format != format:
            return None
        return replace(self.render(config), text=self.reworded(config, original, was), format=format)

    def reworded(self, config: Config, original: Original, was: str) -> str:
        """The text of `original`, read for release `was`, changed so that it says `config`; only for formats in `rewrites`."""
        raise TranslationError(f"{self.name}: writes every file anew")

    def files(self, written: Written, path: Path) -> dict[Path, str]:
        """Everything that belongs on disk for `path`: the config, and beside it what the stack keeps in code."""
        written = written.named(path.name)
        texts = {path: written.text}
        if written.code:
            texts[code_beside(path)] = json.dumps(dict(written.code), indent=2) + "\n"
        if written.snippet:
            texts[path.with_suffix(".code.py")] = written.snippet
        texts |= {path.with_suffix(suffix): text for suffix, text in written.beside.items()}
        return texts

    def format_of(self, path: str | Path | None) -> str | None:
        """The format that the suffix of `path` stands for; None: the dialect's usual one."""
        return None

    def config(
        self, given: Mapping[str, Any], version: str | None = None, world_size: int | None = None, entry: str = ""
    ) -> Config:
        """A config from values by schema path, checked as `read` checks."""
        release = self.release(version)
        config = self.build(Reading(Values(given), entry or self.default_entry), release, world_size)
        _ = config.effective
        return config

    default_entry: ClassVar[str] = "file"


def _out_of_range(value: Any) -> Iterator[str]:
    if isinstance(value, float):
        if not isfinite(value):
            yield f"found {value}; write a finite number"
    elif isinstance(value, int):
        if abs(value) > limits.INTEGER:
            yield "found a whole number beyond 64 bits; write a smaller one"
    elif value is not None and not isinstance(value, str) and isinstance(value, (Mapping, list, tuple)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _out_of_range(inner)


class PackagedDialect(Dialect):
    """A dialect in a package of its own, whose parts are imported when they are needed.

    `schema.py` has its schema as `SCHEMA`, `rules.py` its table as `table()`, and `releases` the known ones as `KNOWN`. A
    `suffixes` entry says which format a file of that suffix has.
    """

    suffixes: ClassVar[Mapping[str, str]] = {}
    alike: ClassVar[tuple[str, ...]] = ()
    """Formats of which the usual one is a part."""

    @cached_property
    def schema(self) -> type[Section]:
        """What can be given in any release, typed."""
        found: type[Section] = self._part("schema").SCHEMA
        return found

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The table to and from `Plan`."""
        rows: tuple[Rule, ...] = self._part("rules").table()
        return rows

    @cached_property
    def versions(self) -> tuple[str, ...]:
        """Releases covered, oldest first."""
        known: tuple[str, ...] = self._part("releases").KNOWN
        return known

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """What its module `releases` has as `moves()`."""
        found: tuple[Move, ...] = self._has("releases", "moves", tuple)()
        return found

    @property
    def disagreements(self) -> tuple[Disagreement, ...]:
        """What its module `documentation` has as `DISAGREEMENTS`."""
        rows: tuple[Disagreement, ...] = self._has("documentation", "DISAGREEMENTS", ())
        return rows

    @property
    def checks(self) -> Iterable[Check]:
        """What its modules `refusals` and `traps` have as rows."""
        return (*self._has("refusals", "REFUSALS", ()), *self._has("traps", "TRAPS", ()))

    @property
    def checkpoints(self) -> tuple[Format, ...]:
        """What its module `state` has as `FORMATS`."""
        found: tuple[Format, ...] = self._has("state", "FORMATS", ())
        return found

    @property
    def namings(self) -> tuple[Naming, ...]:
        """What its module `state` has as `NAMINGS`."""
        found: tuple[Naming, ...] = self._has("state", "NAMINGS", ())
        return found

    def inspect(self, config: Config) -> tuple[Finding, ...]:
        """What `inspect` of its module `traps` finds in `config`."""
        found: Iterable[Finding] = self._part("traps").inspect(config)
        return tuple(found)

    def format_of(self, path: str | Path | None) -> str | None:
        """The format that the suffix of `path` stands for, as `suffixes` says."""
        return self.suffixes.get(Path(path).suffix.lower()) if path is not None else None

    def chosen(self, format: str | None) -> str:
        """`format`, or the usual one; `VersionError` for one that is not written."""
        if format not in (None, *self.formats, *self.alike):
            raise VersionError(f"{self.name}: cannot write {format}; it writes {' and '.join(self.formats)}")
        return format or self.formats[0]

    def _part(self, name: str) -> ModuleType:
        return import_module(f"{type(self).__module__}.{name}")

    def _has(self, part: str, name: str, default: Any) -> Any:
        """A name of one of its modules, where it has that module and the module has it."""
        package = type(self).__module__
        return getattr(self._part(part), name, default) if find_spec(f"{package}.{part}") else default


def located(problem: str, origins: Mapping[str, Origin]) -> str:
    """A problem that begins with the name of a setting, with the line on which that was given."""
    origin = origins.get(problem.partition(":")[0])
    return f"line {origin.line}: {problem}" if origin and origin.line else problem


def code_beside(path: Path) -> Path:
    """Where the code part of the config at `path` lies."""
    return path.with_suffix(".code.json")


def flags_of(source: Any) -> Sequence[str] | None:
    """`source` if it is a list of command-line flags, else None."""
    listed = isinstance(source, Sequence) and not isinstance(source, str | bytes)
    return source if listed and all(isinstance(item, str) for item in source) else None
