"""Sources that the search for examples starts from: features that many rules are about. What an example does without goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Given = Mapping[str, Any]

BASES: Mapping[str, Given] = {"deepspeed": {"train_micro_batch_size_per_gpu": 1}}
"""What a source needs to be read at all."""

DENSE: Given = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "micro_batch_size": 1,
}
PIPED = {"code.pipeline_stages": 2}
COMPRESSED = (
    "weight_quantization",
    "activation_quantization",
    "sparse_pruning",
    "row_pruning",
    "head_pruning",
    "channel_pruning",
)
ENABLED = {"shared_parameters": {"enabled": True, "schedule_offset": 0}}

STARTS: Mapping[str, Sequence[Given]] = {
    "megatron": (
        {},
        DENSE,
        {**DENSE, "num_experts": 4},
        {**DENSE, "pipeline_model_parallel_size": 2, "train_iters": 10, "lr": 1e-3},
        {**DENSE, "tensor_model_parallel_size": 2, "num_experts": 4, "bf16": True},
        {
            **DENSE,
            "use_megatron_fsdp": True,
            "ckpt_format": "fsdp_dtensor",
            "use_distributed_optimizer": True,
        },
        {
            **DENSE,
            "use_megatron_fsdp": True,
            "ckpt_format": "fsdp_dtensor",
            "megatron_fsdp_version": 2,
        },
        {**DENSE, "cuda_graph_impl": "local"},
        {**DENSE, "cuda_graph_impl": "transformer_engine"},
        {
            **DENSE,
            "fine_grained_activation_offloading": True,
            "transformer_impl": "transformer_engine",
        },
        {**DENSE, "fp8": "hybrid", "bf16": True},
        {**DENSE, "fp4": "e2m1", "bf16": True},
        {**DENSE, "recompute_granularity": "selective"},
        {
            **DENSE,
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 1,
        },
        {**DENSE, "multi_latent_attention": True},
        {**DENSE, "experimental_attention_variant": "gated_delta_net"},
        {**DENSE, "inference_dynamic_batching": True},
        {**DENSE, "perform_rl_step": True},
        {**DENSE, "optimizer": "dist_muon"},
        {
            **DENSE,
            "num_layers": 8,
            "pipeline_model_parallel_size": 4,
            "num_layers_per_virtual_pipeline_stage": 1,
        },
        {
            "hybrid_layer_pattern": "M*-M",
            "hidden_size": 64,
            "num_attention_heads": 4,
            "is_hybrid_model": True,
        },
        {**DENSE, "context_parallel_size": 2},
    ),
    "deepspeed": (
        {},
        PIPED,
        {
            **PIPED,
            "zero_optimization.stage": 1,
            "gradient_clipping": 1.0,
            "zero_optimization.overlap_comm": True,
        },
        {**PIPED, "zero_optimization.stage": 2},
        {**PIPED, "code.context_parallel": 2, "code.tensor_parallel": 2},
        {"optimizer.type": "SGD", "optimizer.params": {"lr": 0.1}, "zero_optimization.stage": 1},
        {"optimizer.type": "AdamW", "fp16.enabled": True, "zero_optimization.stage": 0},
        {"optimizer.type": "AdamW", "bf16.enabled": True, "zero_optimization.stage": 0},
        {"activation_checkpointing.partition_activations": True},
        {"compile.passes": ["autotp"]},
        {"amp": {"opt_level": "O1"}},
        {"progressive_layer_drop": {"theta": 0.5}},
        {"curriculum_learning": {"curriculum_type": "seqlen"}},
        {
            "elasticity": {
                "enabled": True,
                "max_train_batch_size": 64,
                "micro_batch_sizes": [1, 2],
                "version": 0.1,
            }
        },
        *(
            {
                "data_efficiency.enabled": True,
                "data_efficiency.data_sampling": {"enabled": True, name: {"enabled": True}},
            }
            for name in ("curriculum_learning", "dynamic_batching")
        ),
        *({"compression_training": {name: ENABLED}} for name in COMPRESSED),
        *(
            {"compression_training": {name: {**ENABLED, "different_groups": {"first": {}}}}}
            for name in COMPRESSED
        ),
    ),
    "merak": (
        {},
        {
            "args.partition_method": "custom",
            "args.num_layers": 4,
            "init.pp": 2,
            "init.tp": 1,
            "init.dp": 1,
        },
        {"args.split_method": "layer_split", "args.custom_split_points": ["a"]},
        {"args.lr_scheduler_type": "reduce_lr_on_plateau"},
        {"args.activation_checkpoint_ratio": ["0.5"], "args.activation_checkpointing": True},
        {"tp_lists.weight_change_list": ["a"], "init.tp": 2, "init.pp": 1, "init.dp": 1},
    ),
}
