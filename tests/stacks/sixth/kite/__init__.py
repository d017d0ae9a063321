"""Kite: a small trainer that nobody runs, as a sixth dialect in one folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compat.kite import releases
from compat.kite.rules import TABLE
from compat.kite.schema import Kite

from bridge.errors import ConfigError
from bridge.files import load
from bridge.plan.section import Values, fields, flatten, validate
from bridge.stack.dialect import Config, Dialect, Reading, Written
from bridge.stack.findings import Finding, Origin
from bridge.stack.rules import Effect

SIGNATURE = ("ranks", "feed", "update", "spread", "tail", "wind")
"""Settings by which a file is known before any of this is imported."""


class KiteDialect(Dialect):
    """Kite 1.0 and 2.0."""

    name = "kite"
    title = "Kite"
    formats = ("json",)
    schema = Kite
    rules = TABLE
    versions = releases.KNOWN
    moves = releases.MOVES

    def defaults(self, version: str) -> Mapping[str, Any]:
        return {
            path: releases.DEFAULTS[version].get(path)
            for path in fields(Kite)
            if releases.has(path, version)
        }

    def parse(self, source: Any, version: str, lenient: bool) -> Reading:
        document = load(source)
        if not isinstance(document.data, dict):
            raise ConfigError(
                f"{document.name}: found {type(document.data).__name__}, expected a mapping"
            )
        given = flatten(validate(Kite, document.data))
        unread = [path for path in given if not self.knows(path, None, version, "")]
        ConfigError.raise_if(
            () if lenient else (f"{path}: not in Kite {version}; drop it" for path in unread)
        )
        kept = {path: value for path, value in given.items() if path not in unread}
        origins = {path: Origin(document.line(*path.split("."))) for path in kept}
        left_out = (
            Finding(path, f"not in Kite {version}; left out", Effect.NONE, True) for path in unread
        )
        return Reading(Values(kept), self.default_entry, origins, tuple(left_out))

    def effective(self, config: Config) -> Values:
        found = {**releases.DEFAULTS[config.version], **config.given}
        ranks = found["ranks.tensor"] * found["ranks.pipeline"]
        if config.world_size and "ranks.data" not in found and config.world_size % ranks == 0:
            found["ranks.data"] = config.world_size // ranks
        validate(Kite, Values(config.given).as_nested())
        ConfigError.raise_if(releases.problems(found, config))
        return Values(found)

    def render(self, config: Config, format: str | None = None) -> Written:
        return Written(
            self.name,
            json.dumps(config.given.as_nested(), indent=2) + "\n",
            "json",
            launch=("kite", "fly", "CONFIG"),
        )

    def format_of(self, path: str | Path | None) -> str | None:
        return "json" if path is not None and Path(path).suffix == ".json" else None

    def knows(self, path: str, value: Any, version: str, entry: str) -> bool:
        return path in fields(Kite) and releases.has(path, version)

    def recognises(self, data: Any) -> int:
        own = {path.partition(".")[0] for path in fields(Kite)}
        return 3 * len(own & {*data}) if isinstance(data, dict) else 0


DIALECT = KiteDialect()
