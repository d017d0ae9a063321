"""What Megatron's parser accepts and a run then ignores, or stops at, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bridge.config import Values
from bridge.dialect import Config
from bridge.findings import Finding
from bridge.rules import Effect


@dataclass(frozen=True, slots=True)
class Inert:
    """A given argument that does nothing (or stops the run) while `without` holds, and why (`place`: where upstream reads it)."""

    path: str
    without: Callable[[Values], bool]
    message: str
    place: str
    effect: Effect = Effect.NONE


def _no_fsdp(args: Values) -> bool:
    return not (args.get("use_megatron_fsdp") or args.get("use_custom_fsdp"))


def _not_dynamic(args: Values) -> bool:
    return not args.get("fp16") or bool(args.get("loss_scale"))


TRAPS = (
    Inert(
        "use_distributed_optimizer",
        lambda args: args.get("optimizer") == "sgd",
        "shards the state of Adam only: with sgd training stops at the start; drop it, or use adam",
        "optimizer/distrib_optimizer.py: DistributedOptimizer.__init__",
        Effect.STOPS,
    ),
    Inert(
        "data_parallel_sharding_strategy",
        _no_fsdp,
        "has no effect without --use-megatron-fsdp (0.12 and 0.13: --use-custom-fsdp): nothing is sharded by it",
        "distributed/fsdp; NVIDIA/Megatron-LM#1641",
    ),
    *(
        Inert(path, _not_dynamic, "has no effect without fp16 and dynamic loss scaling", "optimizer/__init__.py: grad scaler")
        for path in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    ),
    Inert(
        "num_query_groups",
        lambda args: not args.get("group_query_attention"),
        "has no effect without --group-query-attention",
        "arguments.py: core_transformer_config_from_args",
    ),
    Inert(
        "sgd_momentum",
        lambda args: args.get("optimizer") == "adam",
        "has no effect with the adam optimizer",
        "optimizer/__init__.py",
    ),
    *(
        Inert(path, lambda args: args.get("optimizer") == "sgd", "has no effect with the sgd optimizer", "optimizer/__init__.py")
        for path in ("adam_beta1", "adam_beta2", "adam_eps")
    ),
    Inert(
        "expert_model_parallel_size",
        lambda args: not args.get("num_experts") and args.get("expert_model_parallel_size") != 1,
        "has no effect without --num-experts",
        "initialize.py: expert groups hold no experts",
    ),
    Inert(
        "rope_scaling_factor",
        lambda args: bool(args.get("use_rope_scaling")) and args.get("rope_scaling_factor") not in (None, 8.0),
        "is not handed to the model by Megatron-LM's own builder of GPT, which stretches by 8",
        "gpt_builders.py: gpt_builder; before, pretrain_gpt.py: model_provider",
        Effect.NUMBERS,
    ),
    Inert(
        "microbatch_group_size_per_vp_stage",
        lambda args: args.get("virtual_pipeline_model_parallel_size") is None,
        "has no effect without virtual pipeline stages",
        "pipeline_parallel/schedules.py",
    ),
)


def inert(config: Config) -> Iterator[Finding]:
    """A finding for each given argument that does nothing."""
    for trap in TRAPS:
        if trap.path in config.given and trap.without(config.effective):
            yield Finding(trap.path, trap.message, trap.effect, True, origin=config.origins.get(trap.path))
