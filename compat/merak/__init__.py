"""The Merak dialect: command lines and keyword mappings of Merak 0.1.0 to 2.2.2 and its main
branch, with the settings of the training script.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from bridge.plan.section import Values
from bridge.stack.dialect import Config, PackagedDialect, Reading, Written
from compat.merak.entries import entry, listen


class MerakConfig(Config):
    """The settings of a Merak run. `script` is a training script that fits the command line."""

    @cached_property
    def flags(self) -> list[str]:
        """The arguments on the command line, word by word."""
        from compat.merak.formats import flags

        return [word for line in flags(self.given) for word in line]

    @cached_property
    def script(self) -> str:
        """Python code for the settings of the script: the call of `init`, the tensor-parallel lists
        and the trainer.
        """
        from compat.merak.code import script

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
        from compat.merak.formats import read

        release = self.release(version)
        return self.check_reading(lambda: read(source, release, lenient, code), release, world_size)

    def parse(self, source: Any, version: str, lenient: bool) -> Reading:
        """Return the typed values of a source, their spellings and remarks on them."""
        from compat.merak.formats import read

        return read(source, version, lenient)

    def effective(self, config: Config) -> Values:
        """Return the effective values: defaults of the release and derived values. Raises
        `ConfigError` with every reason why Merak refuses the config.
        """
        from compat.merak.effective import effective

        return Values(effective(config.given, config.version, config.world_size))

    def knows(self, path: str, value: Any, version: str, entry: str) -> bool:
        """Return whether Merak `version` has the parameter or argument `path`."""
        from compat.merak.releases import release

        return path in release(version).defaults

    def defaults(self, version: str) -> Mapping[str, Any]:
        """Return the default of each parameter in a release."""
        from compat.merak.releases import release

        return release(version).defaults

    def spellings(self, path: str) -> tuple[str, ...]:
        """Return the flag of an argument; empty for a parameter of the script."""
        section, _, name = path.partition(".")
        return (f"--{name}",) if section == "args" else ()

    def render(self, config: Config, format: str | None = None) -> Written:
        """Write the arguments as a command line and the other settings as code, or write all
        settings as one keyword mapping.
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
        """Return the number of Merak's names in a source. Names that other stacks have too count
        only if the source also has a name that only Merak has.
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
"""Names of Merak that the native engine implements, each with its module. `import compat.merak as
Merak` migrates a script.
"""


def __getattr__(name: str) -> Any:
    """Return one of Merak's names. The engine is loaded when a script first uses such a name."""
    return entry(__name__, ENTRIES, name)


listen()
