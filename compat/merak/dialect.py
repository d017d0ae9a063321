"""The dialect of Merak: how its settings are read, completed, checked and written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from bridge.plan.section import Values
from bridge.stack.dialect import Config, Reading, Written
from bridge.stack.packaged_dialect import PackagedDialect
from compat.merak import code, formats
from compat.merak.code import script
from compat.merak.effective import effective
from compat.merak.formats import flags, read
from compat.merak.releases import release


class MerakConfig(Config):
    """The settings of a Merak run. `script` is a training script that fits the command line."""

    @cached_property
    def flags(self) -> list[str]:
        """The arguments on the command line, word by word."""
        return [word for line in flags(self.given) for word in line]

    @cached_property
    def script(self) -> str:
        """Python code for the settings of the script: the call of `init`, the tensor-parallel lists
        and the trainer.
        """
        return script(self.given, self.effective, self.version)


class MerakDialect(PackagedDialect):
    """The dialect of Merak, 0.1.0 to 2.2.2 and its main branch."""

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
        """Read a command line, a file of flags, or a keyword mapping, and check it as Merak
        `version` does.

        A mapping is flat, or has the keys `init`, `args`, `trainer` and `tp_lists`. `code` holds
        settings of the training script, such as `{"init": {"pp": 2, "tp": 2, "dp": 2}}`. Raises
        `BridgeError` with every problem.
        """
        release = self.release(version)
        return self.check_reading(lambda: read(source, release, lenient, code), release, world_size)

    def parse(self, source: Any, version: str, lenient: bool) -> Reading:
        """Return the typed values of a source, their spellings and remarks on them."""
        return read(source, version, lenient)

    def effective(self, config: Config) -> Values:
        """Return the effective values: defaults of the release and derived values. Raises
        `ConfigError` with every reason why Merak refuses the config.
        """
        return Values(effective(config.given, config.version, config.world_size))

    def knows(self, path: str, value: Any, version: str, entry: str) -> bool:
        """Return whether Merak `version` has the parameter or argument `path`."""
        return path in release(version).defaults

    def defaults(self, version: str) -> Mapping[str, Any]:
        """Return the default of each parameter in a release."""
        return release(version).defaults

    def spellings(self, path: str) -> tuple[str, ...]:
        """Return the flag of an argument; empty for a parameter of the script."""
        section, _, name = path.partition(".")
        return (f"--{name}",) if section == "args" else ()

    def render(self, config: Config, format: str | None = None) -> Written:
        """Write the arguments as a command line and the other settings as code, or write all
        settings as one keyword mapping.
        """
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


DIALECT = MerakDialect()
"""The one instance."""
