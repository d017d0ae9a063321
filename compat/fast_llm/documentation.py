"""Settings whose description in Fast-LLM's guides differs from Fast-LLM's code."""

from __future__ import annotations

from bridge.stack.findings import Disagreement

GUIDE = "docs/user_guide/multi-stage.md"
PARALLEL = "docs/user_guide/parallelism.md"
INTERNALS = "docs/developer_guide/parallelism.md"
CONFIG = "fast_llm/engine/multi_stage/config.py"
M, D = "model.multi_stage.", "model.distributed."
GUIDED, DESCRIBED = "0.3.0", "0.4.0+20260720"
"""First release with the multi-stage guide (pull request 234), and first release with the pages on
parallelism (pull request 478).
"""

DISAGREEMENTS: tuple[Disagreement, ...] = (
    *(
        Disagreement(
            M + name,
            f"the default is 1, and the count is ignored below ZeRO level {level}",
            "the default is one buffer for each stage, so that nothing is shared; "
            "a count takes effect at every level and determines the level",
            GUIDE,
            f"{CONFIG}: MultiStageConfig._validate; multi_stage.py: _get_buffer_placement",
            since=GUIDED,
        )
        for name, level in (("num_grad_buffers", 2), ("num_weight_buffers", 3))
    ),
    Disagreement(
        M + "num_grad_buffers",
        "three gradient buffers may be set together with ZeRO level 2 or 3",
        "a count together with zero_stage 2 or 3 is refused, even a count of 2 or null; a"
        " count is accepted only without zero_stage or with zero_stage 1",
        GUIDE,
        f"{CONFIG}: _set_implicit_default in _validate (pull request 211)",
        since=GUIDED,
    ),
    Disagreement(
        M + "layers_per_stage",
        "fractions of a layer are allowed, and a smaller value balances the load better",
        "a stage ends at the first whole layer that reaches the size: 1.5 has the effect of 2, and any value below 1"
        " has the effect of 1",
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
        "stages are assigned to the pipeline ranks in turn; "
        "a rank has a block of consecutive layers only if it has a single stage",
        PARALLEL,
        "fast_llm/engine/multi_stage/multi_stage.py: _stage_pipeline_ranks",
        since=DESCRIBED,
    ),
    Disagreement(
        D + "sequence_tensor_parallel",
        "the gradients of layers that are split by tokens are summed over tensor ranks together with "
        "the ranks that share a sequence",
        "these gradients are summed over tensor ranks alone; the ranks that share a sequence take"
        " part in the reduce-scatter over all data ranks",
        INTERNALS,
        "fast_llm/engine/multi_stage/fsdp.py: reduce_gradients",
        since=DESCRIBED,
    ),
    Disagreement(
        M + "store_frozen_weights_in_optimization_precision",
        "false keeps frozen weights in the format of the forward pass",
        "with false, a model with frozen and trained weights fails to build in mixed precision: all shards must have one format",
        "description of the field",
        "fast_llm/engine/multi_stage/multi_stage.py: _shard_dtype",
        since=GUIDED,
    ),
)
