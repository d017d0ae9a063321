"""Megatron's arguments that no Plan field stands for: each is claimed here, with the reason and what losing it does."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.rules import Effect, Rule, only_theirs
from compat.megatron import options

MODEL = "the model is defined by the training script"
KERNEL = "a choice of kernel inside Megatron"

GROUPS: dict[str, tuple[str, Effect]] = {
    "network size": (MODEL, Effect.NONE),
    "transformer configuration": (MODEL, Effect.NONE),
    "moe": (MODEL, Effect.NONE),
    "mla": (MODEL, Effect.NONE),
    "vision": (MODEL, Effect.NONE),
    "biencoder": (MODEL, Effect.NONE),
    "retro": (MODEL, Effect.NONE),
    "heterogeneous architecture": (MODEL, Effect.NONE),
    "experimental_attention_variant": (MODEL, Effect.NONE),
    "regularization": ("Megatron's own variant of the optimizer", Effect.NUMBERS),
    "learning rate and weight decay": ("Megatron's own schedule of learning rate or weight decay", Effect.NUMBERS),
    "mixed precision": ("a precision switch inside Megatron", Effect.ROUNDING),
    "Transformer-Engine": ("a Transformer Engine setting", Effect.ROUNDING),
    "kitchen": ("a low-precision recipe inside Megatron", Effect.NUMBERS),
    "training": ("a switch of Megatron's training loop", Effect.NONE),
    "distributed": ("Megatron's own process groups", Effect.COST),
    "distributed init": ("Megatron's own communication setting", Effect.COST),
    "RNG and initialization": ("random numbers are seeded by the training script", Effect.NONE),
    "data and dataloader": ("data is loaded by the training script", Effect.NONE),
    "tokenizer": ("data is loaded by the training script", Effect.NONE),
    "sft": ("data is loaded by the training script", Effect.NONE),
    "validation": ("evaluation is run by the training script", Effect.NONE),
    "checkpointing": ("checkpoints are written by the training script", Effect.NONE),
    "logging": ("logs are written by the training script", Effect.NONE),
    "profiling": ("profiling is started by the training script", Effect.NONE),
    "one logger": ("logs are written by the training script", Effect.NONE),
    "msc": ("storage is set up by the training script", Effect.NONE),
    "autoresume": ("restarts are handled by Megatron's training loop", Effect.NONE),
    "straggler": ("watched by Megatron's training loop", Effect.NONE),
    "rerun engine": ("watched by Megatron's training loop", Effect.NONE),
    "fault injector": ("watched by Megatron's training loop", Effect.NONE),
    "ft_package": ("restarts are handled by Megatron's training loop", Effect.NONE),
    "In-process restart": ("restarts are handled by Megatron's training loop", Effect.NONE),
    "workload inspector": ("watched by Megatron's training loop", Effect.NONE),
    "inference": ("used for inference only", Effect.NONE),
    "rl": ("used by Megatron's reinforcement learning only", Effect.NONE),
    "Logits Distillation": (MODEL, Effect.NONE),
    "derived": ("worked out by Megatron, never given", Effect.NONE),
    "experimental": ("an experiment inside Megatron", Effect.NONE),
}
"""What the argument groups of Megatron's parser stand for: why they stay behind, and what that does to the run."""

SINGLE: dict[str, tuple[str, Effect]] = {
    "rampup_batch_size": ("no Plan field for a growing batch: the run starts at its full batch", Effect.NUMBERS),
    "step_batch_size_schedule": ("no Plan field for a growing batch: the run starts at its full batch", Effect.NUMBERS),
    "decrease_batch_size_if_needed": ("no Plan field for a batch that adapts to the ranks", Effect.NUMBERS),
    "iterations_to_skip": ("steps are skipped by Megatron's training loop", Effect.NUMBERS),
    "train_iters": ("the length of the run is set by the training script", Effect.NONE),
    "train_samples": ("the length of the run is set by the training script", Effect.NONE),
    "use_checkpoint_opt_param_scheduler": ("which schedule a resumed run takes is up to the training script", Effect.NONE),
    "override_opt_param_scheduler": ("which schedule a resumed run takes is up to the training script", Effect.NONE),
    "fp32_residual_connection": ("a precision switch inside Megatron's layers", Effect.ROUNDING),
    "fp8_param_gather": ("weights in fp8 are Megatron's own", Effect.ROUNDING),
    "fp4": ("4-bit products are Megatron's own", Effect.NUMBERS),
    "fp4_recipe": ("4-bit products are Megatron's own", Effect.NUMBERS),
    "fp4_param": ("4-bit products are Megatron's own", Effect.NUMBERS),
    "fp8_recipe": ("the recipe of 8-bit products is Megatron's own", Effect.NUMBERS),
    "exp_avg_dtype": ("moments of the precision-aware optimizer are Megatron's own", Effect.ROUNDING),
    "exp_avg_sq_dtype": ("moments of the precision-aware optimizer are Megatron's own", Effect.ROUNDING),
    "check_for_nan_in_loss_and_grad": ("a check of Megatron's training loop", Effect.NONE),
    "masked_softmax_fusion": (KERNEL, Effect.COST),
    "bias_gelu_fusion": (KERNEL, Effect.COST),
    "bias_swiglu_fusion": (KERNEL, Effect.COST),
    "bias_dropout_fusion": (KERNEL, Effect.COST),
    "apply_rope_fusion": (KERNEL, Effect.COST),
    "use_flash_attn": (KERNEL, Effect.COST),
    "attention_backend": (KERNEL, Effect.ROUNDING),
    "transformer_impl": (KERNEL, Effect.ROUNDING),
    "deterministic_mode": (KERNEL, Effect.ROUNDING),
    "cross_entropy_loss_fusion": (KERNEL, Effect.ROUNDING),
    "cross_entropy_fusion_impl": (KERNEL, Effect.ROUNDING),
    "cp_comm_type": ("how attention exchanges keys and values is Megatron's own", Effect.COST),
    "hierarchical_context_parallel_sizes": ("how attention exchanges keys and values is Megatron's own", Effect.COST),
    "encoder_tensor_model_parallel_size": ("the encoder's own layout", Effect.COST),
    "encoder_pipeline_model_parallel_size": ("the encoder's own layout", Effect.COST),
    "pipeline_model_parallel_split_rank": ("the encoder's own layout", Effect.COST),
    "wgrad_deferral_limit": ("an overlap inside Megatron", Effect.COST),
    "defer_embedding_wgrad_compute": ("an overlap inside Megatron", Effect.COST),
    "delay_wgrad_compute": ("an overlap inside Megatron", Effect.COST),
    "overlap_moe_expert_parallel_comm": ("an overlap inside Megatron", Effect.COST),
    "overlap_p2p_comm_warmup_flush": ("an overlap inside Megatron", Effect.COST),
    "use_cpu_initialization": ("where weights are first made", Effect.NONE),
    "perform_initialization": ("whether weights are initialised is up to the training script", Effect.NONE),
    "microbatch_group_size_per_vp_stage": ("an order of microbatches inside Megatron", Effect.COST),
}
"""Arguments that fare otherwise than their group."""

PREFIXES: tuple[tuple[str, tuple[str, Effect]], ...] = (
    ("tp_comm_", ("an overlap inside Megatron's tensor parallelism", Effect.COST)),
    ("cpu_offloading", ("offload inside Megatron's layers", Effect.COST)),
    ("recompute_", ("which modules are computed again is Megatron's own", Effect.COST)),
    ("inference", GROUPS["inference"]),
    ("muon_", ("Megatron's own variant of the optimizer", Effect.NUMBERS)),
    ("lion_", ("Megatron's own variant of the optimizer", Effect.NUMBERS)),
    ("batch_p2p_", ("how pipeline messages are sent is Megatron's own", Effect.COST)),
)

OBJECT_ONLY = ("a field of Megatron's config class without a flag", Effect.COST)


def _why(dest: str, group: str) -> tuple[str, Effect]:
    if dest in SINGLE:
        return SINGLE[dest]
    return next((why for prefix, why in PREFIXES if dest.startswith(prefix)), GROUPS.get(group, OBJECT_ONLY))


def rules(claimed: frozenset[str]) -> Iterator[Rule]:
    """One row for each reason, over every argument of every release that `claimed` does not name."""
    rows: dict[tuple[str, Effect], list[str]] = {}
    for dest, group in options.groups().items():
        if dest not in claimed:
            rows.setdefault(_why(dest, group), []).append(dest)
    for (note, effect), dests in rows.items():
        yield only_theirs(*dests, note=note, effect=effect)
