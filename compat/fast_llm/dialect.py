"""The dialect of Fast-LLM: how its configs are read, completed, checked and written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar

from bridge.plan.section import Values, fields
from bridge.stack.dialect import Config, Reading, Written
from bridge.stack.findings import Finding
from bridge.stack.launch_command import torchrun
from bridge.stack.packaged_dialect import PackagedDialect
from bridge.stack.requirements import is_given, missing
from bridge.stack.rules import Effect
from compat.fast_llm import formats, releases
from compat.fast_llm.effective import effective, mesh
from compat.fast_llm.releases import KEYS, release
from compat.fast_llm.requirements import LEARNED, NEEDS
from compat.fast_llm.rules.model import facts
from compat.fast_llm.signatures import below_zero


class FastLLMConfig(Config):
    """A Fast-LLM config. The attributes `multi_stage`, `distributed`, `schedule` and `batch` have
    the effective values of Fast-LLM's own config objects.
    """

    @cached_property
    def multi_stage(self) -> Values:
        """Effective fields of the `MultiStageConfig` object."""
        return Values(self._object("model.multi_stage."))

    @cached_property
    def distributed(self) -> Values:
        """Effective fields of the `DistributedConfig` object, including the sizes and ranks that
        Fast-LLM derives if the world size is known.
        """
        return Values({**self._object("model.distributed."), **mesh(self.effective)})

    @cached_property
    def schedule(self) -> Values:
        """Effective fields of the `ScheduleConfig` object."""
        return Values(self._object("schedule."))

    @cached_property
    def batch(self) -> Values:
        """Effective fields of the `BatchConfig` object, before 0.4.0."""
        return Values(self._object("batch."))

    def _object(self, section: str) -> dict[str, Any]:
        # Fast-LLM's objects have every field of their release, also those that are None.
        mine = [
            path for path in KEYS if path.startswith(section) and path in release(self.version).keys
        ]
        return {path.removeprefix(section): self.effective.get(path) for path in mine}


class FastLLMDialect(PackagedDialect):
    """The dialect of Fast-LLM, 0.1.0 to the main branch of 2026-07-20."""

    name: ClassVar[str] = "fast_llm"
    title: ClassVar[str] = "Fast-LLM"
    formats: ClassVar[tuple[str, ...]] = ("yaml", "overrides")
    suffixes: ClassVar[Mapping[str, str]] = {
        ".yaml": "yaml",
        ".yml": "yaml",
        ".txt": "overrides",
        ".args": "overrides",
    }
    config_type: ClassVar[type[Config]] = FastLLMConfig
    masking: ClassVar[tuple[str, ...]] = ("batch.use_loss_masking_spans",)

    def parse(self, source: Any, version: str, lenient: bool) -> Reading:
        """Read a YAML file, text, a mapping, or overrides."""
        return formats.read(source, releases.release(version), lenient)

    def effective(self, config: Config) -> Values:
        """Return the effective values of Fast-LLM's config objects. Raises `ConfigError` with every
        refusal.
        """
        return Values(effective(config.given, config.version, config.world_size))

    def beyond(self, config: Config) -> Iterable[Finding]:
        """Yield findings on negative numbers that no run can use, also inside free-form sections."""
        yield from super().beyond(config)
        for path, section in config.given.items():
            for place, value in below_zero(section, path):
                message = f"found {value}, which no run can use; expected at least 0"
                yield Finding(
                    place,
                    message,
                    Effect.NUMBERS,
                    True,
                    origin=config.origins.get(place) or config.origins.get(path),
                )

    def missing(self, config: Config) -> Iterator[Finding]:
        """Yield a finding if the config does not set the length of the run, or of documents for a
        model with learned positions.
        """
        has_table = facts(config.effective).get("model.embedding.positions") == "learned"
        needs = (*NEEDS, LEARNED) if has_table and config.context.since("0.4.0") else NEEDS
        yield from missing(config.given, needs, self.whole(config))

    def whole(self, config: Config) -> bool:
        """Whether the config says how long to train, or on what."""
        return any(
            is_given(config.given, path) for path in ("training.train_iters", "data.datasets")
        )

    def render(self, config: Config, format: str | None = None) -> Written:
        """Write the config as YAML or as words of a command line, together with the launch command."""
        chosen = self.chosen(format)
        ranks = config.effective.get("model.distributed.world_size") or 1
        launch = torchrun(ranks, "--no-python", "fast-llm")
        if chosen == "overrides":
            return Written(
                self.name,
                formats.overrides(config.given),
                chosen,
                launch=launch,
                file=formats.OVERRIDES,
                arguments=True,
            )
        # The command takes the kind of trainer from the file, or as a word of its own.
        run = ("train",) if "type" in config.given else ("train", "gpt")
        launch = (*launch, *run, "--config", formats.FILE)
        return Written(
            self.name, formats.text(config.given), chosen, launch=launch, file=formats.FILE
        )

    def knows(self, path: str, value: Any, version: str, entry: str) -> bool:
        """Return whether Fast-LLM `version` has the field."""
        return path in release(version).keys

    def defaults(self, version: str) -> Mapping[str, Any]:
        """Return the default of each key in a release."""
        at = release(version)
        return {path: at.defaults.get(path) for path in fields(self.schema) if path in at.keys}

    def nullable(self, path: str, version: str) -> bool:
        """Return whether the key has a default. Then null does not mean that the key is unset,
        because Fast-LLM uses null in place of the default.
        """
        return path in release(version).defaults


DIALECT = FastLLMDialect()
