"""Settings for which the documentation of Megatron-Core and Megatron-LM differs from the code."""

from __future__ import annotations

from bridge.stack.findings import Disagreement

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
        "the default is the value of pipeline_dtype",
        "the default is the value of params_dtype",
        f"{PAGE}, and the docstring",
        f"{CONFIG}: __post_init__ (NVIDIA/Megatron-LM issue 1546)",
    ),
    Disagreement(
        "batch_p2p_comm",
        "batch_p2p_comm must be off if overlap_p2p_comm is on",
        "the config class allows both to be on; "
        "only the command line sets batch_p2p_comm to the opposite of overlap_p2p_comm",
        f"{PAGE}, and the docstring",
        f"{CONFIG}: __post_init__ checks only overlap_p2p_comm_warmup_flush",
    ),
)
