"""Checks and derivations of the config classes for data parallelism and the optimizer."""

from __future__ import annotations

from bridge.stack.checks import excludes, needs, one_of, positive
from compat.megatron.arguments.namespace import Namespace, Step
from compat.megatron.arguments.steps import check, compute_argument, derive, when
from compat.megatron.releases import MAIN

BUCKETS = "training.py: bucket size"
CLASS = "DistributedDataParallelConfig"
OPTIMIZER = "OptimizerConfig"
LEAST, PER_RANK = 40_000_000, 1_000_000
"""Numbers of elements for the default bucket size: PER_RANK for each rank, at least LEAST in all.
"""
STATES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def _bucket(d: Namespace) -> None:
    """Set the bucket size to the given size or the default.

    The size is None without overlap, which means one bucket. It is also None if the number of
    buckets is set.
    """
    # With a number of buckets, the size follows from the number of parameters, which no config
    # tells.
    has_count = d.num_buckets is not None or d.ddp_num_buckets is not None
    if not d.overlap_grad_reduce or has_count:
        d.bucket_size = None
    elif d.bucket_size is None and d.ranks is not None:
        d.bucket_size = max(LEAST, PER_RANK * d.ranks)


DDP_STEPS: tuple[Step, ...] = (
    check(
        BUCKETS,
        lambda d: d.ddp_num_buckets is not None and d.bucket_size is not None,
        "ddp_num_buckets: found {ddp_num_buckets} with ddp_bucket_size {bucket_size}; keep one of them",
        since="0.12.0",
    ),
    positive("ddp_num_buckets", BUCKETS, since="0.12.0"),
    one_of("megatron_fsdp_version", (1, 2), CLASS, since=MAIN),
    needs(
        "reuse_grad_buf_for_mxfp8_param_ag",
        "fp8_param_gather",
        CLASS,
        "add --fp8-param-gather, or drop --reuse-grad-buf-for-mxfp8-param-ag",
        since="0.13.0",
    ),
    check(
        CLASS,
        lambda d: d.param_name_patterns_for_fp32_local_accumulation and d.grad_reduce_in_fp32,
        "ddp_param_name_patterns_for_fp32_local_accumulation: found with all gradients in fp32;"
        " drop it, or add --grad-reduce-in-bf16",
        since="0.17.0",
        name="found-with-gradients-that-are",
    ),
    derive(BUCKETS, _bucket),
    derive(
        CLASS,
        when(lambda d: d.megatron_fsdp_max_pool_double_buffer, fsdp_double_buffer=True),
        since="0.19.0",
    ),
)


def _state_dtype(name: str) -> Step:
    """Return a check that `name` is fp32 if the optimizer is not precision-aware."""
    return check(
        OPTIMIZER,
        lambda o: not o.use_precision_aware_optimizer and getattr(o, name) != "torch.float32",
        f"{name}: found {{{name}}} without use_precision_aware_optimizer; expected fp32, or add"
        " --use-precision-aware-optimizer",
        since="0.11.0",
    )


OPTIMIZER_STEPS: tuple[Step, ...] = (
    derive(
        OPTIMIZER,
        compute_argument(
            "use_precision_aware_optimizer_no_fp8_or_ds_fp8",
            lambda o: bool(
                o.use_precision_aware_optimizer
                and (
                    o.fp8_recipe in (None, "delayed")
                    or o.main_params_dtype != "torch.float32"
                    or o.optimizer_cpu_offload
                )
            ),
        ),
        since="0.14.0",
    ),
    excludes(
        "reuse_grad_buf_for_mxfp8_param_ag",
        "overlap_param_gather_with_optimizer_step",
        OPTIMIZER,
        since="0.19.0",
    ),
    check(
        "get_megatron_optimizer_config",
        lambda o: o.optimizer not in ("adam", "sgd") and "muon" not in o.optimizer,
        "optimizer: found {optimizer}, which the parser accepts but this release cannot build; expected adam, sgd or muon",
        since="0.16.0",
        until="0.18.0",
        name="found-which-this-release-can",
    ),
    check(
        OPTIMIZER,
        lambda o: o.use_precision_aware_optimizer and o.optimizer != "adam",
        "use_precision_aware_optimizer: found with optimizer {optimizer}; expected adam",
        since="0.11.0",
    ),
    needs(
        "use_precision_aware_optimizer",
        "use_distributed_optimizer",
        OPTIMIZER,
        "add --use-distributed-optimizer",
        since="0.11.0",
        until=MAIN,
    ),
    *map(_state_dtype, STATES),
)
