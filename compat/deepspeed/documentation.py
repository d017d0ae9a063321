"""Places where DeepSpeed's documentation or docstrings contradict DeepSpeed's code."""

from __future__ import annotations

from bridge.stack.findings import Disagreement

PAGE = "docs/_pages/config-json.md"
ZERO = "deepspeed/runtime/zero/config.py"

DISAGREEMENTS: tuple[Disagreement, ...] = (
    Disagreement(
        "zero_optimization.overlap_comm",
        "the default is false",
        "overlap_comm is true by default at ZeRO stage 3, and false at lower stages",
        PAGE,
        f"{ZERO}: overlap_comm_valid",
    ),
    Disagreement(
        "zero_optimization.stage3_prefetch_bucket_size",
        "the default is 5e8",
        "the default is 5e7",
        PAGE,
        f"{ZERO}: prefetch_bucket_size",
    ),
    Disagreement(
        "zero_optimization.allgather_partitions",
        "allgather_partitions chooses between all-gather and broadcast for updated parameters",
        "DeepSpeed stores the value of allgather_partitions, but no optimizer reads the value",
        PAGE,
        "deepspeed/runtime/engine.py: zero_allgather_partitions has no caller",
    ),
    *(
        Disagreement(
            f"zero_optimization.{section}.device",
            "the default is cpu",
            "the default is none, even if the config has the section: set the device",
            PAGE,
            "deepspeed/runtime/zero/offload_config.py",
        )
        for section in ("offload_param", "offload_optimizer")
    ),
    Disagreement(
        "activation_checkpointing.partition_activations",
        "the docstring calls the key partitioned_activations",
        "DeepSpeed reads only the key partition_activations, and silently ignores the name from"
        " the docstring",
        "docstring of deepspeed/runtime/activation_checkpointing/config.py",
        "deepspeed/runtime/activation_checkpointing/config.py: get_scalar_param",
    ),
    Disagreement(
        "steps_per_print",
        "the default is 10",
        "unset, nothing is printed",
        PAGE,
        "deepspeed/runtime/constants.py: STEPS_PER_PRINT_DEFAULT",
    ),
    Disagreement(
        "autotuning.overwrite",
        "the default is false",
        "the default is true",
        PAGE,
        "deepspeed/autotuning/constants.py: AUTOTUNING_OVERWRITE_DEFAULT",
    ),
    Disagreement(
        "autotuning.tuner_type",
        "the default is model_based",
        "the default is gridsearch",
        PAGE,
        "deepspeed/autotuning/constants.py: AUTOTUNING_TUNER_TYPE_DEFAULT",
    ),
)
