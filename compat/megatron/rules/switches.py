"""Rules for single settings, such as token dispatch, context exchange, FSDP buffers and fp8."""

from __future__ import annotations

from bridge.plan.equality import FACTORS
from bridge.stack.rules import EFFECTS, HABITS, Context, Effect, Group, always, convert
from bridge.stack.words import (
    among,
    beyond,
    effect_if,
    every,
    give,
    has_value,
    look_up,
    of,
    off,
    on,
)
from compat.megatron.exact_floats import undone
from compat.megatron.patterns import values_as_list
from compat.megatron.shards import SHARDED, aware, zero_stage

# Experts

EXPERTS = "model.experts"
DISPATCHERS = {"allgather": "all_gather", "alltoall": "all_to_all", "alltoall_seq": "all_to_all"}
DISPATCHER = "parallel.dispatcher"


def _read_dispatcher(values: Group, context: Context) -> Group:
    kind = values.get("moe_token_dispatcher_type")
    if kind is None or not values.get("num_experts"):
        return {}
    # moe_enable_deepep, the older switch, wins over the backend (TransformerConfig).
    hybrid = values.get("moe_flex_dispatcher_backend") == "hybridep" and not values.get(
        "moe_enable_deepep"
    )
    return {DISPATCHER: DISPATCHERS.get(kind) or ("hybridep" if hybrid else "deepep")}


def _write_dispatcher(values: Group, context: Context) -> Group:
    kind = values.get(DISPATCHER)
    # Before 0.12 Megatron refuses a capacity factor with any other dispatcher.
    if values.get("model.moe.capacity") and not context.since("0.12.0"):
        kind = "all_to_all"
    if not values.get(EXPERTS) or kind is None:
        return {}
    # alltoall_seq, a variant of 0.10 to 0.12, is never written.
    if kind in ("all_gather", "all_to_all"):
        return {"moe_token_dispatcher_type": kind.replace("_", "")}
    if context.since("0.16.0"):
        return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": kind}
    return (
        {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True} if kind == "deepep" else {}
    )


DISPATCH = convert(
    ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_enable_deepep"),
    DISPATCHER,
    _read_dispatcher,
    _write_dispatcher,
    effect=EFFECTS[DISPATCHER],
    sees=("num_experts", EXPERTS, "model.moe.capacity"),
    blurs=among("moe_flex_dispatcher_backend", "ncclep"),
    lossy="Megatron dispatches tokens only if the model has experts; it has DeepEP since 0.12 and HybridEP since 0.16;"
    " stagebridge does not translate NCCL-EP",
    source="transformer_config.py: moe_token_dispatcher_type, moe_flex_dispatcher_backend; moe/token_dispatcher.py",
)


ROUTERS = ("fp32", "fp64")


ROUTER = convert(
    "moe_router_dtype",
    "precision.router",
    give(
        "precision.router",
        of("moe_router_dtype"),
        every(on("num_experts"), among("moe_router_dtype", *ROUTERS)),
    ),
    give(
        "moe_router_dtype",
        of("precision.router"),
        every(on(EXPERTS), among("precision.router", *ROUTERS)),
    ),
    effect=EFFECTS["precision.router"],
    sees=("num_experts", EXPERTS),
    lossy="Megatron's router computes in the format of the model or, since 0.12, in fp32 or fp64",
    source="moe/moe_utils.py: router_gating_linear",
)


# Exchange of keys and values

EXCHANGES = {
    "p2p": "p2p",
    "a2a": "a2a",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "a2a+p2p": "a2a+p2p",
}
METHOD = "parallel.context_method"


EXCHANGE = convert(
    "cp_comm_type",
    METHOD,
    # On one context rank nothing is exchanged, and the type says nothing.
    lambda values, context: (
        {METHOD: EXCHANGES.get(str(values_as_list(values, "cp_comm_type")[0]))}
        if values_as_list(values, "cp_comm_type")[0] is not None
        and (values.get("context_parallel_size") or 1) > 1
        else {}
    ),
    lambda values, context: (
        {"cp_comm_type": [values[METHOD].replace("all_gather", "allgather")]}
        if values.get(METHOD) and (values.get("parallel.context") or 1) > 1
        else {}
    ),
    effect=EFFECTS[METHOD],
    sees=("context_parallel_size", "parallel.context"),
    blurs=lambda values: len(set(values_as_list(values, "cp_comm_type"))) > 1,
    lossy="stagebridge translates one communication type for all layers, not one for each layer",
    note="the exchange of keys and values between context-parallel ranks",
    source="transformer_config.py: cp_comm_type",
)


# Buffers of sharded data parallelism

BUFFERS = {
    "fsdp_double_buffer": "zero.double_buffer",
    "keep_fp8_transpose_cache": "zero.fp8_transposes",
    "keep_fp8_transpose_cache_when_using_custom_fsdp": "zero.fp8_transposes",
    "init_model_with_meta_device": "zero.meta_init",
    "nccl_ub": "zero.registered",
}


def _read_buffers(values: Group, context: Context) -> Group:
    """Read the registration of NCCL's buffers, and the buffers of Megatron-FSDP, which exist only
    if gradients are sharded.
    """
    registration = {"zero.registered": bool(values["nccl_ub"])} if "nccl_ub" in values else {}
    if zero_stage(values) < 2:
        return registration
    own = dict.fromkeys(BUFFERS.values(), False)
    for theirs, ours in BUFFERS.items():
        own[ours] |= bool(values.get(theirs))  # two names of one switch: either sets it
    return {**own, "zero.registered": registration.get("zero.registered")}


def _write_buffers(values: Group, context: Context) -> Group:
    """Write `nccl_ub`. If gradients are sharded, also write the settings of Megatron-FSDP's buffers,
    which exist since 0.12.
    """
    sharded = (values.get("zero.stage") or 0) >= 2 and context.since("0.12.0")
    names = [theirs for theirs, ours in BUFFERS.items() if values.get(ours)]
    return {theirs: True for theirs in names if theirs == "nccl_ub" or sharded}


BUFFERED = convert(
    tuple(BUFFERS),
    tuple(dict.fromkeys(BUFFERS.values())),
    _read_buffers,
    _write_buffers,
    effect=Effect.COST,
    sees=(*SHARDED, "zero.stage"),
    carries=BUFFERS,
    lossy="only Megatron-FSDP has these buffers, and only if it shards gradients",
    source="distributed_data_parallel_config.py; arguments.py: checks of Megatron-FSDP",
)


# fp8

RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")


def _read_recipe(values: Group, context: Context) -> Group:
    if not values.get("fp8"):
        return {}
    recipe = values.get("fp8_recipe")
    return {
        # Before 0.12 there is no argument, and the recipe is delayed scaling.
        "precision.fp8_recipe": recipe if recipe in RECIPES else "delayed",
        "precision.fp8_weights": bool(
            (values.get("fp8_param_gather") and zero_stage(values) >= 1) or values.get("fp8_param")
        ),
    }


def _write_recipe(values: Group, context: Context) -> Group:
    if not values.get("precision.fp8"):
        return {}
    gathers = values.get("precision.fp8_weights") and (values.get("zero.stage") or 0) >= 1
    return {
        "fp8_recipe": values.get("precision.fp8_recipe"),
        # The argument and the field of the class; a target takes the one that it has.
        **({"fp8_param_gather": True, "fp8_param": True} if gathers else {}),
    }


RECIPE = convert(
    ("fp8_recipe", "fp8_param_gather", "fp8_param"),
    ("precision.fp8_recipe", "precision.fp8_weights"),
    _read_recipe,
    _write_recipe,
    sees=("fp8", "precision.fp8", "zero.stage", *SHARDED),
    blurs=every(on("fp8"), among("fp8_recipe", "custom")),
    carries={
        "fp8_recipe": "precision.fp8_recipe",
        "fp8_param_gather": "precision.fp8_weights",
        "fp8_param": "precision.fp8_weights",
    },
    mixed=True,
    effect=effect_if(beyond("fp8_recipe", "delayed"), Effect.NUMBERS, Effect.ROUNDING),
    lossy="Megatron gathers weights in fp8 only if the optimizer is sharded; stagebridge does not translate a custom fp8 recipe",
    source="fp8_utils.py: get_fp8_recipe; arguments.py: --fp8-param-gather needs a sharded optimizer",
)


# Learning rates of embedding and output layer

LEAST = HABITS + "factored_minimum"


def _read_rates(values: Group, context: Context) -> Group:
    own, rate = values.get("decoupled_lr"), values.get("lr")
    # A plan has factors on the learning rate.
    return dict.fromkeys(FACTORS, own / rate) if own is not None and own >= 0 and rate else {}


def _write_rates(values: Group, context: Context) -> Group:
    factor, rate = values.get(FACTORS[0]), values.get("optimizer.lr")
    if factor is None or factor != values.get(FACTORS[1]) or not rate:
        return {}
    # The product, so that reading it back gives the plan's factor to the last bit.
    return {"decoupled_lr": undone(factor * rate, lambda number: number / rate, factor)}


def _read_minimum(values: Group, context: Context) -> Group:
    # Without a minimum of its own, a group of parameters has that of the schedule; of zero, both are zero.
    least, rate = values.get("min_lr"), values.get("decoupled_lr")
    own = least and rate and values.get(OWN) not in (None, least)
    return {LEAST: "scaled" if own else "shared"}


def _write_minimum(values: Group, context: Context) -> Group:
    least = values.get("optimizer.schedule.minimum")
    if not least or values.get(LEAST) == "shared" or not _write_rates(values, context):
        return {}
    return {OWN: values[FACTORS[0]] * least}


def _is_other_minimum(values: Group) -> bool:
    """Whether decoupled_min_lr differs from min_lr and from min_lr x decoupled_lr / lr, the only
    values that a plan can express.
    """
    own, rate, least = (values.get(name) for name in ("decoupled_lr", "lr", OWN))
    if own is None or not rate or least is None or values.get("lr_decay_style") == "constant":
        return False
    usual = values.get("min_lr") or 0.0
    # More than the rounding of two floats.
    return least != usual and bool(abs(least - usual * own / rate) > 1e-12 * own)


OWN = "decoupled_min_lr"
DECOUPLED = (
    convert(
        "decoupled_lr",
        FACTORS,
        _read_rates,
        _write_rates,
        sees=("lr", "optimizer.lr"),
        lossy="Megatron has one decoupled learning rate for embedding and output layer",
        source="core/optimizer/__init__.py: _get_param_groups, decoupled_lr",
    ),
    convert(
        OWN,
        LEAST,
        _read_minimum,
        _write_minimum,
        sees=(
            *("decoupled_lr", "lr", "min_lr", "lr_decay_style"),
            *("optimizer.lr", "optimizer.schedule.minimum", *FACTORS),
        ),
        blurs=_is_other_minimum,
        lossy="of minimums of Megatron's decoupled learning rate, stagebridge translates that of the rate, "
        "and one in the same proportion",
        note="the minimum of Megatron's decoupled learning rate is that of the rate, unless it is set",
        source="core/optimizer/__init__.py: get_standard_config_overrides, _get_param_groups",
    ),
)


# Modules that are recomputed

MODULES = {
    "core_attn": "attention",
    "layernorm": "norm",
    "mla_up_proj": "latent",
    "mlp": "mlp",
    "moe": "experts",
    "shared_experts": "shared_experts",
    "moe_act": "experts",
    "gdn_norm_out": "norm",
}
# Reversed, so that of two modules with one part the first is written: layernorm, moe.
PARTS = {ours: theirs for theirs, ours in reversed(MODULES.items())}
USUAL = ("attention",)


def _read_modules(values: Group, context: Context) -> Group:
    if values.get("recompute_granularity") != "selective":
        return {}
    names = values.get("recompute_modules") or ["core_attn"]
    parts = {MODULES[name] for name in names if name in MODULES}
    return {
        "recompute.modules": tuple(
            part for part in dict.fromkeys(MODULES.values()) if part in parts
        )
        or USUAL
    }


def _write_modules(values: Group, context: Context) -> Group:
    parts = values.get("recompute.modules")
    if values.get("recompute.granularity") != "selective" or not parts or tuple(parts) == USUAL:
        return {}
    names = [PARTS[part] for part in parts if part in PARTS]
    modules = [name for name in names if name != "shared_experts" or context.since("0.14.0")]
    return {"recompute_modules": modules} if modules else {}


RECOMPUTED = convert(
    "recompute_modules",
    "recompute.modules",
    _read_modules,
    _write_modules,
    effect=EFFECTS["recompute.modules"],
    sees=("recompute_granularity", "recompute.granularity"),
    blurs=lambda values: (
        not {"moe_act", "gdn_norm_out"}.isdisjoint(values.get("recompute_modules") or ())
    ),
    lossy="Megatron names recomputed modules since 0.12; stagebridge does not translate moe_act and gdn_norm_out",
    source="transformer_config.py: recompute_modules",
)


# Pinned host memory, torch.autocast, residual stream

PINS = ("pin_cpu_grads", "pin_cpu_params")


PINNED = convert(
    PINS,
    "zero.offload.pinned",
    # Both are true by default, and both matter only if the optimizer runs on the host.
    lambda values, context: (
        {"zero.offload.pinned": all(values[name] for name in PINS if values.get(name) is not None)}
        if any(values.get(name) is not None for name in PINS)
        and values.get("optimizer_cpu_offload")
        and aware(values)
        else {}
    ),
    give(dict.fromkeys(PINS, False), when=off("zero.offload.pinned")),
    effect=Effect.COST,
    sees=("optimizer_cpu_offload", "use_precision_aware_optimizer", "optimizer", *SHARDED),
    blurs=lambda values: values.get("pin_cpu_grads") != values.get("pin_cpu_params"),
    lossy="Megatron has one switch that pins host memory for gradients and another for weights; "
    "stagebridge translates one switch for both",
    source="optimizer/cpu_offloading/hybrid_optimizer.py",
)
FORMATS = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float64": "fp64",
}
TORCH = {ours: theirs for theirs, ours in FORMATS.items()}
AUTOCAST = convert(
    ("enable_autocast", "autocast_dtype"),
    "precision.autocast",
    lambda values, context: (
        {"precision.autocast": FORMATS.get(str(values.get("autocast_dtype")))}
        if values.get("enable_autocast")
        else {}
    ),
    give(
        {"enable_autocast": True, "autocast_dtype": look_up(TORCH, "precision.autocast")},
        when=among("precision.autocast", *TORCH),
    ),
    lossy="Megatron has autocast only in its config class, not as a flag",
    note="torch.autocast inside Megatron's layers",
    source="model_parallel_config.py: enable_autocast, autocast_dtype",
)


RESIDUAL = convert(
    "fp32_residual_connection",
    "precision.residual",
    give("precision.residual", "fp32", on("fp32_residual_connection")),
    give(
        "fp32_residual_connection",
        True,
        every(among("precision.residual", "fp32"), among("precision.compute", "bf16", "fp16")),
    ),
    effect=EFFECTS["precision.residual"],
    sees=("precision.compute",),
    lossy="Megatron keeps the residual stream in the format of the model, or in fp32",
    source="arguments.py: fp32_residual_connection needs fp16 or bf16",
)

RULES = (
    DISPATCH,
    ROUTER,
    EXCHANGE,
    BUFFERED,
    RECIPE,
    *DECOUPLED,
    RECOMPUTED,
    PINNED,
    AUTOCAST,
    RESIDUAL,
    convert(
        "ddp_average_in_collective",
        "zero.average_in_collective",
        give(
            "zero.average_in_collective",
            on("ddp_average_in_collective"),
            has_value("ddp_average_in_collective"),
        ),
        give("ddp_average_in_collective", True, on("zero.average_in_collective")),
        effect=EFFECTS["zero.average_in_collective"],
        note="the point at which gradients are divided: before they are summed, or in the collective",
        source="distributed_data_parallel.py: average_in_collective",
    ),
    always(
        "parallel.vocabulary",
        True,
        "Megatron always splits the vocabulary over tensor ranks",
        Effect.COST,
    ),
)
