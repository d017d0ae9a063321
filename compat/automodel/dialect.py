"""The dialect of NeMo AutoModel: how its recipes are read, completed, checked and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar

from bridge.plan.section import Values, fields
from bridge.stack.dialect import Config, Reading, Written
from bridge.stack.findings import Finding
from bridge.stack.launch_command import torchrun
from bridge.stack.packaged_dialect import PackagedDialect
from bridge.stack.requirements import missing
from compat.automodel.effective import effective
from compat.automodel.formats import FILE, RECIPE, program, read, text
from compat.automodel.pipeline import PipelineConfig, live, pipeline
from compat.automodel.releases import release
from compat.automodel.requirements import NEEDS, whole


class AutoModelConfig(Config):
    """A recipe of AutoModel. The property `pipeline` holds the settings of the recipe's pipeline
    section.
    """

    @cached_property
    def pipeline(self) -> PipelineConfig:
        """The settings of AutoModel's PipelineConfig, with the values that a run of the recipe
        uses. The returned object has a method `to_dict()`, as AutoModel's class has.
        """
        return pipeline(self)


class AutoModelDialect(PackagedDialect):
    """NeMo AutoModel, 0.1.0 to 0.7.0."""

    default_entry: ClassVar[str] = RECIPE
    name: ClassVar[str] = "automodel"
    title: ClassVar[str] = "NeMo AutoModel"
    formats: ClassVar[tuple[str, ...]] = ("yaml",)
    suffixes: ClassVar[Mapping[str, str]] = {".yaml": "yaml", ".yml": "yaml"}
    config_type: ClassVar[type[Config]] = AutoModelConfig

    def parse(self, source: Any, version: str, lenient: bool) -> Reading:
        """Read a path, text, mapping, list of overrides or live PipelineConfig. Return the typed
        values, the line of each value, and remarks.
        """
        return read(source, release(version), lenient)

    def effective(self, config: Config) -> Values:
        """Return the values with which the run starts: the settings of the recipe, and AutoModel's
        defaults for all other settings.
        """
        return Values(
            effective(config.given, release(config.version), config.world_size, config.entry)
        )

    def missing(self, config: Config) -> Iterator[Finding]:
        """Yield findings about a recipe that cannot start because settings are missing that
        AutoModel needs: the model, the optimizer, the data set or the loss.
        """
        if config.entry == RECIPE:
            yield from missing(config.given, NEEDS, self.whole(config))

    def names_run(self, config: Config) -> bool:
        """Whether the recipe names the model and the training data."""
        data = config.given.get("dataset.*") or {}
        return config.entry == RECIPE and bool(
            config.given.get("model._target_") and data.get("_target_")
        )

    def whole(self, config: Config) -> bool:
        """Whether the source names stored weights or training data, or says how long to train."""
        return whole(config.given)

    def render(self, config: Config, format: str | None = None) -> Written:
        """Return the recipe as YAML that sets every value explicitly, together with the command
        that launches it.
        """
        self.chosen(format)
        at = release(config.version)
        launch = torchrun(config.world_size or 1, "-m", *program(at), FILE)
        return Written(self.name, text(config.given, at), "yaml", launch=launch, file=FILE)

    def knows(self, path: str, value: Any, version: str, entry: str) -> bool:
        """Whether release `version` reads the setting `path`."""
        return release(version).reads(path)

    def defaults(self, version: str) -> Mapping[str, Any]:
        """Return the default of each setting in a release. The defaults of a strategy's options
        come from the class of that strategy.
        """
        at = release(version)
        parts = [at.defaults(part) for part in ("", "pipeline", *at.strategies)]
        defaults = {path: value for part in parts for path, value in part.items()}
        # An empty recipe last: several strategies have some options,
        # and its strategy decides between their defaults.
        defaults |= self.config({}, version).effective.flat()
        return {path: defaults.get(path) for path in fields(self.schema) if at.reads(path)}

    def nullable(self, path: str, version: str) -> bool:
        """Return False: null in a recipe means that the setting is not set."""
        return False

    def to_object(self, config: Config) -> Any:
        """Return the installed AutoModel's own PipelineConfig. Raises `VersionError` if AutoModel
        is not installed or has another release.
        """
        return live(config)


DIALECT = AutoModelDialect()
