"""The table between Megatron's arguments of experts and the plan's fields.

Without experts, none of the arguments takes effect.
"""

from __future__ import annotations

from bridge.stack.rules import Context, Group, convert, nothing
from bridge.stack.words import every, no, on
from compat.megatron.exact_floats import undone
from compat.megatron.patterns import blocks, first_of, fits, spell_pattern, values_as_list
from compat.megatron.rules.attention import SCRIPT

MOE, COUNT = "model.moe.", "model.experts"
BALANCE = {
    "aux_loss": "batch",
    "seq_aux_loss": "sequence",
    "global_aux_loss": "global",
    "sinkhorn": "sinkhorn",
    "none": "none",
    "quantile_balancing": "none",
}
# Reversed, so that `none` is written for `none`, and not quantile_balancing.
LOSSES = {"pooled": "aux_loss", **{ours: theirs for theirs, ours in reversed(BALANCE.items())}}
KIND, COEFFICIENT, TOP_K = "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_router_topk"


# Sizes


def _read_sizes(values: Group, context: Context) -> Group:
    if not values.get("num_experts"):
        return {}
    shared = values.get("moe_shared_expert_intermediate_size") or 0
    return {
        f"{MOE}top_k": values.get(TOP_K),
        f"{MOE}ffn": values.get("moe_ffn_hidden_size") or values.get("ffn_hidden_size"),
        f"{MOE}shared_ffn": shared,
        f"{MOE}shared_gate": bool(values.get("moe_shared_expert_gate")) if shared else None,
        f"{MOE}layers": blocks(values.get("moe_layer_freq"), values.get("num_layers"), first_of),
    }


def _write_sizes(values: Group, context: Context) -> Group:
    if not values.get(COUNT):
        return {}
    layers = values.get(f"{MOE}layers")
    return {
        TOP_K: values.get(f"{MOE}top_k"),
        "moe_ffn_hidden_size": values.get(f"{MOE}ffn"),
        "moe_shared_expert_intermediate_size": values.get(f"{MOE}shared_ffn") or None,
        # The gate belongs to shared experts; without them Megatron has nothing to gate.
        **(
            {"moe_shared_expert_gate": True}
            if values.get(f"{MOE}shared_gate") and values.get(f"{MOE}shared_ffn")
            else {}
        ),
        "moe_layer_freq": spell_pattern(layers, values.get("model.layers"), first_of)
        if layers and not all(layers)
        else None,
    }


def _spreads_evenly(values: Group) -> bool:
    return fits(values.get("moe_layer_freq"), values.get("num_layers"))


SIZED = {
    TOP_K: f"{MOE}top_k",
    "moe_ffn_hidden_size": f"{MOE}ffn",
    "moe_shared_expert_intermediate_size": f"{MOE}shared_ffn",
    "moe_shared_expert_gate": f"{MOE}shared_gate",
    "moe_layer_freq": f"{MOE}layers",
}
SIZES = convert(
    tuple(SIZED),
    tuple(SIZED.values()),
    _read_sizes,
    _write_sizes,
    sees=("num_experts", "num_layers", "ffn_hidden_size", COUNT, "model.layers"),
    blurs=every(on("num_experts"), no(_spreads_evenly)),
    carries=SIZED,
    lossy="before 0.10, Megatron's experts are as wide as its dense feed-forward layer, and every"
    " block has experts",
    note=SCRIPT,
    source="moe/experts.py; moe/shared_experts.py; gpt_layer_specs.py: get_gpt_decoder_layer_specs",
    model=True,
)


# Router

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


def _read_router(values: Group, context: Context) -> Group:
    if not values.get("num_experts"):
        return {}
    score = values.get("moe_router_score_function") or "softmax"
    bias = bool(values.get("moe_router_enable_expert_bias"))
    factor = values.get("moe_router_topk_scaling_factor")
    capacity = values.get("moe_expert_capacity_factor")
    top_groups = values.get("moe_router_group_topk") or None
    # A softmax over the chosen experts sums to one by itself; a softmax over all experts
    # (moe_router_pre_softmax) does not. Megatron normalises other scores if several experts are
    # chosen. Sinkhorn's iteration reads neither setting: its scores are a sigmoid for one expert per
    # token, and a softmax over all experts for more (router.py: sinkhorn_load_balancing).
    sums_to_one = (
        not values.get("moe_router_pre_softmax") if score == "softmax" else values.get(TOP_K) != 1
    )
    iterates = values_as_list(values, KIND) == ["sinkhorn"]
    return {
        f"{MOE}score": score if score in SCORES and not iterates else None,
        f"{MOE}normalised": None if iterates else sums_to_one,
        f"{MOE}scale": factor if factor and factor > 0 else None,
        f"{MOE}groups": values.get("moe_router_num_groups") if top_groups else None,
        f"{MOE}top_groups": top_groups,
        # A group is ranked by the sum of its best top_k // group_topk experts.
        f"{MOE}group_best": (values.get(TOP_K) or 0) // top_groups or None if top_groups else None,
        f"{MOE}balance_bias": bias,
        f"{MOE}balance_rate": values.get("moe_router_bias_update_rate") if bias else None,
        f"{MOE}capacity": capacity if capacity and capacity > 0 else None,
        f"{MOE}z_loss": values.get("moe_z_loss_coeff"),
    }


def _write_router(values: Group, context: Context) -> Group:
    if not values.get(COUNT):
        return {}
    score, bias = values.get(f"{MOE}score"), values.get(f"{MOE}balance_bias")
    # With one expert per token, Megatron requires the softmax before the choice; the weight is then
    # below one.
    alone = (
        values.get(f"{MOE}top_k") == 1
        and context.since("0.11.0")
        and values.get(f"{MOE}balance") != "sinkhorn"
    )
    before = score in (None, "softmax") and (values.get(f"{MOE}normalised") is False or alone)
    top_groups = values.get(f"{MOE}top_groups") if values.get(f"{MOE}groups") else None
    return {
        "moe_router_score_function": score,
        **({"moe_router_pre_softmax": True} if before else {}),
        "moe_router_topk_scaling_factor": values.get(f"{MOE}scale"),
        "moe_router_num_groups": values.get(f"{MOE}groups") if top_groups else None,
        "moe_router_group_topk": top_groups,
        **(
            {"moe_router_enable_expert_bias": True}
            if bias and score not in (None, "softmax")
            else {}
        ),
        "moe_router_bias_update_rate": values.get(f"{MOE}balance_rate") if bias else None,
        "moe_expert_capacity_factor": values.get(f"{MOE}capacity"),
        "moe_z_loss_coeff": values.get(f"{MOE}z_loss"),
    }


ROUTED: dict[str, str | tuple[str, ...]] = {
    "moe_router_score_function": (f"{MOE}score", f"{MOE}normalised"),
    "moe_router_pre_softmax": f"{MOE}normalised",
    "moe_router_topk_scaling_factor": f"{MOE}scale",
    "moe_router_num_groups": f"{MOE}groups",
    "moe_router_group_topk": (f"{MOE}top_groups", f"{MOE}group_best"),
    "moe_router_enable_expert_bias": f"{MOE}balance_bias",
    "moe_router_bias_update_rate": f"{MOE}balance_rate",
    "moe_expert_capacity_factor": f"{MOE}capacity",
    "moe_z_loss_coeff": f"{MOE}z_loss",
}
ROUTER = convert(
    tuple(ROUTED),
    tuple(
        MOE + name
        for name in (
            *("score", "normalised", "scale", "groups", "top_groups", "group_best"),
            *("balance_bias", "balance_rate", "capacity", "z_loss"),
        )
    ),
    _read_router,
    _write_router,
    sees=("num_experts", COUNT, KIND, TOP_K, f"{MOE}top_k", f"{MOE}balance"),
    carries=ROUTED,
    lossy="Megatron's expert weights sum to one, unless a softmax comes before the choice or only"
    " one expert is chosen; Megatron ranks a group of experts by its best top_k // group_topk"
    " experts; a balancing bias excludes the score function softmax",
    note=SCRIPT,
    source="moe/moe_utils.py: topk_routing_with_score_function; moe/router.py",
    model=True,
)


# Load-balancing loss


def _read_balance(values: Group, context: Context) -> Group:
    """Read the kind and the coefficient of the load-balancing loss. Of several losses, the first
    with a coefficient is read. Megatron divides the loss by the experts per token.
    """
    if not values.get("num_experts") or KIND not in values:
        return {}
    # Not strict: lists of different lengths are for TransformerConfig to refuse.
    pairs = list(
        zip(values_as_list(values, KIND), values_as_list(values, COEFFICIENT), strict=False)
    )
    kind, coefficient = next(
        (pair for pair in pairs if pair[1]), pairs[0] if pairs else (None, None)
    )
    top_k = values.get(TOP_K)
    share = max(0.0, coefficient) / top_k if coefficient is not None and top_k else None
    return {f"{MOE}balance": BALANCE.get(str(kind)), f"{MOE}aux_loss": share}


def _write_balance(values: Group, context: Context) -> Group:
    if not values.get(COUNT):
        return {}
    # 2 is Megatron's default of moe_router_topk.
    share, top_k = values.get(f"{MOE}aux_loss"), values.get(f"{MOE}top_k") or 2
    if values.get(f"{MOE}balance") == "sinkhorn":
        # It has no loss, and Megatron stops if there is a coefficient.
        share = 0.0
    coefficient = (
        None if share is None else undone(share * top_k, lambda number: number / top_k, share)
    )
    kind = LOSSES.get(values.get(f"{MOE}balance") or "")
    # Since 0.14.0 both may be lists; a list of one is read as its element, so plain values fit
    # every release.
    return {KIND: kind, COEFFICIENT: coefficient}


def _several(values: Group) -> bool:
    """Whether a plan cannot express the load balancing.

    That is the case for several losses, for a negative coefficient, and for balancing without a
    loss.
    """
    return bool(values.get("num_experts")) and (
        sum(bool(number) for number in values_as_list(values, COEFFICIENT)) > 1
        or any(number is not None and number < 0 for number in values_as_list(values, COEFFICIENT))
        or "quantile_balancing" in values_as_list(values, KIND)
    )


BALANCED = convert(
    (KIND, COEFFICIENT),
    (f"{MOE}balance", f"{MOE}aux_loss"),
    _read_balance,
    _write_balance,
    sees=("num_experts", TOP_K, COUNT, f"{MOE}top_k"),
    blurs=_several,
    carries={KIND: f"{MOE}balance", COEFFICIENT: f"{MOE}aux_loss"},
    lossy="Megatron divides the load-balancing loss by the number of experts per token;"
    " stagebridge does not translate several losses",
    reasons={
        f"{MOE}balance": (
            "Megatron adds a load-balancing loss in every block, Hugging Face's code adds one "
            "loss for all blocks together; with the same coefficient, Megatron's loss is larger "
            "by about the number of blocks with experts"
        )
    },
    note=SCRIPT,
    source="moe/moe_utils.py: switch_load_balancing_loss_func; moe/router.py: get_aux_loss_coeff",
    model=True,
)

BALANCED_ALWAYS = convert(
    (),
    f"{MOE}aux_trained",
    lambda values, context: (
        {f"{MOE}aux_trained": True} if _read_balance(values, context).get(f"{MOE}aux_loss") else {}
    ),
    nothing,
    sees=("num_experts", KIND, COEFFICIENT, TOP_K),
    note="Megatron trains the load-balancing loss whenever its coefficient is set",
    source="moe/router.py: is_aux_loss_enabled",
    model=True,
)

RULES = (SIZES, ROUTER, BALANCED, BALANCED_ALWAYS)
