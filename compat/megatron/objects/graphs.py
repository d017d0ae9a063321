"""Checks and derivations of `TransformerConfig.__post_init__` for CUDA graphs."""

from __future__ import annotations

from typing import Any

from bridge.stack.checks import excludes
from compat.megatron.arguments.graph_modules import MODULE_STEPS
from compat.megatron.arguments.namespace import Namespace, Step, member_name
from compat.megatron.arguments.steps import check, compute_argument, derive, under, when

GRAPHS = "TransformerConfig: CUDA graphs"
PARTIAL = frozenset(("expert_fc1", "moe_act", "fused_group_mlp"))


def _modules(c: Namespace) -> set[str]:
    """Return the modules that CUDA graphs capture, from cuda_graph_modules, or from
    cuda_graph_scope before 0.18.
    """
    modules: Any = (
        c.cuda_graph_modules if "cuda_graph_modules" in c.__dict__ else c.cuda_graph_scope
    )
    entries = modules.split(",") if isinstance(modules, str) else list(modules or ())
    names = {member_name(module) for module in entries} - {"full", ""}
    # Megatron's own graphs capture the router whole: either of its two modules stands for both.
    router = {"moe_router", "moe_preprocess"}
    return names | router if c.cuda_graph_impl == "local" and names & router else names


SCOPES = ("full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
"""Names of the members of CudaGraphScope (transformer/enums.py, 0.16 and 0.17)."""


def _scope_names(c: Namespace) -> list[str]:
    """Return the names of the scopes in the order in which they were given."""
    scopes: Any = c.cuda_graph_scope
    return [
        member_name(scope)
        for scope in (scopes.split(",") if isinstance(scopes, str) else scopes or ())
    ]


def _list_scopes(c: Namespace) -> None:
    """Turn the scopes into a list; `full` becomes the empty list."""
    c.cuda_graph_scope = _add_missing_modules(
        c, [scope for scope in _scope_names(c) if scope != "full"]
    )


def _add_missing_modules(c: Namespace, modules: list[str]) -> list[str]:
    """Return `modules`. For local graphs, if only one of the two modules of the router is in
    `modules`, the other is added.
    """
    missing = [module for module in ("moe_router", "moe_preprocess") if module not in modules]
    return [*modules, *missing] if c.cuda_graph_impl == "local" and len(missing) == 1 else modules


def _whole(c: Namespace) -> bool:
    """Whether whole layers or iterations are captured."""
    return (
        c.cuda_graph_impl == "full_iteration" or not _modules(c) or "full_iteration" in _modules(c)
    )


def _captures_graphs(c: Namespace) -> bool:
    return c.cuda_graph_impl not in (None, "none")


_on = under(GRAPHS, _captures_graphs, "0.16.0")


# Graphs that capture single layers.
_layered = under(GRAPHS, lambda c: c.cuda_graph_impl in ("local", "transformer_engine"), "0.16.0")
_selective = under(
    GRAPHS, lambda c: _captures_graphs(c) and c.recompute_granularity == "selective", "0.16.0"
)
_offload = under(
    GRAPHS, lambda c: _captures_graphs(c) and c.fine_grained_activation_offloading, "0.18.0"
)


def _dense(c: Namespace) -> bool:
    return c.num_moe_experts is None or c.num_moe_experts <= 1


def _drops_no_tokens(c: Namespace) -> bool:
    # Without a fixed capacity, the number of tokens of an expert differs by step, and a graph has
    # fixed shapes.
    return c.moe_expert_capacity_factor is None or not c.moe_pad_expert_input_to_capacity


def _shared_experts(c: Namespace) -> bool:
    """Whether shared experts with weight shards in fp8 or fp4 are recomputed inside a local CUDA
    graph.
    """
    in_graph = _whole(c) or bool(_modules(c) & {"moe", "moe_router"})
    narrow = c.fp8 is not None or c.fp4 is not None
    sharded = (c.gtp_weight_remat_size or 1) > 1 and c.cuda_graph_impl == "local" and narrow
    shared = c.moe_shared_expert_intermediate_size is not None and not c.moe_shared_expert_overlap
    return bool(sharded and shared and in_graph and "shared_experts" in c.recompute_modules)


def _copy_former_scope(c: Namespace) -> None:
    """Copy the modules from cuda_graph_scope, the former name of cuda_graph_modules."""
    if c.cuda_graph_scope is not None:
        c.cuda_graph_modules, c.cuda_graph_scope = c.cuda_graph_scope, None


GRAPH_STEPS: tuple[Step, ...] = (
    excludes(
        "enable_cuda_graph",
        "cpu_offloading",
        GRAPHS,
        "drop one of them",
        since="0.11.0",
        until="0.15.0",
    ),
    excludes(
        "enable_cuda_graph",
        "recompute_granularity",
        GRAPHS,
        "drop one of them",
        since="0.11.0",
        until="0.15.0",
    ),
    check(
        GRAPHS,
        lambda c: (c.enable_cuda_graph or c.external_cuda_graph) and c.cuda_graph_impl != "none",
        "cuda_graph_impl: found {cuda_graph_impl} with enable_cuda_graph or external_cuda_graph; drop the older setting",
        since="0.15.0",
    ),
    excludes("enable_cuda_graph", "external_cuda_graph", GRAPHS, since="0.15.0"),
    derive(GRAPHS, when(lambda c: c.enable_cuda_graph, cuda_graph_impl="local"), since="0.15.0"),
    derive(
        GRAPHS,
        when(lambda c: c.external_cuda_graph, cuda_graph_impl="transformer_engine"),
        since="0.15.0",
    ),
    _on(
        lambda c: c.cuda_graph_impl not in ("transformer_engine", "local"),
        "cuda_graph_impl: found {cuda_graph_impl}; expected none, transformer_engine or local",
        since="0.15.0",
        until="0.18.0",
    ),
    _on(
        lambda c: c.cuda_graph_impl not in ("transformer_engine", "local", "full_iteration"),
        "cuda_graph_impl: found {cuda_graph_impl}; expected none, transformer_engine, local or full_iteration",
        since="0.18.0",
    ),
    check(
        GRAPHS,
        # `full` is allowed only alone.
        lambda c: _scope_names(c) != ["full"] and not set(_scope_names(c)) <= {*SCOPES},
        "cuda_graph_scope: found {cuda_graph_scope}; expected names among " + ", ".join(SCOPES),
        since="0.16.0",
        until="0.18.0",
        name="found-expected-names-of-full_iteration",
    ),
    derive(GRAPHS, _list_scopes, since="0.16.0", until="0.18.0"),
    check(
        GRAPHS,
        lambda c: c.cuda_graph_scope is not None and c.cuda_graph_modules not in ("full", None, []),
        "cuda_graph_scope: found with cuda_graph_modules {cuda_graph_modules}, its newer name; drop it",
        since="0.18.0",
    ),
    derive(GRAPHS, _copy_former_scope, since="0.18.0"),
    *MODULE_STEPS,
    check(
        GRAPHS,
        lambda c: c.cuda_graph_impl == "full_iteration" and _modules(c),
        "cuda_graph_modules: found {cuda_graph_modules} with cuda_graph_impl full_iteration; drop them",
        since="0.18.0",
    ),
    _on(
        lambda c: c.cpu_offloading and c.cuda_graph_impl != "full_iteration",
        "cuda_graph_impl: found {cuda_graph_impl} with cpu_offloading; drop one of them",
        since="0.15.0",
    ),
    _on(
        lambda c: (
            c.recompute_granularity
            and (
                (c.recompute_granularity, c.cuda_graph_impl, c.cuda_graph_scope)
                != ("selective", "transformer_engine", "attn")
                or {"core_attn", "mla_up_proj"} & set(c.recompute_modules)
            )
        ),
        "cuda_graph_impl: found {cuda_graph_impl} with cuda_graph_scope {cuda_graph_scope} and recompute_granularity"
        " {recompute_granularity}; this release supports recomputation only with cuda_graph_impl"
        " transformer_engine, cuda_graph_scope attn and recompute_granularity selective, and without core_attn and"
        " mla_up_proj in recompute_modules",
        since="0.15.0",
        until="0.16.0",
        name="found-of-with-recompute_granularity-this",
    ),
    _on(
        lambda c: c.cuda_graph_impl == "transformer_engine" and "full_iteration" in _modules(c),
        "cuda_graph_scope: found full_iteration with cuda_graph_impl transformer_engine; expected local",
        until="0.18.0",
    ),
    derive(
        GRAPHS,
        compute_argument(
            "cuda_graph_modules", lambda c: _add_missing_modules(c, c.cuda_graph_modules)
        ),
        since="0.18.0",
    ),
    _layered(
        lambda c: {"moe", "moe_router"} <= _modules(c),
        "cuda_graph_scope: found both moe and moe_router; keep one of them (since 0.18 the setting is cuda_graph_modules)",
    ),
    _layered(
        lambda c: "moe_preprocess" in _modules(c) and "moe_router" not in _modules(c),
        "cuda_graph_scope: found moe_preprocess without moe_router; add moe_router (since 0.18 the setting is"
        " cuda_graph_modules)",
    ),
    _layered(
        lambda c: _dense(c) and _modules(c) & {"moe", "moe_router"},
        "cuda_graph_scope: found moe or moe_router without experts; drop them (since 0.18 the setting is cuda_graph_modules)",
    ),
    _layered(
        lambda c: (
            not _dense(c)
            and (
                c.moe_layer_freq == 1
                or (isinstance(c.moe_layer_freq, list) and 0 not in c.moe_layer_freq)
            )
            and "mlp" in _modules(c)
        ),
        "cuda_graph_scope: found mlp in a model without dense layers; drop it (since 0.18 the setting is cuda_graph_modules)",
    ),
    _layered(
        lambda c: not _dense(c) and _drops_no_tokens(c) and "moe" in _modules(c),
        "cuda_graph_scope: found moe without a padded expert capacity; drop it (since 0.18 the setting is cuda_graph_modules)",
    ),
    _layered(
        # The all-to-all dispatcher then reads the numbers of tokens back to the host.
        lambda c: (
            not _dense(c)
            and _drops_no_tokens(c)
            and c.moe_token_dispatcher_type == "alltoall"
            and (c.moe_expert_capacity_factor is not None or c.moe_router_padding_for_fp8)
            and "moe_preprocess" in _modules(c)
        ),
        "cuda_graph_scope: found moe_preprocess with a dispatcher that waits for the device; drop it"
        " (since 0.18 the setting is cuda_graph_modules)",
    ),
    _on(
        lambda c: c.recompute_granularity == "full" and _modules(c) != {"full_iteration"},
        "recompute_granularity: found full with CUDA graphs that do not capture the full iteration; drop one of them",
        until="0.18.0",
    ),
    _on(
        lambda c: c.recompute_granularity == "full" and c.cuda_graph_impl != "full_iteration",
        "recompute_granularity: found full with cuda_graph_impl {cuda_graph_impl}; expected full_iteration",
        since="0.18.0",
    ),
    _selective(
        lambda c: (
            c.cuda_graph_impl == "transformer_engine"
            and "moe" in c.recompute_modules
            and "moe_router" in _modules(c)
        ),
        "recompute_modules: found moe with CUDA graphs of moe_router; drop one of them",
    ),
    # A part that is recomputed inside a graph must not draw random numbers.
    _selective(
        lambda c: (
            c.attention_dropout != 0.0
            and (_whole(c) or "attn" in _modules(c))
            and "core_attn" in c.recompute_modules
        ),
        "attention_dropout: found {attention_dropout} with attention that is recomputed and "
        "captured in CUDA graphs; expected 0.0",
        name="found-with-cuda-graphs-of",
    ),
    _selective(
        lambda c: (
            c.hidden_dropout != 0.0
            and any(
                (_whole(c) or name in _modules(c)) and name in c.recompute_modules
                for name in ("mlp", "moe")
            )
        ),
        "hidden_dropout: found {hidden_dropout} with an MLP or experts that are both captured in CUDA graphs"
        " and recomputed; expected 0.0",
        name="found-with-cuda-graphs-of",
    ),
    _selective(
        lambda c: (
            c.moe_input_jitter_eps is not None
            and (_whole(c) or "moe" in _modules(c))
            and "moe" in c.recompute_modules
        ),
        "moe_input_jitter_eps: found {moe_input_jitter_eps} with experts that are both captured in CUDA graphs and"
        " recomputed; drop it",
        name="found-with-cuda-graphs-of",
    ),
    _selective(
        _shared_experts,
        "recompute_modules: found shared_experts with weight shards (--tensor-parallel-num-weight-shards)"
        " and local CUDA graphs in fp8 or fp4; drop shared_experts from recompute_modules",
    ),
    _offload(
        lambda c: c.cuda_graph_impl == "local",
        "fine_grained_activation_offloading: found with cuda_graph_impl local; expected transformer_engine or full_iteration",
        until="0.19.0",
    ),
    _offload(
        # Since 0.19, local graphs allow that parts of experts are offloaded, if no graph captures
        # the experts.
        lambda c: (
            c.cuda_graph_impl == "local"
            and not (
                c.offload_modules
                and PARTIAL.issuperset(c.offload_modules)
                and _modules(c)
                and "moe" not in _modules(c)
            )
        ),
        "fine_grained_activation_offloading: found offload_modules {offload_modules} with local CUDA graphs"
        " of {cuda_graph_modules}; offload only expert_fc1, moe_act or fused_group_mlp, and name the captured modules"
        " without moe",
        since="0.19.0",
    ),
    _offload(
        lambda c: "moe" in _modules(c),
        "fine_grained_activation_offloading: found with CUDA graphs of moe; drop one of them",
    ),
    _offload(
        lambda c: c.cuda_graph_warmup_steps <= 0,
        "cuda_graph_warmup_steps: found {cuda_graph_warmup_steps} with offloading; expected a positive number",
    ),
    _offload(
        lambda c: (
            c.cuda_graph_impl == "full_iteration"
            and (
                c.fine_grained_offloading_max_inflight_offloads is None
                or c.fine_grained_offloading_max_inflight_offloads < 0
            )
        ),
        "fine_grained_offloading_max_inflight_offloads: found"
        " {fine_grained_offloading_max_inflight_offloads} with CUDA graphs of the full iteration; expected"
        " 0 or more",
    ),
)
