"""Tells from Megatron's arguments whether optimizer state, gradients and weights are sharded."""

from __future__ import annotations

from bridge.stack.rules import Group

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
FSDP = ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")
"""Names of arguments that shard gradients or weights."""
SHARDED = (
    "use_distributed_optimizer",
    "data_parallel_sharding_strategy",
    *FSDP,
    "torch_fsdp2_reshard_after_forward",
)


def megatron_fsdp(values: Group) -> bool:
    """Whether Megatron's own FSDP is on."""
    # use_custom_fsdp is its name in 0.12 and 0.13.
    return bool(values.get("use_megatron_fsdp") or values.get("use_custom_fsdp"))


def torch_fsdp(values: Group) -> bool:
    """Whether torch's FSDP is on."""
    return bool(values.get("use_torch_fsdp2")) and not megatron_fsdp(values)


def zero_stage(values: Group) -> int:
    """Return the ZeRO level: 0 without sharding, 1 if optimizer state is sharded, 2 if gradients
    are sharded too, 3 if weights are sharded too.
    """
    if megatron_fsdp(values):
        return STRATEGIES.index(values.get("data_parallel_sharding_strategy") or "no_shard")
    if torch_fsdp(values):
        # Without resharding after forward, gathered weights stay until backward: only gradients and
        # states are sharded.
        return 2 if values.get("torch_fsdp2_reshard_after_forward") is False else 3
    return 1 if values.get("use_distributed_optimizer") else 0


def aware(values: Group) -> bool:
    """Whether the precision-aware optimizer takes effect."""
    # OptimizerConfig refuses it for other optimizers than Adam, and without sharding.
    return (
        bool(values.get("use_precision_aware_optimizer"))
        and zero_stage(values) >= 1
        and values.get("optimizer") == "adam"
    )
