"""What the two releases of Kite have, take and refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bridge.stack.dialect import Config
from bridge.stack.setting_renames import rename_setting

KNOWN = ("1.0", "2.0")
ONLY = {"update.lr": "1.0", "update.rate": "2.0", "wind": "2.0"}
ALWAYS = {
    "ranks.tensor": 1,
    "ranks.pipeline": 1,
    "feed.each": 1,
    "feed.times": 1,
    "spread": 0,
    "numbers": "full",
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "1.0": {**ALWAYS, "update.lr": 0.001, "update.bound": 0.0},
    "2.0": {**ALWAYS, "update.rate": 0.001, "update.bound": 1.0, "wind": False},
}
MOVES = (rename_setting("update.lr", "update.rate", "2.0"),)


def has(path: str, version: str) -> bool:
    """Whether a release has a setting."""
    return ONLY.get(path, version) == version


def problems(found: Mapping[str, Any], config: Config) -> Iterator[str]:
    """What a release refuses."""
    ranks = found["ranks.tensor"] * found["ranks.pipeline"] * found.get("ranks.data", 1)
    if config.world_size and ("ranks.data" not in found or ranks != config.world_size):
        yield f"ranks: tensor x pipeline x data is {ranks}; expected {config.world_size}"
    if config.version == "2.0" and found["spread"] > 1 and found["ranks.pipeline"] > 1:
        yield f"spread: found {found['spread']} with ranks.pipeline {found['ranks.pipeline']}; use 0 or 1"
    yield from (
        f"{path}: not in Kite {config.version}; drop it"
        for path in config.given
        if not has(path, config.version)
    )
