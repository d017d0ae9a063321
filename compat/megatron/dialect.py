"""The dialect of Megatron-Core: how its settings are read, completed, checked and written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bridge.files import Original, Script
from bridge.files.shown import show_value
from bridge.plan.section import Section, Values
from bridge.stack.checks import Check, Seen
from bridge.stack.dialect import Config, Program, Reading, Written
from bridge.stack.findings import Finding
from bridge.stack.launch_command import torchrun
from bridge.stack.packaged_dialect import PackagedDialect
from bridge.stack.requirements import missing
from bridge.stack.rules import Effect
from bridge.stack.setting_renames import Move
from bridge.translation.lift import lift, lower
from compat.megatron import arguments, formats, live, objects, options, sections
from compat.megatron.arguments import smallest_world_size
from compat.megatron.arguments.evaluation import run
from compat.megatron.arguments.namespace import Namespace
from compat.megatron.checkpoint_source import resume
from compat.megatron.checks import CHECKS
from compat.megatron.environment import environment
from compat.megatron.formats import format_of, read
from compat.megatron.live import model_parallel_config
from compat.megatron.objects.transformer import BEFORE
from compat.megatron.options import accepts, defaults, groups, spellings
from compat.megatron.releases.setting_renames import MOVES
from compat.megatron.requirements import NEEDS, whole
from compat.megatron.rewriting import rewritten
from compat.megatron.rules.learning_rate import SCHEDULER_STEPS
from compat.megatron.schema import schema

SECTIONED = ("yaml_cfg", "container")
"""Names of the entry points for YAML files with sections."""


SCRIPT = ".sh"


class MegatronConfig(Config):
    """A Megatron config, together with the fields of each of Megatron's own config objects."""

    @cached_property
    def ranks(self) -> int:
        """Number of ranks: the given world size, else the smallest that the parallel sizes allow."""
        return self.world_size or smallest_world_size(self.given, self.version)

    @cached_property
    def args(self) -> Values:
        """The arguments after parsing and checks; dtypes are names such as `torch.bfloat16`."""
        if self.entry in SECTIONED:
            return Values(
                sections.effective(self.given.flat(), self.entry, self.version, self.ranks)
            )
        if self.entry != "flags":
            return Values(live.as_arguments(self.given, self.entry, self.version))
        return Values(arguments.effective(self.given.flat(), self.version, self.ranks))

    @cached_property
    def model_parallel(self) -> Values:
        """Fields of the `ModelParallelConfig` object; callables and timers are None."""
        if self.entry not in ("flags", *SECTIONED):
            return Values(live.model_parallel(self.given, self.entry, self.version))
        return Values(objects.model_parallel(self.args.flat(), self.version))

    @cached_property
    def ddp(self) -> Values:
        """Fields of the `DistributedDataParallelConfig` object."""
        return Values(objects.ddp(self.args.flat(), self.version))

    @cached_property
    def optimizer(self) -> Values:
        """Fields of the `OptimizerConfig` object."""
        return Values(objects.optimizer(self.args.flat(), self.version))

    @cached_property
    def environment(self) -> Mapping[str, tuple[str, str]]:
        """Environment variables that the run needs, each with its value and the reason."""
        return environment(self.args.flat(), self.version)


class MegatronDialect(PackagedDialect):
    """The dialect of Megatron-Core; its settings are those of Megatron-LM's command line."""

    name = "megatron"
    title = "Megatron-Core"
    formats = ("flags", "yaml", "script")
    rewrites = ("flags", "yaml", "script")
    default_entry = "flags"
    config_type = MegatronConfig
    masking = ("eod_mask_loss", "sft")

    @property
    def schema(self) -> type[Section]:
        """Every argument and config field of every release."""
        return schema()

    @property
    def moves(self) -> tuple[Move, ...]:
        """Settings that were renamed between releases."""
        return MOVES

    def parse(self, source: Any, version: str, lenient: bool) -> Reading:
        """Read flags, a recipe, a mapping or a live config object."""
        return read(source, version, lenient)

    def read(
        self,
        source: Any,
        version: str | None = None,
        world_size: int | None = None,
        lenient: bool = False,
    ) -> Config:
        """Read a source of Megatron.

        The default `version` of a live object is the installed release.
        """
        if version is None and live.class_of(source):
            version = live.release_of_package()
        return resume(super().read(source, version, world_size, lenient))

    def effective(self, config: Config) -> Values:
        """Return the values after Megatron's parser, its checks and its config classes. Raises
        `ConfigError` with every refusal.
        """
        assert isinstance(config, MegatronConfig)
        # Megatron builds these objects from the arguments, and each may refuse what the parser
        # accepted.
        _ = config.model_parallel
        if config.entry == "flags":
            _ = config.ddp, config.optimizer
        run(SCHEDULER_STEPS, Namespace(config.args.flat()))
        return config.args

    @property
    def checks(self) -> Iterable[Check]:
        """All checks of Megatron. Some refuse what the parser, the config classes, the schedule or
        the reader of files in sections refuses. The others find settings that the parser accepts,
        but that a run then ignores or stops at.
        """
        steps = (
            *arguments.TABLE,
            *BEFORE,
            *(step for table in objects.TABLES.values() for step in table),
            *SCHEDULER_STEPS,
            *sections.STEPS,
        )
        # The tables share rows: upstream's child classes run the statements of their parents.
        return (*dict.fromkeys(step for step in steps if isinstance(step, Check)), *CHECKS)

    def inspect(self, config: Config) -> tuple[Finding, ...]:
        """Return findings on given values that Megatron changes or ignores."""
        assert isinstance(config, MegatronConfig)
        view = Seen(config.effective, config.given, config.context)
        assumptions = []
        # A live object belongs to one rank and has no world size.
        has_remark = any(finding.path == "world_size" for finding in config.remarks)
        if config.world_size is None and not has_remark and config.entry in ("flags", *SECTIONED):
            message = (
                f"not given; {config.ranks} ranks assumed, the fewest that the parallel sizes allow"
            )
            assumptions.append(Finding("world_size", message, Effect.NUMBERS))
        return (*assumptions, *_find_overrules(config), *CHECKS.remarks(view, config.origins))

    def missing(self, config: Config) -> Iterator[Finding]:
        """Yield findings on missing arguments without which the parser or the training loop stops."""
        if config.entry == "flags":
            yield from missing(
                config.given, NEEDS, self.whole(config), lambda path: f"--{path.replace('_', '-')}"
            )

    def whole(self, config: Config) -> bool:
        """Whether the config is a whole launch, that is, sets the length of training or the data."""
        return config.entry != "flags" or whole(config.given)

    def knows(self, path: str, value: Any, version: str, entry: str) -> bool:
        """Whether the release has a flag that sets `path` to `value`, or a config class with the
        field.
        """
        if entry in SECTIONED:
            return path in options.groups()
        if entry != "flags":
            return live.has_field(path, entry, version)
        return options.option_for(version, path, value) is not None

    def defaults(self, version: str) -> Mapping[str, Any]:
        """Return the defaults of a release. They come from the parser of the release,
        or from the config classes for fields without a flag.
        """
        return defaults(version)

    def accepts(self, path: str) -> str:
        """Return a description of the values that the newest flag of the argument accepts."""
        return accepts(path) or super().accepts(path)

    def spellings(self, path: str) -> tuple[str, ...]:
        """Return the flags that set the argument `path`, in the newest release that has the
        argument.
        """
        return spellings(path)

    def section(self, path: str) -> str:
        """Return the group in which the help of Megatron's parser lists the argument."""
        return groups()[path]

    def render(self, config: Config, format: str | None = None) -> Written:
        """Return the config as flags (one on each line), as a recipe or as a launch script, with
        environment and launch command.
        """
        assert isinstance(config, MegatronConfig)
        settings = config.given
        # A config object or a file in sections becomes flags by way of its plan.
        if config.entry != "flags":
            settings = lower(lift(config), self, config.version, config.world_size).given
        environment = {name: value for name, (value, _) in config.environment.items()}
        launch = torchrun(config.ranks, config.program or formats.PROGRAM)
        if format == "yaml":  # for NVIDIA's own runner of recipes
            return Written(
                self.name,
                formats.recipe_text(settings, config.version, environment),
                format,
                environment=environment,
            )
        if format == "script":
            text = formats.script_text(settings, config.version, environment, launch)
            return Written(
                self.name, text, format, launch=("bash", formats.SCRIPT), file=formats.SCRIPT
            )
        text = formats.flags_text(settings, config.version)
        return Written(
            self.name, text, "flags", {}, "", environment, launch, formats.ARGUMENTS, arguments=True
        )

    def program(
        self, output: Written, config: Config, plan: Mapping[str, Any], model: Config | None
    ) -> Program:
        """Return the launch script. A written script is the launch script itself; for a file of
        flags or a recipe, a separate script is written next to the file.
        """
        if output.format == "script":
            return Program(output)
        name = str(Path(output.file).with_suffix(SCRIPT))
        script = self.render(config, "script").under_name(name)
        return Program(
            replace(
                output,
                beside={SCRIPT: script.text},
                launch=script.launch,
                environment={},
                arguments=False,
            )
        )

    def reword_for_release(self, config: Config, original: Original, was: str) -> str:
        """Return the text of a script or a file of flags with the new values in place. All other
        bytes stay as they are.
        """
        return rewritten(config.given, original.text, original.document, was, config.version)

    def rewritten(self, config: Config, original: Original, was: str, path: Path) -> Written | None:
        """Write `config` into the text `original`. The script of a run that a file configures has none of its settings."""
        if config.entry in SECTIONED and isinstance(original.document.data, Script | list):
            return None
        return super().rewritten(config, original, was, path)

    def to_object(self, config: Config) -> Any:
        """Return a `ModelParallelConfig` of the installed Megatron-Core. Raises `VersionError` if
        Megatron-Core is not installed or has another release.
        """
        assert isinstance(config, MegatronConfig)
        return model_parallel_config(config)

    def format_of(self, path: str | Path | None) -> str | None:
        """Return the format for a file name with the suffix of `path`."""
        return format_of(path)


def _find_overrules(config: MegatronConfig) -> Iterator[Finding]:
    """Yield findings on given values that Megatron's checks change."""
    for path, value in config.given.items():
        now = config.args.get(path)
        if now != value:
            change = (
                "moves this value into other settings"
                if now is None
                else f"turns {show_value(value)} into {show_value(now)}"
            )
            message = f"Megatron {config.version} {change}"
            yield Finding(
                path,
                message,
                Effect.NONE,
                True,
                before=value,
                after=now,
                origin=config.origins.get(path),
            )


DIALECT = MegatronDialect()
