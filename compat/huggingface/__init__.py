"""The Hugging Face dialect: a model's `config.json`, of transformers 4.57 to 5.23. It describes the
model, not its training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from bridge.config import Values
from bridge.dialect import Config, PackagedDialect, Reading, Written
from bridge.findings import Finding


class HuggingFaceDialect(PackagedDialect):
    """Configs of models in the Hugging Face format."""

    name: ClassVar[str] = "huggingface"
    title: ClassVar[str] = "Hugging Face"
    formats: ClassVar[tuple[str, ...]] = ("json",)
    suffixes: ClassVar[Mapping[str, str]] = {".json": "json"}
    about: ClassVar[str] = "model"
    default_entry: ClassVar[str] = "file"

    def parse(self, source: Any, version: str, lenient: bool) -> Reading:
        """Read typed values, with their lines, from a file, a folder with a config.json, text, or a mapping."""
        from compat.huggingface.formats import read

        return read(source, lenient)

    def effective(self, config: Config) -> Values:
        """The given values, with the defaults of the model's family."""
        from compat.huggingface.effective import effective

        return Values(effective(config.given))

    def inspect(self, config: Config) -> tuple[Finding, ...]:
        """A finding on layers that a plan cannot describe."""
        from compat.huggingface.effective import foreign

        return tuple(foreign(config.given, config.origins))

    def missing(self, config: Config) -> Iterator[Finding]:
        """Yield a finding if the model type is missing, because transformers then cannot load the
        file.
        """
        from compat.huggingface.effective import missing

        return missing(config.given)

    def whole(self, config: Config) -> bool:
        """Whether the config gives its model type."""
        return "model_type" in config.given

    def render(self, config: Config, format: str | None = None) -> Written:
        """The config as JSON."""
        from compat.huggingface.formats import text

        return Written(self.name, text(config.given), self.chosen(format))

    def recognises(self, data: Any) -> int:
        """A positive score for a mapping with a model type at its top level, else 0."""
        from compat.huggingface.formats import score

        return score(data)

    def nullable(self, path: str, version: str) -> bool:
        """Never: None stands for unset."""
        return False


DIALECT = HuggingFaceDialect()
"""The one instance."""
