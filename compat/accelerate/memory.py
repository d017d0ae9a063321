"""What a run that accelerate starts keeps in memory beyond what a plan says."""

from __future__ import annotations

from bridge.stack.dialect import Config
from bridge.stack.memory_rules import SCRIPT, MemoryRules


def rules(config: Config) -> MemoryRules:
    """Return the rules of FSDP or of Megatron-LM, or of DDP for every other kind of run."""
    if (kind := config.effective.get("distributed_type")) in ("FSDP", "MEGATRON_LM"):
        return MemoryRules(sharding="fsdp" if kind == "FSDP" else "megatron", assumptions=SCRIPT)
    loaded = "weights that are trained are taken to be loaded in fp32"
    return MemoryRules(sharding="ddp", assumptions=(*SCRIPT, loaded))
