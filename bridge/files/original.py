"""The text of a config's source, kept so that new values can be written into it with all comments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from bridge.files.document import Document
from bridge.files.read import parse
from bridge.files.shell import Script
from bridge.secrets import Secrets


@dataclass(frozen=True)
class Original:
    """The text of a source, its suffix, which tells the format, and the arguments and variables of a script."""

    text: str
    suffix: str = ""
    outside: Mapping[str, str] = field(default_factory=dict)
    chosen: int | None = None

    @cached_property
    def secrets(self) -> Secrets:
        """Secrets in the text, in variables of a script, and in its arguments. They must not be shown."""
        data = self.document.data
        return Secrets.of(
            self.text, {**self.outside, **(data.named if isinstance(data, Script) else {})}
        )

    @cached_property
    def document(self) -> Document:
        """The text, parsed again in its format."""
        document = parse(self.text, "the original", self.suffix)
        if isinstance(document.data, Script):
            return replace(document, data=document.data.told(self.outside, self.chosen))
        return document
