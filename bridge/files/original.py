"""The text from which a config was read, kept so that new values can be written into it and comments stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from bridge.files.document import Document
from bridge.files.read import parse
from bridge.files.secrets import Secrets
from bridge.shell.script import Script


@dataclass(frozen=True)
class Original:
    """The text from which a config was read, and the suffix that tells its format.

    For a script, also the variables that the user gave and the chosen launch.
    """

    text: str
    suffix: str = ""
    outside: Mapping[str, str] = field(default_factory=dict)
    chosen: int | None = None

    @cached_property
    def secrets(self) -> Secrets:
        """Secrets in the text, in the given variables, and in the arguments of a script.

        They must not be shown.
        """
        data = self.document.data
        return Secrets.of(
            self.text,
            {**self.outside, **(data.variables_with_value if isinstance(data, Script) else {})},
        )

    @cached_property
    def document(self) -> Document:
        """The text, parsed again."""
        document = parse(self.text, "the original", self.suffix)
        if isinstance(document.data, Script):
            return replace(document, data=document.data.start_with(self.outside, self.chosen))
        return document
