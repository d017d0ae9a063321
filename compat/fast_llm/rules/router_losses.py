"""The coefficients of a router's losses. Fast-LLM sums these losses over parts of a batch of which
other stacks take the mean, so its coefficient is the plan's divided by the number of parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from bridge.stack.rules import HABITS, Context, Group
from compat.fast_llm.effective import ORDER, PIPELINE, SEQUENCE_TENSOR, SPLIT, TENSOR, WORLD

SUMMED_SINCE = "0.4.0+20260720"
"""First release that sums over data ranks and microbatches: it divides the loss of the labels by their
number in the batch, and that of a router by nothing (schedule/runner.py: _preprocess_data,
grad_output; layers/decoder/mlp/mixture_of_experts.py: AuxiliaryLoss). Each release sums over the
tensor ranks that split a sequence (multi_stage/fsdp.py: _sequence_parallel_grads).
"""
SUMS = (
    "Fast-LLM sums the losses of a router over tensor ranks that split a sequence, and since "
    "0.4.0+20260720 over data ranks and microbatches, whose numbers must be known to convert them"
)
HABIT = HABITS + "router_losses"
LOSSES = ("model.moe.aux_loss", "model.moe.z_loss")
MICROBATCHES = tuple(
    ORDER + name
    for name in ("depth_first_micro_batches", "breadth_first_micro_batches", "micro_batch_splits")
)
SEES = (WORLD, TENSOR, PIPELINE, SPLIT, SEQUENCE_TENSOR, *MICROBATCHES)
SEES_OF_PLAN = (
    *(f"parallel.{axis}" for axis in ("data", "context", "tensor", "sequence")),
    "batch.accumulation",
)


def of_plan(facts: Mapping[str, Any], values: Group, context: Context) -> Mapping[str, Any]:
    """Return the plan fields `facts` with the coefficients for means; as they are, with the habit that
    says so, if the number of parts is not known.
    """
    tensor, world = values.get(TENSOR) or 1, values.get(WORLD)
    parts: int | None = tensor if values.get(SEQUENCE_TENSOR) else 1
    if context.since(SUMMED_SINCE):
        data = world and world // (tensor * (values.get(PIPELINE) or 1))
        parts = data and parts * data * prod(values.get(path) or 1 for path in MICROBATCHES)
    # Rounded, so that a coefficient that was divided before is what it was.
    means = {
        path: float(f"{facts[path] * parts:.12g}") for path in LOSSES if parts and facts.get(path)
    }
    return {**facts, **means, HABIT: "mean" if parts else "sum"}


def of_stack(values: Group, context: Context) -> Mapping[str, Any]:
    """Return Fast-LLM's coefficients for the plan fields `values`; those of the plan if the number of
    parts is not known.
    """
    parts: int | None = (
        (values.get("parallel.tensor") or 1) if values.get("parallel.sequence") else 1
    )
    if context.since(SUMMED_SINCE):
        # Fast-LLM's default is one microbatch.
        data, steps = values.get("parallel.data"), values.get("batch.accumulation") or 1
        parts = data and parts * data * steps * (values.get("parallel.context") or 1)
    divides = parts and values.get(HABIT) != "sum"
    return {path: values[path] / parts for path in LOSSES if divides and values.get(path)}
