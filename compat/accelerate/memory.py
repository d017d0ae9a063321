"""What a run that accelerate starts keeps in memory beyond what a plan says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.stack.memory_rules import SCRIPT, MemoryRules

if TYPE_CHECKING:
    from bridge.stack.dialect import Config


def rules(config: Config) -> MemoryRules:
    """Return the rules of FSDP, or of DDP for every other kind of run."""
    fsdp = config.effective.get("distributed_type") == "FSDP"
    return MemoryRules(sharding="fsdp" if fsdp else "ddp", assumptions=SCRIPT)
