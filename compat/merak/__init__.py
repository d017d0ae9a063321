"""The Merak dialect: command lines and keyword mappings of Merak 0.1.0 to 2.2.2 and main, with
settings of the script.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from bridge.config import Values
from bridge.dialect import Config, PackagedDialect, Reading, Written
from compat.merak.entries import entry, listen


class MerakConfig(Config):
    """A Merak run. `script` is a training script that fits its command line."""

    @cached_property
    def flags(self) -> list[str]:
        """The command line's arguments, word by word."""
        from compat.merak.formats import flags

        return [word for line in flags(self.given) for word in line]

    @cached_property
    def script(self) -> str:
        """Python code with `init` by name, the tensor-parallel lists and the trainer."""
        from compat.merak.code import script

        return script(self.given, self.effective, self.version)


class MerakDialect(PackagedDialect):
    """Merak, 0.1.0 to 2.2.2 and main."""

    name: ClassVar[str] = "merak"
    title: ClassVar[str] = "Merak"
    formats: ClassVar[tuple[str, ...]] = ("flags", "json")
    suffixes: ClassVar[Mapping[str, str]] = {".txt": "flags", ".args": "flags", ".json": "json"}
    model: ClassVar[bool] = False
    coded: ClassVar[bool] = True
    config_type: ClassVar[type[Config]] = MerakConfig
    default_entry: ClassVar[str] = "arguments"

    def read(
        self,
        source: Any,
        version: str | None = None,
        world_size: int | None = None,
        lenient: bool = False,
        *,
        code: Mapping[str, Any] | None = None,
    ) -> Config:
        """Read a command line, a file of flags, or a keyword mapping, and check it as that release
        does.

        A mapping is flat, or has the keys `init`, `args`, `trainer` and `tp_lists`. `code` holds
        settings of the training script, such as `{"init": {"pp": 2, "tp": 2, "dp": 2}}`. Raises
        `BridgeError` with every problem.
        """
        from compat.merak.formats import read

        release = self.release(version)
        return self.settled(lambda: read(source, release, lenient, code), release, world_size)

    def parse(self, source: Any, version: str, lenient: bool) -> Reading:
        """Typed values, spellings and remarks from a source."""
        from compat.merak.formats import read

        return read(source, version, lenient)

    def effective(self, config: Config) -> Values:
        """Defaults of the release and derived values. Raises `ConfigError` with everything that Merak refuses."""
        from compat.merak.effective import effective

        return Values(effective(config.given, config.version, config.world_size))

    def knows(self, path: str, value: Any, version: str, entry: str) -> bool:
        """Whether that release has the parameter or argument `path`."""
        from compat.merak.releases import release

        return path in release(version).defaults

    def defaults(self, version: str) -> Mapping[str, Any]:
        """Default of each parameter that a release has."""
        from compat.merak.releases import release

        return release(version).defaults

    def spellings(self, path: str) -> tuple[str, ...]:
        """The flag of an argument."""
        section, _, name = path.partition(".")
        return (f"--{name}",) if section == "args" else ()

    def render(self, config: Config, format: str | None = None) -> Written:
        """The command line's arguments with the code part beside them, or all settings as one
        keyword mapping.
        """
        from compat.merak import code, formats

        snippet = code.script(config.given, config.effective, config.version)
        if (
            self.chosen(format) == "json"
        ):  # a mapping of everything, which no parser of Merak's reads
            return Written(self.name, formats.json_text(config.given), "json", snippet=snippet)
        return Written(
            self.name,
            formats.flags_text(config.given),
            "flags",
            code=formats.script_part(config.given),
            snippet=snippet,
            launch=code.launch(config.given, config.world_size),
            file=code.FLAGS,
            arguments=any(path.startswith("args.") for path in config.given),
        )

    def recognises(self, data: Any) -> int:
        """Number of Merak's names in a source. Names that other stacks have too are counted only if
        one is there that only Merak has.
        """
        from compat.merak.recognition import score

        return score(data)


DIALECT = MerakDialect()
"""The one instance."""

ENTRIES = {
    "init": "launch",
    "print_rank_0": "launch",
    "init_empty_weights": "launch",
    "set_tp_layer_lists": "launch",
    "MerakArguments": "arguments",
    "MerakTrainer": "trainer",
}
"""Merak's own names, implemented by the native engine: `import compat.merak as Merak` migrates a
script.
"""


def __getattr__(name: str) -> Any:
    """Load the engine when a script first uses one of its names."""
    return entry(__name__, ENTRIES, name)


listen()
