"""Chooses AutoModel's strategy for the sharding of a plan."""

from __future__ import annotations

from bridge.stack.releases import Release
from bridge.stack.rules import Context, Group
from compat.automodel.rules.pipeline import D

BUFFERED = (
    "zero.double_buffer",
    "zero.fp8_transposes",
    "zero.registered",
    "zero.meta_init",
    "zero.average_in_collective",
)
"""Switches that only Megatron-FSDP has."""
STRATEGY_SEES = (
    "zero.stage",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.context",
    "parallel.expert",
    "zero.replicas",
    *BUFFERED,
)

DDP_SELECTS = "0.5.0.post20260822"
"""First release in which DDP has selective recomputation (recipes/_dist_utils.py,
parse_distributed_section).
"""


def selects(kind: str, release: Release | Context) -> bool:
    """Whether the strategy `kind` has selective recomputation in a release. The answer holds only
    for releases in which FSDP2 has selective recomputation.
    """
    return kind == "fsdp2" or (kind == "ddp" and release.since(DDP_SELECTS))


def strategy(values: Group, context: Context) -> str:
    """Return the strategy for a plan: fsdp2, megatron_fsdp or ddp.

    FSDP2 is for ZeRO stages 2 and 3 (before 0.5.0 only 3), and for every mesh with pipeline ranks,
    expert ranks or replica groups. DDP is for stage 0 without tensor and context ranks.
    Megatron-FSDP is for all other plans, and for plans with switches that only Megatron-FSDP has.
    """

    def more(name: str) -> bool:
        return (values.get(name) or 1) > 1

    stage = values.get("zero.stage")
    levels = (0, 1) if context.since("0.5.0") else (0, 1, 2)
    if more("parallel.pipeline") or more("parallel.expert") or more("zero.replicas"):
        return "fsdp2"
    if stage is not None and any(values.get(path) for path in BUFFERED):
        return "megatron_fsdp"
    if stage not in levels:
        return "fsdp2"
    return (
        "ddp"
        if stage == 0 and not more("parallel.tensor") and not more("parallel.context")
        else "megatron_fsdp"
    )


def strategy_of_manager(target: str | None) -> str:
    """Return the strategy of a manager class. Without a class the strategy is fsdp2, the default of
    the older layout.
    """
    name = (target or "").rpartition(".")[2]
    return {
        "DDPManager": "ddp",
        "MegatronFSDPManager": "megatron_fsdp",
        "NVFSDPManager": "megatron_fsdp",
    }.get(name, "fsdp2")


def runs_megatron_fsdp(values: Group) -> bool:
    """Return whether Megatron-FSDP shards the run."""
    return running(values) == "megatron_fsdp"


def running(values: Group) -> str:
    """Return the strategy of a recipe. In the older layout the manager class determines it."""
    return values.get(D + "strategy") or strategy_of_manager(values.get(D + "_target_"))
