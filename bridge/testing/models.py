"""Strategies for model configs: a family with consistent sizes, and values for every key of any family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from bridge.plan.families import FAMILIES, NULL
from bridge.plan.families.codecs import NAMED
from bridge.plan.families.schema import ModelKeys
from bridge.plan.section import fields
from bridge.testing.strategies import Group, values as typed_values

POSITIVE, FACTOR = st.floats(1e-3, 1e6), st.floats(1e-3, 1e3)
ORIGINAL = "original_max_position_embeddings"
SCALINGS = st.one_of(
    st.just({"rope_type": "default"}),
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": st.floats(1, 64)}),
    st.fixed_dictionaries({"type": st.just("dynamic"), "factor": st.floats(1, 64)}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": st.floats(1, 64),
            "low_freq_factor": st.floats(0.5, 2),
        },
        optional={"high_freq_factor": st.floats(2, 8), ORIGINAL: st.integers(1, 9999)},
    ),
    st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": st.floats(1, 64)},
        optional={
            "beta_fast": st.floats(1, 64),
            "beta_slow": st.floats(0.1, 1),
            "attention_factor": st.floats(0.1, 2),
            "mscale": st.floats(0, 2),
            "mscale_all_dim": st.floats(0, 2),
            "truncate": st.booleans(),
            ORIGINAL: st.integers(1, 9999),
        },
    ),
    st.fixed_dictionaries({"type": st.just("longrope"), ORIGINAL: st.integers(1, 9999)}),
)
PARAMETERS = st.builds(lambda base, scaling: {**scaling, "rope_theta": base}, POSITIVE, SCALINGS)
BOTH = st.builds(
    lambda one, two: {"sliding_attention": one, "full_attention": two}, PARAMETERS, PARAMETERS
)
"""Strategy for rotary parameters that each kind of block has for itself, as in Gemma 3."""

KEYS: Mapping[str, SearchStrategy[Any]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), st.integers(1, 12)),
    # 192 is a multiple of every number of heads below, and each head is of even width, as rotation
    # needs.
    **dict.fromkeys(
        ("hidden_size", "n_embd", "n_embed"), st.integers(1, 12).map(lambda count: 192 * count)
    ),
    **dict.fromkeys(("num_attention_heads", "n_head"), st.sampled_from((2, 4, 8, 12, 24))),
    "num_key_value_heads": st.sampled_from((1, 2, 4, NULL)),
    "num_kv_heads": st.sampled_from((1, 2, 4)),
    **dict.fromkeys(
        ("hidden_act", "hidden_activation", "activation_function", "activation"),
        st.sampled_from(sorted(NAMED)),
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        st.sampled_from((8, 16, 64)),
    ),
    **dict.fromkeys(("num_experts_per_tok", "experts_per_token", "moe_k"), st.integers(1, 8)),
    **dict.fromkeys(
        ("query_pre_attn_scalar", "attention_multiplier", "logits_scaling", "logit_scale"), FACTOR
    ),
    **dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "routed_scaling_factor"), FACTOR
    ),
    "rope_scaling": SCALINGS,
    "rope_parameters": PARAMETERS | BOTH,
    "topk_method": st.sampled_from(("greedy", "group_limited_greedy", "noaux_tc")),
    "n_inner": st.integers(1, 4096),
}
"""Strategies for realistic values of keys whose types would allow any value."""
BLOCKS: Mapping[str, SearchStrategy[Any]] = {
    "layer_types": st.sampled_from(("full_attention", "sliding_attention")),
    "mlp_layer_types": st.sampled_from(("dense", "sparse")),
    "is_moe_layer": st.booleans(),
    "no_rope_layers": st.sampled_from((0, 1)),
}
"""Keys whose value is a list with one entry for each block, with strategies for an entry."""


def key(name: str) -> SearchStrategy[Any]:
    """Return a strategy for the values of a key."""
    return KEYS[name] if name in KEYS else typed_values(fields(ModelKeys)[name].annotation)


@st.composite
def of_family(draw: DrawFn, name: str, without: tuple[str, ...] = ()) -> Sequence[Group]:
    """Draw groups of keys that the family `name` reads: first its number of layers, then some other
    keys, each in a group of its own.
    """
    family, layers = FAMILIES[name], draw(st.integers(1, 12))
    counts = family.keys["layers"].names[:1] if "layers" in family.keys else ()
    first = dict.fromkeys(counts, layers)
    block_paths = [path for path in BLOCKS if path in family.keys_it_reads and draw(st.booleans())]
    blocks = {
        path: draw(st.lists(BLOCKS[path], min_size=layers, max_size=layers).map(tuple))
        for path in block_paths
    }
    exclusions = {*first, *BLOCKS, *without}
    others = [
        path
        for path in sorted(family.keys_it_reads)
        if path not in exclusions and draw(st.booleans())
    ]
    return [
        first,
        *({path: value} for path, value in blocks.items()),
        *({path: draw(key(path))} for path in others),
    ]
