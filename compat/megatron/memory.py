"""What Megatron keeps in memory beyond what a plan says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from bridge.stack.memory_rules import MIB, MemoryRules

if TYPE_CHECKING:
    from bridge.stack.dialect import Config
    from compat.megatron.dialect import MegatronConfig

RULES = MemoryRules(
    sharding="megatron",
    kernels="fused",
    loss="plain",
    fused_gradients=True,
    frees_outputs=True,
    copies_inputs=False,
    workspace=90 * MIB,
)
"""Megatron-Core with Transformer Engine (core/tensor_parallel/cross_entropy.py; Transformer
Engine's module/base.py: get_dummy_wgrad; core/pipeline_parallel/schedules.py:
deallocate_output_tensor). The workspace is fitted to measurements of Megatron's own tests.
"""


def rules(config: Config) -> MemoryRules:
    """Return the rules of a launch (core/extensions/transformer_engine.py;
    core/transformer/dot_product_attention.py; training/arguments.py).
    """
    args = cast("MegatronConfig", config).args
    engine = args.get("transformer_impl") == "transformer_engine"
    flash = engine or bool(args.get("use_flash_attn"))
    if "unfused" in str(args.get("attention_backend")):
        flash = False
    fused = bool(args.get("cross_entropy_loss_fusion"))
    by_engine = args.get("cross_entropy_fusion_impl") == "te"
    fsdp = bool(args.get("use_megatron_fsdp") or args.get("use_torch_fsdp2"))
    return replace(
        RULES,
        sharding="fsdp" if fsdp else "megatron",
        attention="flash" if flash else "unfused",
        loss=("te" if by_engine else "fused") if fused else "plain",
        fused_gradients=engine and bool(args.get("gradient_accumulation_fusion")),
    )
