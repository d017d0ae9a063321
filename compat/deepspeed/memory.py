"""What a run of DeepSpeed keeps in memory beyond what a plan says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.stack.memory_rules import SCRIPT, MemoryRules

if TYPE_CHECKING:
    from bridge.stack.dialect import Config


def rules(config: Config) -> MemoryRules:
    """Return the rules of a run whose model is a script's, as transformers would build it."""
    return MemoryRules(sharding="deepspeed", assumptions=SCRIPT)
