"""What Merak keeps in memory beyond what a plan says."""

from __future__ import annotations

from bridge.stack.dialect import Config
from bridge.stack.memory_rules import MemoryRules


def rules(config: Config) -> MemoryRules:
    """Return the rules of Merak, which takes ZeRO from DeepSpeed and models from transformers."""
    return MemoryRules(
        sharding="deepspeed",
        attention="eager",
        assumptions=("attention keeps all probabilities, as the eager attention of transformers",),
    )
