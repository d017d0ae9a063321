"""The dialect of DeepSpeed: how its configs are read, completed, checked and written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from bridge.files import Document, Original
from bridge.plan.section import Values, fields
from bridge.stack.check_tables import report_remarks
from bridge.stack.dialect import Config, Program, Reading, Written
from bridge.stack.findings import Finding
from bridge.stack.packaged_dialect import PackagedDialect
from bridge.stack.rules import Effect, How
from bridge.stack.sources import NO_SOURCES, Placed, Unheard
from compat.deepspeed import code, formats, scripts
from compat.deepspeed.checks import CHECKS, find_remarks
from compat.deepspeed.checks_view import Seen
from compat.deepspeed.code import script
from compat.deepspeed.editors import schema
from compat.deepspeed.effective import effective
from compat.deepspeed.formats import NULLABLE, PARTIAL, plain
from compat.deepspeed.live import build
from compat.deepspeed.refusals import strange
from compat.deepspeed.releases import KEYS, release
from compat.deepspeed.rewriting import reword_text
from compat.deepspeed.script_writer import beside, model_fields_in_script
from compat.deepspeed.trainer import DUMP, NAMES, OWN_NAME, arguments, rename_recipe


class DeepSpeedFile(Config):
    """A DeepSpeed config. `ds_config` returns the mapping for `deepspeed.initialize`, and `script`
    returns a training script for this config.
    """

    @cached_property
    def ds_config(self) -> dict[str, Any]:
        """The config as the nested mapping that the JSON file holds."""
        return plain(self.given, self.opaque)

    @cached_property
    def script(self) -> str:
        """A short training script that fits this config."""
        return script(self.given, self.world_size)


BATCH = "train_micro_batch_size_per_gpu"


class DeepSpeedDialect(PackagedDialect):
    """DeepSpeed, 0.15.0 to 0.19.8."""

    default_entry: ClassVar[str] = PARTIAL
    name: ClassVar[str] = "deepspeed"
    title: ClassVar[str] = "DeepSpeed"
    formats: ClassVar[tuple[str, ...]] = ("json",)
    alike: ClassVar[tuple[str, ...]] = ("hjson",)
    suffixes: ClassVar[Mapping[str, str]] = {".json": "json", ".hjson": "hjson", ".sh": "script"}
    model: ClassVar[bool] = False
    coded: ClassVar[bool] = True
    callers: ClassVar[tuple[str, ...]] = ("megatron",)
    decides: ClassVar[tuple[str, ...]] = scripts.DECIDES
    launched: ClassVar[frozenset[str]] = scripts.LAUNCHED
    rewrites: ClassVar[tuple[str, ...]] = ("hjson", "script")
    config_type: ClassVar[type[Config]] = DeepSpeedFile

    def read(
        self,
        source: Any,
        version: str | None = None,
        world_size: int | None = None,
        lenient: bool = False,
        *,
        auto: Mapping[str, Any] | None = None,
        code: Mapping[str, Any] | None = None,
        trainer: Mapping[str, Any] | None = None,
        model: Mapping[str, Any] | None = None,
        open_auto: bool = False,
    ) -> Config:
        """Read JSON, HJSON, a mapping, a base64 string or a live config, and check it as DeepSpeed
        `version` does.

        `auto` has the values that replace "auto", by key. It may also have facts, by the names in
        `compat.deepspeed.auto.FACTS`, from which Hugging Face's rules compute values. Without
        `auto`, every "auto" is an error. `trainer` is for runs that Hugging Face's Trainer starts:
        its TrainingArguments by name, or a dump of them. The arguments replace every "auto", and
        explicit values must agree with the arguments. `model` has the model's `hidden_size`. With
        `open_auto`, an "auto" whose facts are not known is left out, and no error. `code` holds settings of the training script,
        such as `{"pipeline_stages": 2}`. Raises `BridgeError` with every problem.
        """
        release = self.release(version)
        arguments = self._arguments(trainer)
        facts = Placed({}, {}).overlay(model or {}).overlay(auto or {})
        values = None if auto is None and not model else facts
        return self.check_reading(
            lambda: self._parse_source(
                source, release, lenient, values, code, arguments, world_size, open_auto
            ),
            release,
            world_size,
        )

    def find_called(self, document: Document) -> Document | None:
        """Return a script with only its launch of Megatron-DeepSpeed, if that is what its launch with a DeepSpeed file is."""
        return scripts.find_called(document)

    def join_flags(self, flags: Document, file: str) -> Document | None:
        """Return the launch of Megatron-DeepSpeed with these flags and a DeepSpeed file; None if there is no such file."""
        return scripts.join_flags(flags, file)

    def parse(self, source: Any, version: str, lenient: bool) -> Reading:
        """Return a `Reading` of the source: the typed values, the lines and spellings of the keys,
        and the findings.
        """
        return self._parse_source(source, version, lenient, None, None)

    def _arguments(self, values: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if values is None:
            return None
        settings = rename_recipe(Placed({}, {}).overlay(values))
        # Every dump of TrainingArguments has its output_dir, and axolotl's recipes have further names. A
        # dump also holds names that no DeepSpeed key needs.
        filling = arguments(settings, "output_dir" in values or settings.keys() != values.keys())
        lost = [*settings.lost]
        if "output_dir" in values and settings.keys() == values.keys() and len(values) < DUMP:
            own = (name for name in settings if name not in NAMES)
            lost += (
                Unheard(settings.places[name], OWN_NAME, Effect.NONE)
                for name in own
                if name in settings.places
            )
        return Placed(filling, settings.places, lost)

    def _parse_source(
        self,
        source: Any,
        version: str,
        lenient: bool,
        auto: Mapping[str, Any] | None,
        code: Mapping[str, Any] | None,
        arguments: Mapping[str, Any] | None = None,
        world: int | None = None,
        open_auto: bool = False,
    ) -> Reading:
        return formats.read(
            source, release(version), lenient, auto, code, arguments, world, open_auto
        )

    def effective(self, config: Config) -> Values:
        """Return the values that the release's own DeepSpeedConfig would hold, with the default
        arguments of the optimizer and the scheduler.
        """
        return Values(
            effective(
                config.given,
                config.version,
                config.world_size,
                partial=config.entry == PARTIAL,
                later=config.sources.hidden,
            )
        )

    def editor_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of a file. The schema allows "auto" for keys that Hugging Face's
        integrations fill in, and does not contain the code part.
        """
        return schema()

    def inspect(self, config: Config) -> tuple[Finding, ...]:
        """Return findings about settings that DeepSpeed accepts and then ignores or gets wrong."""
        # What the reader found out about a missing schedule says more than the check of the file.
        paths = {one.path for one in config.remarks if one.path == "scheduler.type"}
        # So does what an argument of the Trainer asked for.
        paths |= {one.path for one in config.sources.claims} & {"gradient_clipping"}
        view = Seen(config.effective, config.given, config.context)
        remarks = report_remarks(find_remarks(view), view, config.origins)
        every = (*CHECKS.remarks(view, config.origins), *remarks)
        findings = tuple(one for one in every if one.path not in paths)
        alone = config.entry == PARTIAL and config.sources == NO_SOURCES
        if alone and config.effective.get(BATCH) is None:
            message = (
                "the source sets no batch size; DeepSpeed refuses the file until you add this key"
            )
            return (Finding(BATCH, message, Effect.STOPS, how=How.MISSING), *findings)
        return findings

    def render(self, config: Config, format: str | None = None) -> Written:
        """Write the config as JSON with explicit values, together with the code part and the launch
        command.
        """
        self.chosen(format)
        return Written(
            self.name,
            formats.text(config.given, config.opaque),
            "json",
            code=code.settings(config.given),
            snippet=code.script(config.given, config.world_size),
            environment=code.environment(config.given),
            launch=code.launch(config.given, config.world_size),
            file=code.FILE,
        )

    def program(
        self, output: Written, config: Config, plan: Mapping[str, Any], model: Config | None
    ) -> Program:
        """Return the config with a complete training script and with the config file of the model."""
        return beside(output, config, plan, model)

    def model_fields_in_script(
        self, plan: Mapping[str, Any], model: Config | None
    ) -> frozenset[str]:
        """Return the plan fields of the model that the script sets in code, because the model's
        config has no keys for them.
        """
        return model_fields_in_script(plan, model)

    def reword_for_release(self, config: Config, original: Original, was: str) -> str:
        """Return the text of the user's HJSON file or launch script with the values of `config` in
        it. Only the changed values differ from the user's text.
        """
        return reword_text(config.given, original, release(was), release(config.version))

    def knows(self, path: str, value: Any, version: str, entry: str) -> bool:
        """Return whether DeepSpeed `version` reads the key `path`. True for the code part in every
        release.
        """
        return path.startswith("code.") or path in release(version).keys

    def fitting(self, settings: Mapping[str, Any], version: str) -> dict[str, Any]:
        """Return `settings` without optimizer and scheduler arguments that the chosen type does not
        take.
        """
        out = {*strange(settings, release(version))}
        return {path: value for path, value in settings.items() if path not in out}

    def defaults(self, version: str) -> Mapping[str, Any]:
        """Return the default of each key that a release reads. The code part has no defaults."""
        paths = (path for path in fields(self.schema) if self.knows(path, None, version, PARTIAL))
        return {path: KEYS[path].at(version) if path in KEYS else None for path in paths}

    def nullable(self, path: str, version: str) -> bool:
        """Return whether null has a meaning of its own for DeepSpeed, as in `steps_per_print`,
        where null means "print nothing".
        """
        return path in NULLABLE

    def to_object(self, config: Config) -> Any:
        """Return the installed DeepSpeed's own config object. Raises `VersionError` if another
        release is installed.
        """
        return build(config)


DIALECT = DeepSpeedDialect()
