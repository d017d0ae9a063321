"""Steps for CUDA graph flags, data sources and batch sizes."""

from __future__ import annotations

from collections.abc import Callable

from bridge.checks import excludes, positive, set_
from compat.megatron.arguments.steps import (
    Namespace,
    Step,
    check,
    computed,
    derive,
    drop,
    fallback,
    follow,
    given,
    inherit,
    named,
    when,
)
from compat.megatron.releases import MAIN

GRAPHS = "validate_args: CUDA graph flags"
SPLIT_PATHS = ("train_data_path", "valid_data_path", "test_data_path")
SCOPES = {
    "none": ("none",),
    "local": ("layer", "block"),
    "transformer_engine": ("none",),
    "full_iteration": ("none",),
}
"""Scopes of inference graphs that each implementation allows (ALLOWED_INFERENCE_SCOPES)."""
MOVED = {"full_iteration": (None, "none"), "full_iteration_inference": (None, "block")}
"""Former module names, and the scopes that may be set with each (None: not set)."""


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


def _moved_modules(a: Namespace) -> list[str]:
    return [named(module) for module in a.cuda_graph_modules or () if named(module) in MOVED]


def _mixed_modules(a: Namespace) -> bool:
    moved, scope = _moved_modules(a), a.inference_cuda_graph_scope
    if not moved:
        return False
    impls = ("none", "local") + (("full_iteration",) if moved[0] == "full_iteration" else ())
    if len(set(moved)) > 1 or a.cuda_graph_impl not in impls:
        return True
    return (named(scope) if scope else scope) not in MOVED[moved[0]]


def _modules(a: Namespace) -> None:
    for module in _moved_modules(a):
        if module == "full_iteration":
            a.cuda_graph_impl = "full_iteration"
        elif a.cuda_graph_impl != "none":
            a.inference_cuda_graph_scope = "block"
        # With cuda_graph_impl none, upstream only warns that full_iteration_inference has no
        # effect.
    a.cuda_graph_modules = [
        m for m in a.cuda_graph_modules or () if named(m) not in (*MOVED, "full")
    ]


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
    check(
        GRAPHS,
        lambda a: "full" in (a.cuda_graph_modules or ()) and len(a.cuda_graph_modules) > 1,
        "cuda_graph_modules: found full beside other modules; drop the others",
        since="0.18.0",
        name="found-full-beside-others-drop",
    ),
    check(
        GRAPHS,
        _mixed_modules,
        "cuda_graph_modules: found {cuda_graph_modules} with cuda_graph_impl {cuda_graph_impl} and"
        " inference_cuda_graph_scope {inference_cuda_graph_scope}; set only the latter two",
        since="0.18.0",
        last=True,
    ),
    derive(GRAPHS, _modules, since="0.18.0"),
    derive(
        GRAPHS,
        computed(
            "inference_cuda_graph_scope",
            lambda a: named(
                a.inference_cuda_graph_scope
                or ("layer" if a.cuda_graph_impl == "local" else "none")
            ),
        ),
        since="0.18.0",
    ),
    check(
        GRAPHS,
        lambda a: named(a.inference_cuda_graph_scope) not in SCOPES.get(a.cuda_graph_impl, ()),
        "inference_cuda_graph_scope: found {inference_cuda_graph_scope}, which cuda_graph_impl"
        " {cuda_graph_impl} does not allow; leave it out",
        since="0.18.0",
    ),
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
        lambda a: given(*SPLIT_PATHS)(a) and a.per_split_data_args_path is not None,
        "per_split_data_args_path: found with train_data_path, valid_data_path or test_data_path; keep one of the two ways",
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
    """A check that the evaluation batch divides among the data-parallel ranks."""
    return check(
        "validate_args: evaluation batch",
        lambda a: (
            a.eval_micro_batch_size < 1
            or a.eval_global_batch_size % (a.eval_micro_batch_size * ranks(a)) != 0
        ),
        "eval_global_batch_size: found {eval_global_batch_size}; expected a multiple of"
        " eval_micro_batch_size ({eval_micro_batch_size}) x data_parallel_size ({data_parallel_size});"
        " global_batch_size is its default; change one of them",
        since=since,
        until=until,
        needs=("eval_global_batch_size", "eval_micro_batch_size", "data_parallel_size"),
    )


BATCH_STEPS: tuple[Step, ...] = (
    positive("micro_batch_size", "validate_args: batch size", last=True),
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
    positive("global_batch_size", "validate_args: batch size", last=True),
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
