"""The dialect of Hugging Face: how configs of models are read, completed and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from bridge.plan.section import Values
from bridge.stack.dialect import Config, Reading, Written
from bridge.stack.findings import Finding
from bridge.stack.packaged_dialect import PackagedDialect
from compat.huggingface.effective import effective, missing
from compat.huggingface.formats import read, text


class HuggingFaceDialect(PackagedDialect):
    """The dialect of models' configs in the Hugging Face format."""

    name: ClassVar[str] = "huggingface"
    title: ClassVar[str] = "Hugging Face"
    formats: ClassVar[tuple[str, ...]] = ("json",)
    suffixes: ClassVar[Mapping[str, str]] = {".json": "json"}
    about: ClassVar[str] = "model"
    default_entry: ClassVar[str] = "file"

    def parse(self, source: Any, version: str, lenient: bool) -> Reading:
        """Read typed values, with their lines, from a file, a folder with a config.json, text, or a mapping."""
        return read(source, lenient)

    def effective(self, config: Config) -> Values:
        """Return the given values, with the defaults of the model's family for missing keys."""
        return Values(effective(config.given))

    def missing(self, config: Config) -> Iterator[Finding]:
        """Yield a finding if the model type is missing. Without it transformers cannot load the
        file.
        """
        return missing(config.given)

    def whole(self, config: Config) -> bool:
        """Return whether the config gives its model type."""
        return "model_type" in config.given

    def render(self, config: Config, format: str | None = None) -> Written:
        """Write the config as JSON."""
        return Written(self.name, text(config.given), self.chosen(format))

    def nullable(self, path: str, version: str) -> bool:
        """Return False. In this dialect None always stands for a key that is not set."""
        return False


DIALECT = HuggingFaceDialect()
"""The one instance."""
