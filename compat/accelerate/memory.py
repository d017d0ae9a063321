"""What a run that accelerate starts keeps in memory beyond what a plan says."""

from __future__ import annotations

from bridge.stack.dialect import Config
from bridge.stack.memory_rules import SCRIPT, MemoryRules


def rules(config: Config) -> MemoryRules:
    """Return the rules of FSDP, or of DDP for every other kind of run."""
    if config.effective.get("distributed_type") == "FSDP":
        return MemoryRules(sharding="fsdp", assumptions=SCRIPT)
    loaded = "weights that are trained are taken to be loaded in fp32"
    return MemoryRules(sharding="ddp", assumptions=(*SCRIPT, loaded))
