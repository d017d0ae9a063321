"""The dialect of accelerate: config files of FSDP and DDP. Runs of DeepSpeed are DeepSpeed's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from bridge.plan.section import Values, fields
from bridge.stack.dialect import Config, Reading, Written
from bridge.stack.packaged_dialect import PackagedDialect
from bridge.stack.sources import Placed
from compat.accelerate import formats, host
from compat.accelerate.formats import convert_to_fsdp2, fill_in, has_setting, write
from compat.accelerate.slots import at_release


class AccelerateDialect(PackagedDialect):
    """The dialect of accelerate's config files, with the arguments of Hugging Face's Trainer beside them."""

    name: ClassVar[str] = "accelerate"
    title: ClassVar[str] = "accelerate"
    formats: ClassVar[tuple[str, ...]] = ("yaml",)
    suffixes: ClassVar[Mapping[str, str]] = {".yaml": "yaml", ".yml": "yaml"}
    model: ClassVar[bool] = False
    default_entry: ClassVar[str] = "plan"

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
        said = Placed({}, {}).overlay(trainer or {}).places
        question = host.Question({}, {}, trainer=said, world=world_size)
        release = self.release(version)
        with at_release(release):
            return self.check_reading(lambda: formats.read(source, question), release, world_size)

    def parse(self, source: Any, version: str, lenient: bool) -> Reading:
        """Return the typed values of a source, with their lines and what the launcher says of them."""
        return formats.read(source, host.Question({}, {}))

    def effective(self, config: Config) -> Values:
        """Return the values of the run, with the defaults of its kind."""
        with at_release(config.version):
            return Values(fill_in(config.given, config.world_size, config.entry == "file"))

    def renew(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings of FSDP 1 in the words of FSDP 2, as accelerate's own `to-fsdp2` does."""
        return convert_to_fsdp2(settings)

    def render(self, config: Config, format: str | None = None) -> Written:
        """Write the config file, and the Trainer's arguments beside it."""
        self.chosen(format)
        return write(config.given)

    def knows(self, path: str, value: Any, version: str, entry: str) -> bool:
        """Return whether the release has such a setting."""
        with at_release(version):
            return path in fields(self.schema) and has_setting(path)


DIALECT = AccelerateDialect()
"""The one instance."""
