"""Checks and derivations for reinforcement learning (`--perform-rl-step`, since 0.15): rollouts, KV
cache, sample counts.
"""

from __future__ import annotations

from bridge.stack.checks import on
from compat.megatron.arguments.namespace import Namespace, Step
from compat.megatron.arguments.steps import check, compute_argument, derive, under
from compat.megatron.releases import MAIN

RL = "validate_args: perform_rl_step"


_rl = under(RL, on("perform_rl_step"))


def _samples_per_generation(a: Namespace) -> int:
    """Return the number of samples that one generation phase provides."""
    return int(a.grpo_prompts_per_step * a.grpo_group_size * a.grpo_iterations)


def _not_divided(name: str, since: str, until: str) -> Step:
    """Return a check that the interval `name` is a multiple of the training iterations in a generation
    phase, because samples of an unfinished phase are not saved.
    """

    def fails(a: Namespace) -> bool:
        iterations = _samples_per_generation(a) // a.global_batch_size if a.global_batch_size else 0
        return bool(getattr(a, name) is not None and iterations and getattr(a, name) % iterations)

    problem = (
        f"{name}: found {{{name}}}; expected a multiple of the training iterations per generation phase"
        " (grpo_group_size x grpo_prompts_per_step x grpo_iterations / global_batch_size)"
    )
    return _rl(fails, problem, since, until)


def samples(since: str, until: str = "") -> tuple[Step, ...]:
    """Return checks that the samples of one generation phase fit the global batch size. Since 0.17
    these checks come after those of the batch.
    """
    return (
        _rl(
            lambda a: not a.global_batch_size or _samples_per_generation(a) % a.global_batch_size,
            "global_batch_size: found {global_batch_size}; expected a divisor of grpo_group_size"
            " ({grpo_group_size}) x grpo_prompts_per_step ({grpo_prompts_per_step}) x grpo_iterations"
            " ({grpo_iterations})",
            since,
            until,
        ),
        _not_divided("exit_interval", since, until),
        _not_divided("save_interval", since, until),
    )


def _tasks(a: Namespace) -> None:
    """Set the number of rollouts in flight from one of three flags, whichever is given."""
    if not a.perform_rl_step:
        return
    if a.rl_parallel_generation_tasks is not None:
        a.rl_num_parallel_generations = a.rl_parallel_generation_tasks * a.grpo_group_size
    batches = (
        a.rl_num_parallel_generations is None and a.rl_num_parallel_generation_batches is not None
    )
    if a.rl_generation_batch_size is None:
        a.rl_generation_batch_size = a.grpo_prompts_per_step if batches else 1
    if batches:
        a.rl_parallel_generation_tasks = (
            a.rl_num_parallel_generation_batches * a.rl_generation_batch_size
        )
    elif a.rl_num_parallel_generations is not None:
        a.rl_parallel_generation_tasks = a.rl_num_parallel_generations // (a.grpo_group_size or 1)
    else:
        a.rl_parallel_generation_tasks = 512  # upstream's constant
    a.rl_enforce_generation_order = a.rl_generation_batch_size > 1


COUNTS = (
    "rl_num_parallel_generations",
    "rl_num_parallel_generation_batches",
    "rl_parallel_generation_tasks",
)


def _counts(a: Namespace) -> int:
    return sum(getattr(a, name) is not None for name in COUNTS)


def _lag(a: Namespace) -> None:
    """Set the number of batches by which generation runs ahead of training.

    The number follows from the largest number of requests in flight, if that is set. Otherwise the
    number is 0, or None with partial rollouts; None means that the engine tunes the number.
    """
    batch = a.grpo_prompts_per_step * a.grpo_group_size
    if not a.perform_rl_step:
        return
    if a.rl_max_inflight_requests is not None and batch:
        a.rl_generation_lag = a.rl_max_inflight_requests / batch - 1
    elif a.rl_generation_lag is None and not a.rl_partial_rollouts:
        a.rl_generation_lag = 0


RL_STEPS: tuple[Step, ...] = (
    check(
        RL,
        lambda a: (
            a.rl_offload_kv_cache_during_training
            and a.inference_dynamic_batching_unified_memory_level
        ),
        "rl_offload_kv_cache_during_training: found with a KV cache in unified memory; set"
        " --inference-dynamic-batching-unified-memory-level 0",
        since="0.16.0",
        until="0.17.0",
    ),
    _rl(
        lambda a: a.rl_remove_kv_cache_during_training and a.rl_offload_kv_cache_during_training,
        "rl_remove_kv_cache_during_training: found with rl_offload_kv_cache_during_training; keep one of them",
        "0.15.0",
        "0.17.0",
    ),
    _rl(
        lambda a: a.rl_remove_kv_cache_during_training and a.rl_partial_rollouts,
        "rl_remove_kv_cache_during_training: found with rl_partial_rollouts; keep one of them",
        "0.15.0",
        "0.17.0",
    ),
    _rl(
        lambda a: (
            a.rl_offload_inference_model_weights_when_idle
            and a.rl_inference_model_unified_memory_level != 1
        ),
        "rl_offload_inference_model_weights_when_idle: found with rl_inference_model_unified_memory_level"
        " {rl_inference_model_unified_memory_level}; expected 1",
        "0.16.0",
        "0.17.0",
    ),
    _rl(
        lambda a: (
            a.moe_use_legacy_grouped_gemm
            and a.rl_inference_expert_model_parallel_size
            not in (None, a.expert_model_parallel_size)
        ),
        "moe_use_legacy_grouped_gemm: found with another expert parallel size for inference"
        " ({rl_inference_expert_model_parallel_size}) than for training; drop it",
        "0.16.0",
        "0.17.0",
    ),
    _rl(
        lambda a: (
            (a.rl_persist_cuda_graphs or a.rl_training_cuda_graphs) and a.cuda_graph_impl == "none"
        ),
        "cuda_graph_impl: found none with rl_persist_cuda_graphs ({rl_persist_cuda_graphs}) or"
        " rl_training_cuda_graphs ({rl_training_cuda_graphs}); choose an implementation, or drop the two flags",
        "0.17.0",
    ),
    _rl(
        lambda a: a.rl_kv_cache_management_mode == "offload" and not a.rl_persist_cuda_graphs,
        "rl_kv_cache_management_mode: found offload without rl_persist_cuda_graphs; add --rl-persist-cuda-graphs",
        "0.17.0",
        name="found-offload-expected-rl_persist_cuda_graphs-beside",
    ),
    _rl(
        lambda a: (
            a.rl_kv_cache_management_mode == "offload"
            and a.inference_dynamic_batching_unified_memory_level > 0
        ),
        "rl_kv_cache_management_mode: found offload with a KV cache in unified memory; drop one of them",
        "0.17.0",
    ),
    _rl(
        lambda a: _counts(a) > 1,
        "rl_num_parallel_generations: found more than one count of parallel generations; keep one of"
        " --rl-num-parallel-generations, --rl-num-parallel-generation-batches,"
        " --rl-parallel-generation-tasks",
        "0.17.0",
        "0.19.0",
    ),
    _rl(
        lambda a: _counts(a) and not a.rl_partial_rollouts,
        "rl_partial_rollouts: missing; parallel generations need it; add --rl-partial-rollouts",
        "0.17.0",
        "0.19.0",
    ),
    _rl(
        # For a group size of 0, Megatron itself divides by zero.
        lambda a: (
            a.rl_num_parallel_generations is not None
            and (not a.grpo_group_size or a.rl_num_parallel_generations % a.grpo_group_size != 0)
        ),
        "rl_num_parallel_generations: found {rl_num_parallel_generations}; expected a multiple of"
        " grpo_group_size ({grpo_group_size})",
        "0.17.0",
        "0.19.0",
    ),
    derive(RL, _tasks, since="0.17.0", until="0.19.0"),
    _rl(
        lambda a: a.rl_max_inflight_requests is not None and a.rl_generation_lag is not None,
        "rl_max_inflight_requests: found with rl_generation_lag {rl_generation_lag}; keep one of them",
        MAIN,
    ),
    _rl(
        lambda a: a.rl_max_inflight_requests is not None and a.rl_max_inflight_requests < 1,
        "rl_max_inflight_requests: found {rl_max_inflight_requests}; expected a positive number",
        MAIN,
    ),
    derive(RL, _lag, since=MAIN),
    _rl(
        lambda a: a.rl_generation_lag is not None and a.rl_generation_lag < -1,
        "rl_generation_lag: found {rl_generation_lag}; expected at least -1",
        MAIN,
    ),
    _rl(
        lambda a: (
            not a.rl_partial_rollouts
            and ((a.rl_generation_lag or 0) > 0 or a.rl_submission_granularity == "R")
        ),
        "rl_partial_rollouts: missing; a positive rl_generation_lag and rl_submission_granularity R need it; add"
        " --rl-partial-rollouts",
        "0.19.0",
        name="missing-rl_generation_lag-and-submission-by",
    ),
    _rl(
        lambda a: a.rl_consumption_granularity == "R",
        "rl_consumption_granularity: found R, which this release does not support; "
        "choose another granularity",
        "0.19.0",
    ),
    _rl(
        lambda a: (a.rl_submission_granularity, a.rl_consumption_granularity) == ("B", "G"),
        "rl_submission_granularity: found B with rl_consumption_granularity G, which this release does not support;"
        " choose another pair",
        "0.19.0",
    ),
    derive(
        RL,
        compute_argument(
            "grpo_samples_per_iteration",
            lambda a: a.grpo_prompts_per_step * a.grpo_group_size,
            on("perform_rl_step"),
        ),
        since="0.15.0",
    ),
    *samples("0.15.0", "0.17.0"),
    _rl(
        lambda a: a.rl_use_sequence_packing and a.seq_length > a.rl_sequence_packing_bin_size,
        "rl_sequence_packing_bin_size: found {rl_sequence_packing_bin_size}; expected at least seq_length ({seq_length})",
        "0.15.0",
        "0.16.0",
        ("seq_length",),
    ),
    _rl(
        lambda a: a.rl_use_sequence_packing and a.micro_batch_size != 1,
        "micro_batch_size: found {micro_batch_size}; sequence packing expects 1; "
        "increase seq_length instead",
        "0.16.0",
        "",
        ("micro_batch_size",),
    ),
)
