"""The text that a config was read from, kept so that what comes back is written into it, comments and all."""

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
    """The text of a source, the suffix that tells its format, and how a script was started."""

    text: str
    suffix: str = ""
    outside: Mapping[str, str] = field(default_factory=dict)
    chosen: int | None = None

    @cached_property
    def secrets(self) -> Secrets:
        """What must not be shown of it: in its text, in variables of a script, and in what that was started with."""
        data = self.document.data
        return Secrets.of(self.text, {**self.outside, **(data.named if isinstance(data, Script) else {})})

    @cached_property
    def document(self) -> Document:
        """The text, parsed as it was."""
        document = parse(self.text, "the original", self.suffix)
        if isinstance(document.data, Script):
            return replace(document, data=document.data.told(self.outside, self.chosen))
        return document
