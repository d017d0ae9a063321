"""Where the pages of Megatron-Core and Megatron-LM say one thing and the code does another."""

from __future__ import annotations

from bridge.findings import Disagreement

PAGE = "API page of ModelParallelConfig"
CONFIG = "megatron/core/model_parallel_config.py"

DISAGREEMENTS: tuple[Disagreement, ...] = (
    Disagreement(
        "params_dtype",
        "the default is None",
        "the default is torch.float32; the page cannot render a default that is an object of torch",
        PAGE,
        f"{CONFIG}: ModelParallelConfig.params_dtype",
    ),
    Disagreement(
        "autocast_dtype",
        "unset, it is set to pipeline_dtype",
        "unset, it is set to params_dtype",
        f"{PAGE}, and the docstring",
        f"{CONFIG}: __post_init__ (NVIDIA/Megatron-LM issue 1546)",
    ),
    Disagreement(
        "batch_p2p_comm",
        "it must be off where overlap_p2p_comm is on",
        "the config class accepts both; only the command line keeps them apart",
        f"{PAGE}, and the docstring",
        f"{CONFIG}: __post_init__ checks overlap_p2p_comm_warmup_flush alone",
    ),
)
