"""Dialects: schema + table + formats of one stack, and the configs read with them."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

from bridge import limits
from bridge.errors import BridgeError, ConfigError, TranslationError, VersionError
from bridge.files import Document, Original, write_all
from bridge.plan.section import Section, Values
from bridge.stack.checks import Check
from bridge.stack.findings import LEFT_OUT, Finding, Origin
from bridge.stack.launch_command import fed
from bridge.stack.memory_rules import MemoryRules
from bridge.stack.refusals import every
from bridge.stack.rules import Context, Effect
from bridge.stack.sources import (
    DEFAULT,
    NO_SOURCES,
    Claim,
    Resolution,
    Said,
    Settled,
    Sources,
    Unheard,
    report_contradictions,
)
from bridge.stack.stack_tables import StackTables


@dataclass(frozen=True)
class Reading:
    """The result of reading a source, before its meaning is worked out.

    `given` holds typed values by schema path, exactly those that the user wrote. `entry` names the
    entry point of the stack that takes such a source, and decides which defaults and derivations
    apply. `world_size` is None if the source does not set it. `gaps` are sentences about values
    that the source leaves open. Errors include these sentences, because an open value may be the
    cause of another problem. `program` is the program that the source starts, if it is known.
    `sources` is what further sources of the run say.
    """

    given: Values
    entry: str
    origins: Mapping[str, Origin] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    opaque: Mapping[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    gaps: tuple[str, ...] = ()
    program: str = ""
    sources: Sources = NO_SOURCES

    def unless(self, problems: Iterable[str], words: tuple[str, ...] = ()) -> Reading:
        """This reading if there are no `problems`; else raise one error with all of them."""
        try:
            ConfigError.raise_if(problems)
        except ConfigError as error:
            # The checks of the stack go on with this part, so that one error has their problems
            # too.
            error.part, error.words = self, words
            raise
        return self


@dataclass(frozen=True)
class Written:
    """A config in its stack's own form: the text of the file, and the settings that belong outside
    the file.

    `code` has the settings that belong into the training script, as data; `snippet` has these
    settings as Python code. `environment` holds the environment variables that the run needs, and
    `launch` holds the command. `file` is the name of the file in snippet, environment and command.
    If `arguments` is true, the file holds arguments, which follow the command. `beside` has the
    texts of further files by their suffix.
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
        """The command with its arguments; empty if no command can start the file as it is."""
        return fed(self.launch, self.file, self.text) if self.arguments else self.launch

    def under_name(self, name: str) -> Written:
        """The same config, with snippet and command for a file of that name."""
        names = {self.file: name}
        for suffix in self.beside if self.file else ():
            names[Path(self.file).with_suffix(suffix).name] = Path(name).with_suffix(suffix).name
        launch = tuple(names.get(word, word) for word in self.launch)
        snippet = (
            self.snippet.replace(json.dumps(self.file), json.dumps(name))
            if self.file
            else self.snippet
        )
        return replace(self, launch=launch, snippet=snippet, file=name)

    def below(self, folder: Path) -> Written:
        """The same config, with a command that is run from another folder: the files that it names
        lie in `folder`.
        """
        own = {self.file, *(Path(self.file).with_suffix(suffix).name for suffix in self.beside)}
        launch = tuple(str(folder / word) if word in own else word for word in self.launch)
        return replace(self, launch=launch, file=str(folder / self.file))


@dataclass(frozen=True)
class Program:
    """A config together with the script that starts it, and a finding for each setting that only
    the user can add.
    """

    written: Written
    lacking: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Config:
    """A config of one stack. `given` holds the values that the user wrote, and `effective` the
    values that the stack would run with. `sources` is what further sources of the run say. `caller`
    is the config of the program that calls this stack, in the words of the stack whose flags it takes;
    the plan has what it says, but for the fields that `dialect.decides`.
    """

    dialect: Dialect
    given: Values
    version: str
    world_size: int | None = None
    entry: str = ""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    remarks: tuple[Finding, ...] = ()
    opaque: Mapping[str, Any] = field(default_factory=dict)
    program: str = ""
    sources: Sources = NO_SOURCES
    caller: Config | None = None

    @cached_property
    def context(self) -> Context:
        """The release and the world size, in the form that rules use."""
        return Context(self.version, self.world_size)

    @cached_property
    def effective(self) -> Values:
        """All values that the stack would run with: given values, defaults, and derived values.

        These values are computed and never written to a file. Raises `BridgeError` if the stack
        refuses the config.
        """
        return self.dialect.effective(self)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Findings on the config, in this order: remarks of the reader; values that another source
        of the run overrules; settings that the stack accepts, but ignores or gets wrong; numbers
        that no run can use; missing settings that stop the run.
        """
        stops = (finding for finding in self.missing if finding.effect is Effect.STOPS)
        contradictions = () if self.sources == NO_SOURCES else report_contradictions(self.resolve())
        remarks = (*self.remarks, *contradictions)
        return (*remarks, *self.dialect.inspect(self), *self.dialect.beyond(self), *stops)

    def resolve(self, stopped: bool = False) -> Resolution:
        """Return who wins for each setting of the run. Defaults that nothing was said about stand last.

        Of a run that is `stopped`, nobody knows the defaults, and only what was given is told.
        """
        sources = self.sources
        values = {**(self.given if stopped else self.effective), **sources.values}
        claims: dict[str, list[Claim]] = {}
        for claim in sources.claims:
            claims.setdefault(claim.path, []).append(claim)
        settings, unheard = list(sources.own), list(sources.unheard)
        lost = {claim.path for one in settings for claim in one.overruled}
        for path in dict.fromkeys((*self.given, *sources.winners, *claims, *values)):
            value = values.get(path)
            of_path = claims.get(path, ())
            if value is None and not stopped:
                unheard += (Unheard(one.said, one.advice, one.effect) for one in of_path)
            elif value is not None and path not in sources.hidden and path not in lost:
                losers = tuple(one for one in of_path if not one.is_met_by(value))
                own = self.given.get(path)
                # DeepSpeed keeps types of optimizers in small letters.
                value = own if str(own).lower() == value else value
                settings.append(Settled(path, value, self._winner(path, value), losers))
        settings.sort(key=lambda one: one.winner.source == self.default_source)
        return Resolution(tuple(settings), tuple(unheard))

    def _winner(self, path: str, value: Any) -> Said:
        """Return who set a value: another source, else the file, else the release's default."""
        if path in self.sources.winners:
            return self.sources.winners[path]
        if path in self.given:
            origin = self.origins.get(path) or Origin()
            return Said(origin.spelling or path, value, origin.file, origin.line)
        return Said(path, value, self.default_source)

    @property
    def default_source(self) -> str:
        """The name of the source of what the stack itself sets where nobody says anything."""
        return f"{self.dialect.title} {self.version}{DEFAULT}"

    @cached_property
    def missing(self) -> tuple[Finding, ...]:
        """One finding for each setting that the stack needs to start and that the config lacks.

        If the config is only a part of a launch, other parts may set these settings. Then none of
        these findings stops the run, and the property `findings` leaves them out.
        """
        return tuple(self.dialect.missing(self))

    @property
    def as_section(self) -> Section:
        """`given` as an instance of the dialect's pydantic schema."""
        return self.dialect.as_section(self.given)

    def text(self, format: str | None = None) -> str:
        """The text of the config in one of the dialect's formats."""
        return self.dialect.render(self, format).text

    def to_object(self) -> Any:
        """The config object of the installed stack. Raises `VersionError` if another release is
        installed.
        """
        return self.dialect.to_object(self)


class Writer(StackTables):
    """What writes configs of a stack, in files and as objects."""

    formats: ClassVar[tuple[str, ...]]
    alike: ClassVar[tuple[str, ...]] = ()
    """Further formats in which every text of the usual format is valid too."""
    rewrites: ClassVar[tuple[str, ...]] = ()
    """Formats in which a file can be changed in place, so that comments stay."""

    @abstractmethod
    def render(self, config: Config, format: str | None = None) -> Written:
        """Return the text of the file that the config's stack reads, and the settings that belong
        into other files.
        """

    def program(
        self, output: Written, config: Config, plan: Mapping[str, Any], model: Config | None
    ) -> Program:
        """Add the script that starts the config to `output`, which must name the config's file.

        `model` is the config of the model itself, or None if it is not known.
        """
        raise BridgeError(
            f"--script: no script can be written for {self.title}; remove the option, and use the "
            "launch command of the report"
        )

    def model_fields_in_script(
        self, plan: Mapping[str, Any], model: Config | None
    ) -> frozenset[str]:
        """Return the model fields of the plan that are written into the script of `program`,
        because the config of the model has no key for them.
        """
        return frozenset()

    def renew(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return settings of this stack in the form in which a translation to the stack itself writes them."""
        return settings

    def fitting(self, settings: Mapping[str, Any], version: str) -> dict[str, Any]:
        """Return `settings` without those that release `version` would refuse because of others."""
        return dict(settings)

    def to_object(self, config: Config) -> Any:
        """The stack's own config object. Raises `VersionError` if the stack has no such object."""
        raise VersionError(
            f"{self.name}: this stack has no config object; write the config as {' or '.join(self.formats)}"
        )

    def write(
        self, config: Config, path: str | Path | None = None, format: str | None = None
    ) -> Written:
        """Render `config`, and write it to `path` if one is given; the suffix picks the format.

        Either all files are written or none.
        """
        output = self.render(config, format or self.format_of(path))
        if path is not None:
            output = output.under_name(Path(path).name)
            texts = self.files(output, Path(path))
            # The user named `path` and may overwrite it; files beside it were not named, so they
            # must be ours.
            write_all(texts, texts.keys() - {Path(path)})
        return output

    def rewritten(self, config: Config, original: Original, was: str, path: Path) -> Written | None:
        """Write `config` into the text `original`, which was read for release `was`. Lines that
        need no change stay as they are.

        Returns None if the suffix of `path` stands for another format, or if the dialect always
        writes this format anew.
        """
        format = self.format_of(path)
        if format is None or format not in self.rewrites or original.document.format != format:
            return None
        return replace(
            self.render(config), text=self.reword_for_release(config, original, was), format=format
        )

    def reword_for_release(self, config: Config, original: Original, was: str) -> str:
        """Return the text of `original`, which was read for release `was`, changed so that the text
        means the same as `config`.

        Only called for formats in `rewrites`.
        """
        raise TranslationError(
            f"{self.name}: this dialect cannot change a file in place; write the config to a new file"
        )

    def files(self, output: Written, path: Path) -> dict[Path, str]:
        """Return the texts of all files for `path`: the config, and the file with the settings for
        the training script.
        """
        output = output.under_name(path.name)
        texts = {path: output.text}
        if output.code:
            texts[code_beside(path)] = json.dumps(dict(output.code), indent=2) + "\n"
        if output.snippet:
            texts[path.with_suffix(".code.py")] = output.snippet
        texts |= {path.with_suffix(suffix): text for suffix, text in output.beside.items()}
        return texts

    def format_of(self, path: str | Path | None) -> str | None:
        """Return the format that the suffix of `path` stands for; None stands for the dialect's
        usual format.
        """
        return None


class Checker(StackTables):
    """What says which settings a stack refuses, ignores or lacks, and what its runs keep in memory."""

    @property
    def checks(self) -> Iterable[Check]:
        """All checks of the stack, for settings that it refuses, ignores or gets wrong. The order
        is that of the stack's source, and the checks of all releases are included.
        """
        return ()

    def inspect(self, config: Config) -> tuple[Finding, ...]:
        """A finding for each setting of `config` that the stack accepts and then ignores or gets
        wrong.
        """
        return ()

    def memory_rules(self, config: Config) -> MemoryRules:
        """What a run of `config` keeps in memory beyond what its plan says."""
        return MemoryRules()

    def beyond(self, config: Config) -> Iterable[Finding]:
        """A finding for each given number that no run can use."""
        from bridge.stack.bounds import beyond

        # Only our own folders bring a table of bounds. A module of elsewhere is not searched for
        # one.
        if not type(self).__module__.startswith("compat."):
            return ()
        return beyond(config.given, f"{self.package}.releases", config.origins)

    def missing(self, config: Config) -> Iterable[Finding]:
        """Yield a finding for each setting that the stack needs to start and that `config` lacks."""
        return ()

    def whole(self, config: Config) -> bool:
        """Return whether `config` holds all settings of a launch, and not only a part of them."""
        return False

    def names_run(self, config: Config) -> bool:
        """Return whether `config` names a model and a data set, so that `bridge.engine.backends.opener` can run it."""
        return False


class Reader(StackTables):
    """What reads configs of a stack, completes them, and checks them as a release does."""

    config_type: ClassVar[type[Config]] = Config

    @abstractmethod
    def parse(self, source: Any, version: str, lenient: bool) -> Reading:
        """Read `source`: a path, a text, a mapping, a list of flags or a live object. The reading
        has the values that the source sets, with the types of the schema.
        """

    @abstractmethod
    def effective(self, config: Config) -> Values:
        """All values that the stack's own entry point makes of `config.given`.

        Raises `BridgeError` with every reason why the stack refuses the config.
        """

    def recognises(self, data: Any) -> int:
        """Return how sure the dialect is that parsed `data` (mapping or list) is a config of this
        stack. 0 means that `data` is no such config.
        """
        return 0

    def read(
        self,
        source: Any,
        version: str | None = None,
        world_size: int | None = None,
        lenient: bool = False,
    ) -> Config:
        """Read a source of this stack, and check it as the release `version` would.

        Raises `BridgeError` with every problem.
        """
        release = self.release(version)
        return self.check_reading(lambda: self.parse(source, release, lenient), release, world_size)

    def find_called(self, document: Document) -> Document | None:
        """Return a script with only its launch of this stack, if the program takes flags of one of `callers`."""
        return None

    def join_flags(self, flags: Document, file: str) -> Document | None:
        """Return the launch that has flags of one of `callers`, and the config `file` of this stack or the one that the flags
        name (`file` empty); None if there is no such file.
        """
        return None

    def check_reading(
        self, parse: Callable[[], Reading], version: str, world_size: int | None
    ) -> Config:
        """The checked config from the reading that `parse` returns.

        If reading or checking finds problems, raises one `ConfigError` with all of them.
        """
        reading = None
        try:
            reading = parse()
            return self._check_config(reading, version, world_size)
        except ConfigError as error:
            # Reading failed with nothing to check, or with a part; or reading went well and
            # checking failed.
            part = reading or error.part
            if part is None:
                raise
            raise self._refusal(error, part, version, world_size) from None

    def _check_config(self, reading: Reading, version: str, world_size: int | None) -> Config:
        config = self.build(reading, version, world_size)
        _ = (
            config.effective
        )  # a lazy property: the stack's refusals are raised here and not at the first use
        return config

    def _refusal(
        self, first: ConfigError, part: Reading, version: str, world_size: int | None
    ) -> ConfigError:
        """Return an error with the problems of `first` and all further problems of `part`, the
        settings that could be read.
        """

        def judge(settings: Values, world: int | None) -> None:
            self._check_config(replace(part, given=settings, world_size=world), version, world)

        problems = every(first.problems, part.given, world_size or part.world_size, judge)
        lines = dict.fromkeys(self._locate_problem(problem, part) for problem in problems)
        error = ConfigError(*lines, *part.gaps)
        error.part, error.words = part, first.words
        return error

    def _locate_problem(self, problem: str, part: Reading) -> str:
        """Return `problem`, which begins with a setting, with the setting's line number in front.
        If another file than the one that was read has this line, the name of that file is added. If
        the line is not known, return `problem` unchanged. A source that filled in the value is named.

        If the setting's value is known only when the script runs, return a text that says so.
        """
        path = problem.partition(":")[0]
        for finding in part.findings:
            if finding.path == path and finding.origin and finding.message.endswith(LEFT_OUT):
                reason = f"{finding.origin}: {finding.message.removesuffix(LEFT_OUT)}"
                return f"{reason}; {self.title} needs this value, so write it out in the script"
        origin = part.origins.get(path)
        if not (origin and origin.line):
            return problem
        filler = part.sources.winners.get(path)
        if filler and filler.setting != path:
            problem = f"{problem}; the file leaves the key open, and {filler.setting} fills it in"
        return f"{f'{origin.file}: ' if origin.file else ''}line {origin.line}: {problem}"

    @abstractmethod
    def build(self, reading: Reading, version: str, world_size: int | None) -> Config:
        """A config from a reading, without the checks of the stack."""

    def config(
        self,
        settings: Mapping[str, Any],
        version: str | None = None,
        world_size: int | None = None,
        entry: str = "",
    ) -> Config:
        """A config from values by schema path, checked as `read` checks. None stands for unset, except
        for settings that are `nullable`.
        """
        release = self.release(version)
        values = {
            path: value
            for path, value in settings.items()
            if value is not None or self.nullable(path, release)
        }
        return self._check_config(
            Reading(Values(values), entry or self.default_entry), release, world_size
        )


def _out_of_range(value: Any) -> Iterator[str]:
    if isinstance(value, float):
        if not isfinite(value):
            yield f"found {value}; write a finite number"
    elif isinstance(value, int):
        if abs(value) > limits.INTEGER:
            yield "found a whole number beyond 64 bits; write a smaller one"
    elif (
        value is not None
        and not isinstance(value, str)
        and isinstance(value, (Mapping, list, tuple))
    ):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _out_of_range(inner)


def code_beside(path: Path) -> Path:
    """Return the path of the file with the settings that belong into the training script, for the
    config at `path`.
    """
    return path.with_suffix(".code.json")


def flags_of(source: Any) -> Sequence[str] | None:
    """`source` if it is a list of command-line flags, else None."""
    is_list = isinstance(source, Sequence) and not isinstance(source, str | bytes)
    return source if is_list and all(isinstance(item, str) for item in source) else None


class Dialect(Reader, Writer, Checker):
    """One stack. Subclasses live in `compat/<name>/`."""

    def build(self, reading: Reading, version: str, world_size: int | None) -> Config:
        """A config from a reading, without the checks of the stack.

        Raises `ConfigError` for a number that is infinite, not a number, or beyond 64 bits.
        """
        ConfigError.raise_if(
            [
                f"{path}: {flaw}"
                for path, value in reading.given.items()
                for flaw in _out_of_range(value)
            ]
        )
        findings = reading.findings
        if world_size:  # whoever gives it has answered what the source does not say
            findings = tuple(one for one in findings if one.path != "world_size")
        world_size = world_size or reading.world_size
        return self.config_type(
            self,
            reading.given,
            version,
            world_size,
            reading.entry,
            reading.origins,
            findings,
            reading.opaque,
            reading.program,
            reading.sources,
        )
