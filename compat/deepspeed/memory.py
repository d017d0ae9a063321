"""What a run of DeepSpeed keeps in memory beyond what a plan says."""

from __future__ import annotations

from bridge.stack.dialect import Config
from bridge.stack.memory_rules import SCRIPT, MemoryRules


def rules(config: Config) -> MemoryRules:
    """Return the rules of a run whose model is a script's, as transformers would build it.

    At ZeRO 0 each rank keeps all masters and moments, but in a pipeline in bf16 it is the
    BF16_Optimizer that shards them (runtime/engine.py: _do_optimizer_sanity_check).
    """
    values = config.effective
    piped = (values.get("code.pipeline_stages") or 1) > 1 and values.get("bf16.enabled")
    whole = not values.get("zero_optimization.stage") and not piped
    return MemoryRules(sharding="deepspeed", level=0 if whole else None, assumptions=SCRIPT)
