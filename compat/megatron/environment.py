"""Environment variables that a Megatron run needs, each with a value and the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compat.megatron.arguments.namespace import Namespace, Predicate
from compat.megatron.releases import RELEASES

DETERMINISTIC = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")
"""NCCL algorithms that deterministic mode accepts. Since 0.19, Tree is not accepted, and several
may be given as a list.
"""


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable that releases [since, until) need if `when` is true of the arguments.

    `value` is one that Megatron accepts.
    """

    name: str
    value: str
    why: str
    when: Predicate
    since: str = ""
    until: str = ""


def _uses_fsdp(a: Namespace) -> bool:
    return bool(a.use_torch_fsdp2 or a.use_custom_fsdp or a.use_megatron_fsdp)


def _engine(a: Namespace) -> bool:
    return a.transformer_impl in (None, "transformer_engine")


ONE = "CUDA_DEVICE_MAX_CONNECTIONS"
VARIABLES: tuple[Variable, ...] = (
    Variable(
        ONE,
        "1",
        "sequence parallelism and asynchronous tensor-parallel reduction need kernels to start in launch order",
        lambda a: a.sequence_parallel or a.async_tensor_model_parallel_allreduce,
        until="0.12.0",
    ),
    Variable(
        ONE,
        "1",
        "tensor and context parallelism need kernels to start in launch order (except on Blackwell and later)",
        # FSDP and the overlap of expert communication want several connections instead. Upstream
        # then only warns.
        lambda a: (
            ((a.tensor_model_parallel_size or 1) > 1 or (a.context_parallel_size or 1) > 1)
            and not _uses_fsdp(a)
            and not a.overlap_moe_expert_parallel_comm
        ),
        since="0.12.0",
    ),
    Variable(
        ONE,
        "8",
        "FSDP needs more than one connection to overlap its communication",
        _uses_fsdp,
        since="0.12.0",
    ),
    Variable(
        "NCCL_ALGO",
        "Ring",
        f"deterministic mode accepts only {', '.join(DETERMINISTIC)}",
        lambda a: a.deterministic_mode,
        until="0.19.0",
    ),
    Variable(
        "NCCL_ALGO",
        "Ring",
        f"deterministic mode accepts only {', '.join(DETERMINISTIC[1:])}",
        lambda a: a.deterministic_mode,
        since="0.19.0",
    ),
    Variable(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "0",
        "in deterministic mode, Transformer Engine's attention needs this value",
        lambda a: a.deterministic_mode and _engine(a),
        until="0.19.0",
    ),
    Variable(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "0",
        "deterministic mode refuses any other value",
        lambda a: a.deterministic_mode,
        since="0.19.0",
    ),
    Variable(
        "CUBLAS_WORKSPACE_CONFIG",
        ":4096:8",
        "in deterministic mode, PyTorch refuses to use cuBLAS without this setting",
        lambda a: a.deterministic_mode,
        until="0.19.0",
    ),
    Variable(
        "CUBLAS_WORKSPACE_CONFIG",
        ":4096:8",
        "deterministic mode accepts only this value and :16:8",
        lambda a: a.deterministic_mode,
        since="0.19.0",
    ),
    Variable(
        "NVTE_APPLY_QK_LAYER_SCALING",
        "1",
        "Transformer Engine reads apply_query_key_layer_scaling only from this variable",
        lambda a: a.apply_query_key_layer_scaling and _engine(a),
    ),
    Variable(
        "NVTE_CPU_OFFLOAD_V1",
        "1",
        "fine-grained offloading of activations must not offload weights (Transformer Engine 2.10 and later)",
        lambda a: a.fine_grained_activation_offloading,
        since="0.16.0",
    ),
)


def environment(args: Mapping[str, Any], version: str) -> dict[str, tuple[str, str]]:
    """Return the variables that a run with these effective arguments needs: name -> (value,
    reason).
    """
    a, rows = Namespace(args), RELEASES.having(version, VARIABLES)
    return {row.name: (row.value, row.why) for row in rows if row.when(a)}
