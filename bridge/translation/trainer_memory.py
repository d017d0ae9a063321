"""What arguments of Hugging Face's Trainer change about the memory of a run, which no file of a stack says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bridge.plan.plan import Plan
from bridge.stack.memory_rules import MemoryRules

CHECKPOINTING, LIGER, OPTIMIZER = "gradient_checkpointing", "use_liger_kernel", "optim"
MICRO, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
COUNTED = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_hf")
"""Values of `optim` whose state is two moments in the format of the master."""


def plan_of_trainer(plan: Plan, arguments: Mapping[str, Any]) -> Plan:
    """Return `plan` as the Trainer runs it: gradient checkpointing computes every block again
    (transformers, modeling_layers.py: GradientCheckpointingLayer).
    """
    if not arguments.get(CHECKPOINTING):
        return plan
    again = {"granularity": "full", "method": "uniform", "layers": 1}
    return plan.model_copy(update={"recompute": plan.recompute.model_copy(update=again)})


def rules_of_trainer(rules: MemoryRules, arguments: Mapping[str, Any]) -> MemoryRules:
    """Return `rules` as the Trainer runs them: Liger's loss never has all logits."""
    return replace(rules, loss="linear") if arguments.get(LIGER) else rules


def uncounted_arguments(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each argument that changes the memory in a way that is not counted."""
    name = arguments.get(OPTIMIZER)
    if name is not None and name not in COUNTED:
        yield f"optim: the state of {name} is counted as that of AdamW"
