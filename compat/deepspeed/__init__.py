"""The DeepSpeed dialect: JSON configs of DeepSpeed 0.15.0 to 0.19.8, and the settings of the run
that stay in the script.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from bridge.errors import BridgeError
from bridge.files import Original, Script
from bridge.plan.section import Values, fields
from bridge.stack.dialect import Config, PackagedDialect, Program, Reading, Saves, Written
from bridge.stack.findings import Finding
from bridge.stack.launch_command import torchrun
from bridge.stack.rules import Effect, How
from bridge.stack.sources import NO_SOURCES, Placed
from compat.deepspeed.names import install, listen, resolve_name

if TYPE_CHECKING:
    from bridge.checkpoint.hub import Hub
    from compat.deepspeed.releases import Release


MOST_OTHERS = 4
"""Largest number of keys of a config for each key that DeepSpeed reads."""


def _looks_read(key: str, inner: set[str], value: Any) -> bool:
    """Return whether the value of a top-level key looks as DeepSpeed reads it. `inner` are the keys of that section; the
    empty key stands for a key that is no section.
    """
    if "" in inner or key == "zero_optimization":
        return True
    if not isinstance(value, Mapping):
        return False
    read = len(inner & value.keys())
    return not value or read > len(value) - read


class DeepSpeedFile(Config):
    """A DeepSpeed config. `ds_config` returns the mapping for `deepspeed.initialize`, and `script`
    returns a training script for this config.
    """

    @cached_property
    def ds_config(self) -> dict[str, Any]:
        """The config as the nested mapping that the JSON file holds."""
        from compat.deepspeed.formats import plain

        return plain(self.given, self.opaque)

    @cached_property
    def script(self) -> str:
        """A short training script that fits this config."""
        from compat.deepspeed.code import script

        return script(self.given, self.world_size)


__all__ = ["DIALECT", "DeepSpeedDialect", "DeepSpeedFile", "install"]
PARTS = ("tensor_parallel", "pipeline_stages", "context_parallel", "expert_parallel")
"""The settings of the training script that set the sizes of the mesh axes."""
SCRIPT = "train.py"
HALVES = {"bf16": "BF16", "fp16": "F16"}
"""The name of each 16-bit format in safetensors files, by the config section that switches the
format on.
"""
PARTIAL = "plan"
"""Marks a config that stagebridge has made from a plan (`Config.entry`). Only such a config may
lack the batch keys.
"""
BATCH = "train_micro_batch_size_per_gpu"


def _scheduler_state(config: Config, hub: Hub) -> Mapping[str, Any] | None:
    """Return the state of torch's LambdaLR after the number of optimizer steps in `hub`, if the
    script builds a LambdaLR.

    Return an empty mapping if the script builds no scheduler, and None to keep the scheduler state
    of the source checkpoint.
    """
    from compat.deepspeed.schedule import steers

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
        from compat.deepspeed.trainer import arguments, rename_recipe

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
        from compat.deepspeed import formats

        return formats.read(
            source, self._at(version), lenient, auto, code, arguments, world, open_auto
        )

    def _at(self, version: str) -> Release:
        from compat.deepspeed.releases import release

        return release(version)

    def effective(self, config: Config) -> Values:
        """Return the values that the release's own DeepSpeedConfig would hold, with the default
        arguments of the optimizer and the scheduler.
        """
        from compat.deepspeed.effective import effective

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
        from compat.deepspeed.editors import schema

        return schema()

    def inspect(self, config: Config) -> tuple[Finding, ...]:
        """Return findings about settings that DeepSpeed accepts and then ignores or gets wrong."""
        from compat.deepspeed.checks import inspect

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
        from compat.deepspeed import code, formats

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
        from compat.deepspeed.script_writer import beside

        return beside(output, config, plan, model)

    def model_fields_in_script(
        self, plan: Mapping[str, Any], model: Config | None
    ) -> frozenset[str]:
        """Return the plan fields of the model that the script sets in code, because the model's
        config has no keys for them.
        """
        from compat.deepspeed.script_writer import model_fields_in_script

        return model_fields_in_script(plan, model)

    def reword_for_release(self, config: Config, original: Original, was: str) -> str:
        """Return the text of the user's HJSON file or launch script with the values of `config` in
        it. Only the changed values differ from the user's text.
        """
        from compat.deepspeed.rewriting import reword_text

        return reword_text(config.given, original, self._at(was), self._at(config.version))

    def recognises(self, data: Any) -> int:
        """Return the number of top-level keys in a config that DeepSpeed reads; a section counts only
        if DeepSpeed reads a key in it. For a launch script return 1 if one of its commands gets a
        DeepSpeed config, else 0.
        """
        from compat.deepspeed.releases import KEYS
        from compat.deepspeed.scripts import is_launch

        if isinstance(data, Script):
            return int(any(is_launch(launch, data) for launch in data.launches))
        if not isinstance(data, Mapping):
            return 0
        own: dict[str, set[str]] = {}
        for path in KEYS:
            top, _, inner = path.partition(".")
            own.setdefault(top, set()).add(inner.partition(".")[0])
        count = sum(_looks_read(key, own[key], value) for key, value in data.items() if key in own)
        # Keys that DeepSpeed does not have speak against it: some of its names are common words.
        return count if MOST_OTHERS * count >= len(data) else 0

    def mistaken(self, data: Any) -> str:
        """Return a message if the file is a config of accelerate or of Hugging Face's Trainer, else
        an empty string.
        """
        from compat.deepspeed import lookalike_files, scripts

        return (
            scripts.mistaken(data) if isinstance(data, Script) else lookalike_files.mistaken(data)
        )

    def knows(self, path: str, value: Any, version: str, entry: str) -> bool:
        """Return whether DeepSpeed `version` reads the key `path`. True for the code part in every
        release.
        """
        return path.startswith("code.") or path in self._at(version).keys

    def fitting(self, settings: Mapping[str, Any], version: str) -> dict[str, Any]:
        """Return `settings` without optimizer and scheduler arguments that the chosen type does not
        take.
        """
        from compat.deepspeed.refusals import strange

        out = {*strange(settings, self._at(version))}
        return {path: value for path, value in settings.items() if path not in out}

    def defaults(self, version: str) -> Mapping[str, Any]:
        """Return the default of each key that a release reads. The code part has no defaults."""
        from compat.deepspeed.releases import KEYS

        paths = (path for path in fields(self.schema) if self.knows(path, None, version, PARTIAL))
        return {path: KEYS[path].at(version) if path in KEYS else None for path in paths}

    def nullable(self, path: str, version: str) -> bool:
        """Return whether null has a meaning of its own for DeepSpeed, as in `steps_per_print`,
        where null means "print nothing".
        """
        from compat.deepspeed.formats import NULLABLE

        return path in NULLABLE

    def to_object(self, config: Config) -> Any:
        """Return the installed DeepSpeed's own config object. Raises `VersionError` if another
        release is installed.
        """
        from compat.deepspeed.live import build

        return build(config)


DIALECT = DeepSpeedDialect()

# `import compat.deepspeed.comm` names no file here, so the
# finder has to stand before a script asks for it.
listen()


def __getattr__(name: str) -> Any:
    """Return the native engine's implementation of a name of DeepSpeed's: `import compat.deepspeed
    as deepspeed` migrates a script.

    The engine is loaded when a script first uses one of these names, so that reading configs needs
    no torch.
    """
    return resolve_name("", name)
