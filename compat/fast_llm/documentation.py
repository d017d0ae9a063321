"""Where Fast-LLM's guides say one thing and its code does another."""

from __future__ import annotations

from bridge.findings import Disagreement

GUIDE = "docs/user_guide/multi-stage.md"
PARALLEL = "docs/user_guide/parallelism.md"
INTERNALS = "docs/developer_guide/parallelism.md"
CONFIG = "fast_llm/engine/multi_stage/config.py"
M, D = "model.multi_stage.", "model.distributed."
GUIDED, DESCRIBED = "0.3.0", "0.4.0+20260720"
"""First releases with the multi-stage guide (pull request 234), and with the pages on parallelism (pull request 478)."""

DISAGREEMENTS: tuple[Disagreement, ...] = (
    *(
        Disagreement(
            M + name,
            f"the default is 1, and the count is ignored below ZeRO level {level}",
            "the default is one buffer for each stage, that is no sharing; a count holds at every level, and makes the level",
            GUIDE,
            f"{CONFIG}: MultiStageConfig._validate; multi_stage.py: _get_buffer_placement",
            since=GUIDED,
        )
        for name, level in (("num_grad_buffers", 2), ("num_weight_buffers", 3))
    ),
    Disagreement(
        M + "num_grad_buffers",
        "three of them may stand beside a ZeRO level of 2 or 3",
        "a count beside zero_stage 2 or 3 is refused, even 2 and even null; only without a level, or beside level 1, it is taken",
        GUIDE,
        f"{CONFIG}: _set_implicit_default in _validate (pull request 211)",
        since=GUIDED,
    ),
    Disagreement(
        M + "layers_per_stage",
        "fractions are allowed, and a smaller value balances the load better",
        "a stage ends at the first whole layer that reaches the size: 1.5 cuts as 2 does, and anything below 1 as 1 does",
        GUIDE,
        "fast_llm/engine/multi_stage/multi_stage.py: _split_into_stages",
        since=GUIDED,
    ),
    Disagreement(
        M + "zero_stage",
        "level 1 sums gradients by all-reduce, and has no weight buffer",
        "every level reduce-scatters gradients to shards, and gathers weights from shards into buffers",
        INTERNALS,
        "fast_llm/engine/multi_stage/fsdp.py: reduce_gradients, restore_parameters",
        since=DESCRIBED,
    ),
    Disagreement(
        D + "pipeline_parallel",
        "each GPU holds a block of consecutive layers",
        "stages go round the pipeline ranks one after the other; blocks appear only where a stage is a rank's whole share",
        PARALLEL,
        "fast_llm/engine/multi_stage/multi_stage.py: _stage_pipeline_ranks",
        since=DESCRIBED,
    ),
    Disagreement(
        D + "sequence_tensor_parallel",
        "its gradients are summed over tensor and sequence groups together",
        "they are summed over the tensor group; sequence data ranks are part of the one reduce-scatter over data ranks",
        INTERNALS,
        "fast_llm/engine/multi_stage/fsdp.py: reduce_gradients",
        since=DESCRIBED,
    ),
    Disagreement(
        M + "store_frozen_weights_in_optimization_precision",
        "off keeps frozen weights in the format of the forward pass",
        "off fails when a model with frozen and trained weights is built in mixed precision: all shards must have one format",
        "description of the field",
        "fast_llm/engine/multi_stage/multi_stage.py: _shard_dtype",
        since=GUIDED,
    ),
)
