"""Steps of `ModelParallelConfig.__post_init__`."""

from __future__ import annotations

from bridge.stack.checks import equals, excludes, needs
from compat.megatron.arguments.namespace import Namespace, Step
from compat.megatron.arguments.sizes import DENSE_SHARDS, EXPERT_SHARDS
from compat.megatron.arguments.steps import check, derive, inherit

CLASS = "ModelParallelConfig"


def _lacks_sequence_parallelism(c: Namespace) -> bool:
    """Whether expert and tensor parallelism are combined without sequence parallelism."""
    return bool(
        (c.expert_model_parallel_size or 1) > 1
        and c.tensor_model_parallel_size > 1
        and c.sequence_parallel is False
    )


def _copies(c: Namespace) -> None:
    """Set the number of shards that a tensor rank's weights are further split into."""
    # Unlike the parser, the class leaves numbers of shards unset that were not given.
    if c.tensor_parallel_num_weight_shards is not None:
        c.gtp_weight_remat_size = (
            c.tensor_parallel_num_weight_shards // c.tensor_model_parallel_size
        )
    if c.expert_tensor_parallel_num_weight_shards is not None:
        c.expert_gtp_weight_remat_size = (
            c.expert_tensor_parallel_num_weight_shards // c.expert_tensor_parallel_size
        )


MODEL_PARALLEL_STEPS: tuple[Step, ...] = (
    check(
        CLASS,
        lambda c: c.sequence_parallel and c.tensor_model_parallel_size <= 1,
        "sequence_parallel: found with tensor_model_parallel_size {tensor_model_parallel_size}; expected"
        " more than 1; drop sequence_parallel, or use more tensor ranks",
    ),
    derive(
        CLASS, inherit("expert_tensor_parallel_size", "tensor_model_parallel_size"), since="0.10.0"
    ),
    DENSE_SHARDS,
    EXPERT_SHARDS,
    derive(CLASS, _copies, since="0.19.0"),
    check(
        CLASS,
        lambda c: c.pipeline_model_parallel_size > 1 and c.pipeline_dtype is None,
        "pipeline_dtype: missing; pipeline_model_parallel_size {pipeline_model_parallel_size} needs it; set it to params_dtype",
    ),
    # The docstring of the class names pipeline_dtype as the source; the code takes params_dtype.
    derive(CLASS, inherit("autocast_dtype", "params_dtype")),
    excludes(
        "defer_embedding_wgrad_compute",
        equals("pipeline_model_parallel_size", 1),
        CLASS,
        "expected a pipeline; drop --defer-embedding-wgrad-compute, or use more pipeline ranks",
    ),
    needs(
        "defer_embedding_wgrad_compute",
        "gradient_accumulation_fusion",
        CLASS,
        "keep the fusion of gradient accumulation, or drop --defer-embedding-wgrad-compute",
    ),
    check(
        CLASS,
        lambda c: c.defer_embedding_wgrad_compute and c.wgrad_deferral_limit < 0,
        "wgrad_deferral_limit: found {wgrad_deferral_limit}; expected 0 or more",
    ),
    check(
        CLASS,
        _lacks_sequence_parallelism,
        "sequence_parallel: found false with expert_model_parallel_size {expert_model_parallel_size} and"
        " tensor_model_parallel_size {tensor_model_parallel_size}; expected true; add --sequence-parallel",
        until="0.15.0",
    ),
    # 0.15 means to warn, but its warning names a module that it does not import.
    check(
        CLASS,
        _lacks_sequence_parallelism,
        "sequence_parallel: found false with expert_model_parallel_size {expert_model_parallel_size} and"
        " tensor_model_parallel_size {tensor_model_parallel_size}; a defect of this release ends the run"
        " there (NameError; later releases warn instead); add --sequence-parallel, or use 0.16 or later",
        since="0.15.0",
        until="0.16.0",
    ),
    derive(
        CLASS,
        inherit("microbatch_group_size_per_vp_stage", "pipeline_model_parallel_size"),
        since="0.10.0",
    ),
    check(
        CLASS,
        lambda c: c.overlap_p2p_comm_warmup_flush and (not c.overlap_p2p_comm or c.batch_p2p_comm),
        "overlap_p2p_comm_warmup_flush: found with overlap_p2p_comm {overlap_p2p_comm} and batch_p2p_comm"
        " {batch_p2p_comm}; expected overlap_p2p_comm true and batch_p2p_comm false, which only an interleaved schedule has;"
        " drop overlap_p2p_comm_warmup_flush, or add virtual stages",
        since="0.10.0",
    ),
)
