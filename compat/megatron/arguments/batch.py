"""Checks and derivations for CUDA graph flags, data sources and batch sizes."""

from __future__ import annotations

from collections.abc import Callable

from bridge.stack.checks import excludes, set_
from compat.megatron.arguments.graph_modules import MODULE_STEPS
from compat.megatron.arguments.namespace import Namespace, Step
from compat.megatron.arguments.steps import (
    any_given,
    check,
    derive,
    drop,
    fallback,
    follow,
    inherit,
    when,
)
from compat.megatron.releases import MAIN

GRAPHS = "validate_args: CUDA graph flags"
SPLIT_PATHS = ("train_data_path", "valid_data_path", "test_data_path")


def _old_graph_flags(a: Namespace) -> None:
    for name, value in (
        ("enable_cuda_graph", "local"),
        ("external_cuda_graph", "transformer_engine"),
    ):
        if getattr(a, name):
            a.cuda_graph_impl = value
            # validate_args deletes the flag if it is set, and later statements of upstream then
            # fail on the missing attribute: see the check of hybrid_context_parallel in model.py.
            del a.__dict__[name]


def _phases(a: Namespace) -> None:
    phases = a.phase_transition_iterations
    if phases:
        parts = phases.split(",") if isinstance(phases, str) else phases
        a.phase_transition_iterations = sorted(map(int, parts))


GRAPH_STEPS: tuple[Step, ...] = (
    check(
        GRAPHS,
        lambda a: (a.enable_cuda_graph or a.external_cuda_graph) and a.cuda_graph_impl != "none",
        "cuda_graph_impl: found {cuda_graph_impl} with enable_cuda_graph or external_cuda_graph; drop the older flag",
        since="0.15.0",
    ),
    excludes("enable_cuda_graph", "external_cuda_graph", GRAPHS, since="0.15.0"),
    derive(GRAPHS, _old_graph_flags, since="0.15.0"),
    check(
        GRAPHS,
        lambda a: a.cuda_graph_scope_deprecated is not None and a.cuda_graph_modules,
        "cuda_graph_modules: found with cuda_graph_scope, its former name; keep --cuda-graph-modules",
        since="0.18.0",
    ),
    derive(GRAPHS, follow("cuda_graph_modules", "cuda_graph_scope_deprecated"), since="0.18.0"),
    derive(GRAPHS, drop("cuda_graph_scope_deprecated"), since="0.18.0"),
    *MODULE_STEPS,
)

DATA_STEPS: tuple[Step, ...] = (
    derive(
        "validate_args: data split",
        # Upstream's "legacy default": shares of the samples for training, validation and test.
        when(lambda a: a.data_path is not None and a.split is None, split="969, 30, 1"),
    ),
    excludes(
        set_("data_path"), set_("data_args_path"), "validate_args: data sources", since="0.10.0"
    ),
    check(
        "validate_args: data sources",
        lambda a: any_given(*SPLIT_PATHS)(a) and a.per_split_data_args_path is not None,
        "per_split_data_args_path: found with train_data_path, valid_data_path or test_data_path; "
        "keep either the file or the paths",
        since="0.10.0",
    ),
    derive("validate_args: phases", _phases, since="0.16.0"),
    excludes(
        set_("rampup_batch_size"),
        "phase_transition_iterations",
        "validate_args: phases",
        since="0.16.0",
        until="0.18.0",
    ),
)


def _evaluation(ranks: Callable[[Namespace], int], since: str, until: str) -> Step:
    """Return a check that the evaluation batch divides among the data-parallel ranks."""
    return check(
        "validate_args: evaluation batch",
        lambda a: (
            a.eval_micro_batch_size < 1
            or a.eval_global_batch_size % (a.eval_micro_batch_size * ranks(a)) != 0
        ),
        "eval_global_batch_size: found {eval_global_batch_size}; expected a multiple of"
        " eval_micro_batch_size ({eval_micro_batch_size}) x data_parallel_size ({data_parallel_size});"
        " eval_global_batch_size defaults to global_batch_size; change one of them",
        since=since,
        until=until,
        needs=("eval_global_batch_size", "eval_micro_batch_size", "data_parallel_size"),
    )


BATCH_STEPS: tuple[Step, ...] = (
    # This row stands before the next one, which gives global_batch_size a value in every launch.
    excludes(
        set_("step_batch_size_schedule"),
        set_("global_batch_size"),
        "validate_args: batch size schedule",
        since="0.18.0",
    ),
    derive(
        "validate_args: batch size",
        fallback("global_batch_size", lambda a: a.micro_batch_size * a.data_parallel_size),
        needs=("micro_batch_size", "data_parallel_size"),
    ),
    derive(
        "validate_args: evaluation batch",
        inherit("eval_global_batch_size", "global_batch_size"),
        since="0.18.0",
    ),
    derive(
        "validate_args: evaluation batch",
        inherit("eval_micro_batch_size", "micro_batch_size"),
        since="0.18.0",
    ),
    _evaluation(lambda a: a.data_parallel_size, "0.18.0", MAIN),
    # Since 0.20, upstream also multiplies by the ranks that hold other shards of the weights:
    # data_parallel_size leaves them out, and evaluate() divides by the same product to count its
    # microbatches.
    _evaluation(lambda a: a.data_parallel_size * (a.gtp_weight_remat_size or 1), MAIN, ""),
)
