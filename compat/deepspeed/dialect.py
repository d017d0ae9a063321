"""The dialect of DeepSpeed: how its configs are read, completed, checked and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from bridge.errors import BridgeError
from bridge.files import Original
from bridge.plan.section import Values, fields
from bridge.stack.dialect import Config, PackagedDialect, Program, Reading, Saves, Written
from bridge.stack.findings import Finding
from bridge.stack.launch_command import torchrun
from bridge.stack.rules import Effect, How
from bridge.stack.sources import NO_SOURCES, Placed
from compat.deepspeed import code, formats
from compat.deepspeed.checks import inspect
from compat.deepspeed.code import script
from compat.deepspeed.editors import schema
from compat.deepspeed.effective import effective
from compat.deepspeed.formats import NULLABLE, PARTIAL, plain
from compat.deepspeed.live import build
from compat.deepspeed.refusals import strange
from compat.deepspeed.releases import KEYS, release
from compat.deepspeed.rewriting import reword_text
from compat.deepspeed.schedule import steers
from compat.deepspeed.script_writer import beside, model_fields_in_script
from compat.deepspeed.trainer import arguments, rename_recipe

if TYPE_CHECKING:
    from bridge.checkpoint.hub import Hub
    from compat.deepspeed.releases import Release


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


PARTS = ("tensor_parallel", "pipeline_stages", "context_parallel", "expert_parallel")
"""The settings of the training script that set the sizes of the mesh axes."""
SCRIPT = "train.py"
HALVES = {"bf16": "BF16", "fp16": "F16"}
"""The name of each 16-bit format in safetensors files, by the config section that switches the
format on.
"""
BATCH = "train_micro_batch_size_per_gpu"


def _scheduler_state(config: Config, hub: Hub) -> Mapping[str, Any] | None:
    """Return the state of torch's LambdaLR after the number of optimizer steps in `hub`, if the
    script builds a LambdaLR.

    Return an empty mapping if the script builds no scheduler, and None to keep the scheduler state
    of the source checkpoint.
    """
    steps = hub.where.steps
    if steers(config.given):
        # LambdaLR steps once when it is built, so its count of steps is one ahead of the updates.
        return (
            None
            if steps is None
            else {"last_epoch": steps, "_step_count": steps + 1, "lr_lambdas": []}
        )
    if hub.schedule is None and config.given.get("scheduler.type") is None:
        return {}
    return None


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
    rewrites: ClassVar[tuple[str, ...]] = ("hjson", "script")
    config_type: ClassVar[type[Config]] = DeepSpeedFile
    loads: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "deepspeed": {},
        "universal": {"checkpoint.load_universal": True},
    }
    grouping = True
    spared = ("decay_scope=matrices",)
    by_place = True

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
        return Placed(filling, settings.places, settings.lost)

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
            source, self._at(version), lenient, auto, code, arguments, world, open_auto
        )

    def _at(self, version: str) -> Release:
        return release(version)

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
        findings = tuple(one for one in inspect(config) if one.path not in paths)
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

    def saves(self, config: Config, hub: Hub) -> Saves:
        """Return the checkpoint format to write: ZeRO's own files if the source has optimizer
        groups, else universal files. ZeRO's own files list the parameters of each group.
        """
        values = config.effective
        parts = {name: values.get(f"code.{name}") or 1 for name in PARTS}
        # AutoTP splits tensors too, but by a key of the file rather than by the script.
        parts["autotp_size"] = values.get("tensor_parallel.autotp_size") or 1
        BridgeError.raise_if(
            f"{name}: found {size}, but stagebridge writes DeepSpeed checkpoints only for runs"
            " whose ranks are all data-parallel: set it to 1"
            for name, size in parts.items()
            if size > 1
        )
        level = values.get("zero_optimization.stage") or 0
        if not level:
            raise BridgeError(
                "zero_optimization.stage: found 0, but stagebridge writes DeepSpeed checkpoints"
                " only for stage 1 or more: set the stage to 1, which gives the same numbers"
            )
        dtype = next(
            (code for name, code in HALVES.items() if values.get(f"{name}.enabled")), "F32"
        )
        schedule, settings = _scheduler_state(config, hub), dict(config.ds_config)  # type: ignore[attr-defined]
        if values.get("checkpoint.load_universal") or not hub.groups:
            return Saves("universal", dtype=dtype, schedule=schedule, config=settings)
        return Saves(
            "deepspeed", int(level), config.world_size, dtype, schedule=schedule, config=settings
        )

    def settings_for_groups(self, file: str) -> Mapping[str, Any]:
        """Return the setting that makes the script read parameter groups from the file named
        `file`.
        """
        return {"code.parameter_groups": file}

    def resuming(self, output: Written, folder: str, groups: str = "") -> Written:
        """Return `output`, changed so that the run continues from the checkpoint in `folder`. If
        `output` has a complete training script, the launch command gets the option `--save`.
        Otherwise the script for the user to complete gets a line that loads the checkpoint.
        """
        if output.beside:
            return replace(output, launch=(*output.launch, "--save", folder))
        # The last bracket on a line of its own closes the call of
        # deepspeed.initialize; loading needs the engine it returns.
        head, close, rest = output.snippet.rpartition("\n)\n")
        return replace(output, snippet=f'{head}{close}engine.load_checkpoint("{folder}")\n{rest}')

    def natively(
        self, output: Written, world: int, folder: str, groups: str = "", model: str = ""
    ) -> Written:
        """Return `output` with a script and a launch command that run the native engine: in the
        script the name `deepspeed` means `compat.deepspeed`.
        """
        snippet = output.snippet.replace(
            "import deepspeed\n", "import compat.deepspeed as deepspeed\n"
        )
        launch = tuple(torchrun(world, SCRIPT, "--deepspeed_config", output.file))
        return replace(
            self.resuming(replace(output, snippet=snippet, beside={}), folder), launch=launch
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
        return reword_text(config.given, original, self._at(was), self._at(config.version))

    def knows(self, path: str, value: Any, version: str, entry: str) -> bool:
        """Return whether DeepSpeed `version` reads the key `path`. True for the code part in every
        release.
        """
        return path.startswith("code.") or path in self._at(version).keys

    def fitting(self, settings: Mapping[str, Any], version: str) -> dict[str, Any]:
        """Return `settings` without optimizer and scheduler arguments that the chosen type does not
        take.
        """
        out = {*strange(settings, self._at(version))}
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
