"""Hugging Face's accelerate: a program that starts runs of FSDP, DeepSpeed and Megatron-LM.

`host` reads what starts such a run, `launcher` follows accelerate's launcher, `trainer` what Hugging Face's Trainer
passes on, and `plugins` what the plugins make of the environment that the launcher sets. The dialect reads and writes
runs of FSDP and DDP; those of DeepSpeed are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from bridge.plan.section import Values, fields
from bridge.stack.dialect import Config, PackagedDialect, Reading, Written
from bridge.stack.sources import Placed


class AccelerateDialect(PackagedDialect):
    """The dialect of accelerate's config files, with the arguments of Hugging Face's Trainer beside them."""

    name: ClassVar[str] = "accelerate"
    title: ClassVar[str] = "accelerate"
    formats: ClassVar[tuple[str, ...]] = ("yaml",)
    suffixes: ClassVar[Mapping[str, str]] = {".yaml": "yaml", ".yml": "yaml"}
    model: ClassVar[bool] = False
    default_entry: ClassVar[str] = "plan"
    grouping = True

    def read(
        self,
        source: Any,
        version: str | None = None,
        world_size: int | None = None,
        lenient: bool = False,
        *,
        trainer: Mapping[str, Any] | None = None,
        open_auto: bool = False,
    ) -> Config:
        """Read a config file or a launch script; `trainer` has arguments of the Trainer that are given beside it.

        Raises `BridgeError` with every problem.
        """
        from compat.accelerate import formats, host
        from compat.accelerate.slots import at_release

        said = Placed({}, {}).overlay(trainer or {}).places
        question = host.Question({}, {}, trainer=said, world=world_size)
        release = self.release(version)
        with at_release(release):
            return self.check_reading(lambda: formats.read(source, question), release, world_size)

    def parse(self, source: Any, version: str, lenient: bool) -> Reading:
        """Return the typed values of a source, with their lines and what the launcher says of them."""
        from compat.accelerate import formats, host

        return formats.read(source, host.Question({}, {}))

    def effective(self, config: Config) -> Values:
        """Return the values of the run, with the defaults of its kind."""
        from compat.accelerate.formats import fill_in
        from compat.accelerate.slots import at_release

        with at_release(config.version):
            return Values(fill_in(config.given, config.world_size, config.entry == "file"))

    def renew(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings of FSDP 1 in the words of FSDP 2, as accelerate's own `to-fsdp2` does."""
        from compat.accelerate.formats import convert_to_fsdp2

        return convert_to_fsdp2(settings)

    def render(self, config: Config, format: str | None = None) -> Written:
        """Write the config file, and the Trainer's arguments beside it."""
        from compat.accelerate.formats import write

        self.chosen(format)
        return write(config.given)

    def knows(self, path: str, value: Any, version: str, entry: str) -> bool:
        """Return whether the release has such a setting."""
        from compat.accelerate.formats import has_setting
        from compat.accelerate.slots import at_release

        with at_release(version):
            return path in fields(self.schema) and has_setting(path)

    def recognises(self, data: Any) -> int:
        """Return a positive score for a config of accelerate, or a script that starts a run by it."""
        from compat.accelerate.host import recognises

        return 3 * recognises(data)


DIALECT = AccelerateDialect()
"""The one instance."""
