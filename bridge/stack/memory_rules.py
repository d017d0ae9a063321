"""What a stack keeps in memory beyond what a plan says: its way to shard, and its kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRules:
    """What a stack keeps in memory beyond what a plan says.

    `sharding` is whose rules place weights, gradients and optimizer state. With FSDP, `units` are
    gathered one after the other: blocks, of which the next is gathered ahead while everything else
    stays whole, or layers, of which one is whole at a time. `kernels` says whether norms and
    activation functions keep only their input (fused), or what plain torch saves for each
    operation. `attention` says whether attention keeps the probabilities of all pairs of tokens
    (unfused, eager) or not (flash).

    `loss` is the implementation of the cross-entropy: Transformer Engine's, which overwrites the
    logits; plain, which has them in the compute format and in fp32 at once; fused by torch.compile,
    which has fp32 twice; linear, which never has all logits; or that of plain torch.

    With `fused_gradients`, matrix products add to the gradient buffer themselves, and Transformer
    Engine keeps an empty gradient for each shape of a weight. With `foreach`, the optimizer is
    torch's and updates all weights together, for which it makes a copy of a moment. With
    `frees_outputs`, a stage frees what it sent to the next stage.

    `loaded` is the format in which weights are loaded and kept, if the plan has no master.
    `quantised` is the number of bytes of an element of a frozen matrix in a block; 0 if they are not
    quantised. With `copies_inputs`, each adapter has a copy of its input in its own format.
    `workspace` is the number of bytes that libraries of matrix products allocate. `level` is the
    ZeRO level by which states are kept, where it is not the plan's. `assumptions` are sentences
    about what no setting says.
    """

    sharding: Literal["native", "megatron", "deepspeed", "fsdp", "ddp"] = "native"
    units: Literal["blocks", "layers"] = "blocks"
    kernels: Literal["fused", "torch"] = "torch"
    attention: Literal["flash", "unfused", "eager"] = "flash"
    loss: Literal["te", "plain", "fused", "linear", "torch"] = "torch"
    fused_gradients: bool = False
    foreach: bool = False
    frees_outputs: bool = False
    loaded: Literal["bf16"] | None = None
    quantised: float = 0.0
    copies_inputs: bool = True
    workspace: int = 64 * MIB
    level: int | None = None
    assumptions: tuple[str, ...] = ()


SCRIPT = (
    "attention is taken as flash attention",
    "the loss is taken as transformers computes it, with logits in fp32",
)
"""Assumptions about a run whose model a script builds."""
