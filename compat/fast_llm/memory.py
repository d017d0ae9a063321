"""What Fast-LLM keeps in memory beyond what a plan says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.stack.memory_rules import MemoryRules

if TYPE_CHECKING:
    from bridge.stack.dialect import Config


def rules(config: Config) -> MemoryRules:
    """Return the rules of Fast-LLM: its sharding is the native engine's, with kernels of Triton."""
    return MemoryRules(sharding="native", kernels="fused", loss="plain")
