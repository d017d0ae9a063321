"""What Fast-LLM keeps in memory beyond what a plan says."""

from __future__ import annotations

from bridge.stack.dialect import Config
from bridge.stack.memory_rules import MemoryRules


def rules(config: Config) -> MemoryRules:
    """Return the rules of Fast-LLM: its sharding is the native engine's, with kernels of Triton."""
    return MemoryRules(sharding="native", kernels="fused", loss="plain")
