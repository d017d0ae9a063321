"""What AutoModel keeps in memory beyond what a plan says."""

from __future__ import annotations

from bridge.stack.dialect import Config
from bridge.stack.memory_rules import SCRIPT, MemoryRules

LOSSES = {"TEParallelCrossEntropy": "te", "FusedLinearCrossEntropy": "linear"}
"""Losses that need less memory than that of plain torch, by the class that a recipe names
(components/loss/te_parallel_ce.py, linear_ce.py).
"""
LOADED = (
    "weights are taken to be loaded in bf16 and trained so: model.torch_dtype does not say more"
)


def rules(config: Config) -> MemoryRules:
    """Return the rules of a recipe: FSDP2 or Megatron-FSDP, or DDP."""
    values = config.effective
    target = str(values.get("loss_fn._target_") or "").rpartition(".")[2]
    ddp = values.get("distributed.strategy") == "ddp"
    loss = LOSSES.get(target, "torch")
    return MemoryRules(
        sharding="ddp" if ddp else "fsdp",
        loss=loss,  # type: ignore[arg-type]
        copies_inputs=False,
        loaded=None if values.get("model.torch_dtype") else "bf16",
        assumptions=(*SCRIPT[:1], *(() if values.get("model.torch_dtype") else (LOADED,))),
    )
