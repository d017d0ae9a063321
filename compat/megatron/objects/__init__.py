"""Megatron's config objects as plain values: their final fields, and the refusals of each release."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from compat.megatron import releases
from compat.megatron.arguments.evaluation import OPEN, run, select
from compat.megatron.arguments.namespace import Derivation, Namespace, Step
from compat.megatron.objects.experts import (
    DISPATCH_STEPS,
    EXPERT_STEPS,
    OVERLAP_STEPS,
    ROUTER_STEPS,
)
from compat.megatron.objects.fields import (
    DDP,
    DDP_FEEDS,
    LATENT,
    OPTIMIZER,
    PARALLEL,
    TRANSFORMER,
    TRANSFORMER_FEEDS,
    defaults,
    fed,
)
from compat.megatron.objects.graphs import GRAPH_STEPS
from compat.megatron.objects.model_parallel import MODEL_PARALLEL_STEPS
from compat.megatron.objects.pipeline import PIPELINE_STEPS
from compat.megatron.objects.sharding import DDP_STEPS, OPTIMIZER_STEPS
from compat.megatron.objects.transformer import (
    ACTIVATION_STEPS,
    ATTENTION_STEPS,
    BEFORE,
    LAST_STEPS,
    LATENT_STEPS,
    OFFLOAD_STEPS,
    PRECISION_STEPS,
    RECOMPUTE_STEPS,
    SIZE_STEPS,
)

TRANSFORMER_STEPS: tuple[Step, ...] = (
    *MODEL_PARALLEL_STEPS,
    *SIZE_STEPS,
    *PRECISION_STEPS,
    *EXPERT_STEPS,
    *DISPATCH_STEPS,
    *RECOMPUTE_STEPS,
    *OFFLOAD_STEPS,
    *PIPELINE_STEPS,
    *ACTIVATION_STEPS,
    *ATTENTION_STEPS,
    *ROUTER_STEPS,
    *GRAPH_STEPS,
    *OVERLAP_STEPS,
    *LAST_STEPS,
)
"""All statements of `__post_init__` of TransformerConfig and its parent, in upstream's order."""


TABLES: Mapping[str, tuple[Step, ...]] = {
    PARALLEL: MODEL_PARALLEL_STEPS,
    TRANSFORMER: TRANSFORMER_STEPS,
    LATENT: (*TRANSFORMER_STEPS, *LATENT_STEPS),
    DDP: DDP_STEPS,
    OPTIMIZER: OPTIMIZER_STEPS,
}
"""The statements of each class, by its name."""


@cache
def steps(version: str, cls: str, with_checks: bool = True) -> tuple[Step, ...]:
    """Return the statements of a class in a release, in order. If `with_checks` is false,
    statements that only check are left out.
    """
    return tuple(
        step for step in select(TABLES[cls], version) if with_checks or isinstance(step, Derivation)
    )


def _build_fields(
    values: dict[str, Any], version: str, cls: str, with_checks: bool = True, **beside: Any
) -> dict[str, Any]:
    """Return the fields of the class after `__post_init__`. Checks and derivations can also read
    the values in `beside`, which are no fields.
    """
    # Some statements differ by release inside one condition, so they read it like a field.
    namespace = Namespace(values, beside, {"release": version})
    run(steps(version, cls, with_checks), namespace)
    return {name: value for name, value in namespace.__dict__.items() if name in values}


def transformer(args: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return the fields of the TransformerConfig that Megatron builds from the effective `args`.
    With latent attention, the class is MLATransformerConfig.

    The activation function is given by name, other callables are None. Raises `ConfigError` with
    every refusal of the class.
    """
    cls = LATENT if args.get("multi_latent_attention") else TRANSFORMER
    run(BEFORE, Namespace(args))
    values = fed(args, version, cls, TRANSFORMER_FEEDS)
    return _build_fields(values, version, cls, use_checkpoint_args=args.get("use_checkpoint_args"))


def model_parallel(args: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return the fields of the ModelParallelConfig that Megatron builds from the effective `args`.
    Callables are None.

    Raises `ConfigError` with every refusal of this class and of TransformerConfig, which inherits
    from it.
    """
    whole = transformer(args, version)
    return {name: whole[name] for name in releases.fields(version, PARALLEL)}


def ddp(args: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return the fields of the DistributedDataParallelConfig that training builds from effective
    `args`.

    `bucket_size` is a number of elements. None means a single bucket. If `ddp_num_buckets` is set,
    None means that the size is not known here. Raises `ConfigError` with every refusal of the
    class.
    """
    values = fed(args, version, DDP, DDP_FEEDS)
    # For torch's FSDP, get_model builds the class from this one argument alone.
    if args.get("use_torch_fsdp2") and "torch_fsdp2_reshard_after_forward" in args:
        return {
            **defaults(version, DDP),
            "reshard_after_forward": args["torch_fsdp2_reshard_after_forward"],
        }
    # The ranks that reduce gradients together: context ranks hold the same weights, so they take
    # part.
    ranks = (args.get("data_parallel_size") or 1) * (args.get("context_parallel_size") or 1)
    return _build_fields(
        values, version, DDP, ranks=ranks, ddp_num_buckets=args.get("ddp_num_buckets")
    )


def optimizer(args: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return the fields of the OptimizerConfig that Megatron builds from the effective `args`.
    Raises `ConfigError` with every refusal of the class.
    """
    return _build_fields(fed(args, version, OPTIMIZER, ()), version, OPTIMIZER)


def from_fields(
    settings: Mapping[str, Any], version: str, cls: str, check: bool = True
) -> dict[str, Any]:
    """Return the fields of a config object that is built from `settings`, the values by field name.

    Model sizes that were not given have their defaults, and checks and derivations that need the
    sizes are skipped. Raises `ConfigError` with every refusal of the class, unless `check` is
    false.
    """
    own = defaults(version, cls)
    # None instead of the class's default of 0 marks a size as not known, so that steps which need
    # it are skipped.
    missing = {name: None for name in OPEN if name in own and name not in settings}
    result = _build_fields({**own, **settings, **missing}, version, cls, check)
    return {**result, **{name: own[name] for name in missing}}
