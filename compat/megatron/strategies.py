"""Hypothesis strategies for Megatron: whole valid configs, and single values that a release accepts."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from bridge.stack.dialect import Config
from bridge.testing.strategies import Group, StrategyCase, StrategyPart, words
from compat.megatron import options, releases, stages
from compat.megatron.arguments.sizes import DIVISORS
from compat.megatron.formats import UNWRAPPED, flag_lines
from compat.megatron.objects.fields import PARALLEL, TRANSFORMER, defaults
from compat.megatron.releases import Flag

Groups = SearchStrategy[Group]

FLAGS = "flags"
# Flags more often than config objects: most users have a launch script.
ENTRIES = (FLAGS,) * 6 + (PARALLEL, TRANSFORMER, TRANSFORMER)
AXES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
TENSOR, PIPELINE, CONTEXT = AXES
TRUE = st.just(True)
SMALL = st.integers(1, 8)
# Microbatches of a step; 0 leaves the global batch size open.
STEPS = st.sampled_from((0, 1, 0, 2, 3, 4, 0, 8, 12))
RATE = st.floats(1e-6, 1e-2)
POWER = st.integers(1, 20).map(lambda power: 2.0**power)
SHAPES = ("constant", "linear", "cosine", "inverse-square-root")
"""Names of schedules without further required settings; WSD needs the length of its decay."""
DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, smallest first."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def _has(version: str, dest: str) -> bool:
    return dest in options.by_dest(version)


# The parts of a generated config are groups: settings that each release accepts together. `must`
# are always there, `may` are drawn.
def _draw_group(
    must: Mapping[str, SearchStrategy[Any]], may: Mapping[str, SearchStrategy[Any]] | None = None
) -> Groups:
    return st.fixed_dictionaries(dict(must), optional=dict(may or {}))


# Core

TEXT = "heterogeneous_layers_config_encoded_json"
HETEROGENEOUS = {
    "hidden_act": "silu",
    "num_hidden_layers": 840,
    "hidden_size": 64 * 840,
    "num_attention_heads": 840,
    "tie_word_embeddings": False,
    "rope_theta": 10000,
    "rope_scaling": {"factor": 8.0},
    "block_configs": [{"attention": {"n_heads_in_group": 1}}],
}
"""A heterogeneous model. Its sizes are multiples of every number of stages and of tensor ranks that the strategies draw."""
DESCRIBED = {
    TEXT: json.dumps(HETEROGENEOUS),
    "swiglu": True,
    "normalization": "RMSNorm",
    "group_query_attention": True,
    "use_rotary_position_embeddings": True,
    "position_embedding_type": "rope",
    "use_rope_scaling": True,
    "untie_embeddings_and_output_weights": True,
    "num_layers": 840,
    "hidden_size": 64 * 840,
    "num_attention_heads": 840,
    "num_query_groups": 840,
}
"""The heterogeneous model as a JSON text, and the settings that have to agree with this text."""
SELDOM = st.sampled_from((False,) * 19 + (True,))


@st.composite
def core(draw: DrawFn, case: StrategyCase) -> Sequence[Group]:
    """Draw a valid config: sizes and batch first, then groups of settings that fit them."""
    sizes = _draw_sizes(draw, case)
    has_text = draw(SELDOM) and case.entry == FLAGS and _has(case.version, TEXT)
    model = [
        *((DESCRIBED,) if has_text else ()),
        _draw_layers(draw, case, sizes[PIPELINE]),
        _draw_widths(draw, sizes),
        _draw_experts(draw, case, sizes),
    ]
    groups = [*model, *(draw(choice(case.version)) for choice in CHOICES)]
    if case.entry != FLAGS:
        return [_fields(sizes, case), *(_fields(group, case) for group in groups)]
    return [{**sizes, **_draw_batch(draw, case, sizes)}, *groups]


def _draw_sizes(draw: DrawFn, case: StrategyCase) -> dict[str, int]:
    ranks, sizes = case.world_size or draw(st.sampled_from((1, 2, 4, 8, 16))), {}
    # Each axis takes a divisor of the ranks that are left. In a drawn order, so that none always
    # comes first.
    for axis in draw(st.permutations(AXES)):
        sizes[axis] = draw(st.sampled_from([size for size in divisors(ranks) if size <= 8]))
        ranks //= sizes[axis]
    return sizes


def _fields(group: Group, case: StrategyCase) -> Group:
    """Return the settings of `group` that a config class has as fields. If there is a pipeline,
    `pipeline_dtype` is added.
    """
    own = {
        path: value
        for path, value in group.items()
        if path in _names_by_argument(case.version, case.entry)
    }
    # The class has the result of the flag as a field.
    if "num_virtual_stages_per_pipeline_rank" in group:
        own["virtual_pipeline_model_parallel_size"] = group["num_virtual_stages_per_pipeline_rank"]
    has_pipeline = own.get(PIPELINE, 1) > 1
    return {**own, "pipeline_dtype": "torch.bfloat16"} if has_pipeline else own


def _draw_batch(draw: DrawFn, case: StrategyCase, sizes: Mapping[str, int]) -> Group:
    # A global batch is a multiple of micro x data-parallel size, or Megatron refuses it.
    ranks = sizes[TENSOR] * sizes[PIPELINE] * sizes[CONTEXT]
    micro, steps = draw(SMALL), draw(STEPS)
    data = (case.world_size or ranks) // ranks
    return {
        "micro_batch_size": micro,
        **({"global_batch_size": micro * steps * data} if steps else {}),
    }


def _draw_widths(draw: DrawFn, sizes: Mapping[str, int]) -> Group:
    """Draw sizes of the model: widths that fit the tensor ranks and lengths that fit the context
    ranks, or no sizes.
    """
    if draw(st.booleans()):
        return {}
    heads = draw(SMALL) * sizes[TENSOR]
    # Each context rank holds two chunks of the sequence, hence the factor 2.
    length = 2 * sizes[CONTEXT] * draw(st.integers(1, 64))
    shape = {"hidden_size": 64 * heads, "num_attention_heads": heads}
    groups = (
        {"group_query_attention": True, "num_query_groups": heads} if draw(st.booleans()) else {}
    )
    return {**shape, **groups, "seq_length": length, "max_position_embeddings": 2 * length}


# Layers over stages


def _draw_layers(draw: DrawFn, case: StrategyCase, ranks: int) -> Group:
    """Draw a number of layers, and a way to spread them over stages that the release has."""
    counts = [draw(st.integers(1, 4)) for _ in ("virtual", "each", "first", "last")]
    since = [form for form, dest in SINCE.items() if _has(case.version, dest)]
    # Virtual stages twice: they are what most launches of several stages have.
    forms = ["open", "encoder", "even", "virtual", "virtual", "per_stage", *since]
    single_stage = ("open", "encoder", "even", "ends", "hybrid")
    return FORMS[
        draw(st.sampled_from([form for form in forms if ranks > 1 or form in single_stage]))
    ](ranks, *counts)


SINCE = {
    "ends": "account_for_loss_in_pipeline_split",
    "uneven": "decoder_first_pipeline_num_layers",
    "layout": "pipeline_model_parallel_layout",
    "hybrid": "hybrid_layer_pattern",
}
"""Ways to spread layers over stages that only some releases have, each with a flag that exists
exactly in these releases.
"""


def _draw_ends(ranks: int, virtual: int, each: int, first: int, last: int) -> Group:
    """Draw settings with which embedding, loss or both count as layers."""
    embedding, loss = first > 1, last > 1
    ends = {
        "account_for_embedding_in_pipeline_split": embedding,
        "account_for_loss_in_pipeline_split": loss,
    }
    # With the layers that the ends count as, each stage has `each + 1`.
    layers = ranks * (each + 1) - int(embedding) - int(loss)
    if layers <= 0:
        return {"num_layers": 1}
    return {"num_layers": layers, **{path: True for path, on in ends.items() if on}}


def _draw_uneven(ranks: int, virtual: int, each: int, first: int, last: int) -> Group:
    """Draw numbers of layers for the first and last rank; virtual stages divide these numbers."""
    own = {
        "decoder_first_pipeline_num_layers": virtual * first,
        "decoder_last_pipeline_num_layers": virtual * last,
    }
    own = dict(list(own.items())[: ranks - 1])  # at least one rank is left for the rest
    virtual_stages = {"num_virtual_stages_per_pipeline_rank": virtual} if virtual > 1 else {}
    return {
        "num_layers": sum(own.values()) + virtual * each * (ranks - len(own)),
        **own,
        **virtual_stages,
    }


def _draw_layout(ranks: int, virtual: int, each: int, first: int, last: int) -> Group:
    counts = (first, *[each] * (ranks * virtual - 2), last)
    return {"num_layers": sum(counts), "pipeline_model_parallel_layout": stages.layout_of(counts)}


# Ways to spread layers, each a function of the pipeline ranks, the virtual stages of a rank, the
# layers of a stage, and those of the first and the last one.
FORMS: Mapping[str, Callable[[int, int, int, int, int], Group]] = {
    "open": lambda ranks, virtual, each, first, last: {},
    "encoder": lambda ranks, virtual, each, first, last: {
        "encoder_num_layers": ranks * virtual * each
    },
    "even": lambda ranks, virtual, each, first, last: {"num_layers": ranks * virtual * each},
    "virtual": lambda ranks, virtual, each, first, last: {
        "num_layers": ranks * virtual * each,
        "num_virtual_stages_per_pipeline_rank": virtual,
    },
    "per_stage": lambda ranks, virtual, each, first, last: {
        "num_layers": ranks * virtual * each,
        "num_layers_per_virtual_pipeline_stage": each,
    },
    "ends": _draw_ends,
    "uneven": _draw_uneven,
    "layout": _draw_layout,
    # One letter for each layer, and a bar between stages.
    "hybrid": lambda ranks, virtual, each, first, last: {
        "hybrid_layer_pattern": "|".join(
            ["M*-M"[:first] * each] * (ranks * virtual if ranks > 1 else 1)
        )
    },
}


# Choices


@cache
def _draw_precision(version: str) -> Groups:
    scales = {
        "loss_scale": POWER,
        "initial_loss_scale": POWER,
        "min_loss_scale": st.floats(0.5, 4),
        "loss_scale_window": st.integers(1, 2000).map(float),
        "hysteresis": SMALL,
    }
    half = {"accumulate_allreduce_grads_in_fp32": TRUE}
    return st.one_of(
        _draw_group({"bf16": TRUE}, {"grad_reduce_in_bf16": TRUE}),
        _draw_group({"bf16": TRUE}, {"loss_scale": POWER, **half}),
        _draw_group({"fp16": TRUE}, {**scales, **half}),
        st.just({}),
    )


@cache
def _draw_sharding(version: str) -> Groups:
    """Draw a sharded optimizer of the release, with the settings that it requires."""
    overlap = {"overlap_grad_reduce": TRUE, "ddp_bucket_size": st.integers(1, 10**9)}
    gather = {"overlap_param_gather": TRUE, "overlap_grad_reduce": TRUE}
    optimizer = {"use_distributed_optimizer": TRUE}
    strategy = {
        "data_parallel_sharding_strategy": st.sampled_from(
            ("no_shard", "optim", "optim_grads", "optim_grads_params")
        )
    }
    stepwise = {"overlap_param_gather_with_optimizer_step": TRUE, "ckpt_format": st.just("torch")}
    fusion = {"gradient_accumulation_fusion": st.just(False)}
    megatron = {"use_megatron_fsdp": TRUE, "ckpt_format": st.just("fsdp_dtensor")}
    torch = {
        "use_torch_fsdp2": TRUE,
        "untie_embeddings_and_output_weights": TRUE,
        "ckpt_format": st.just("torch_dist"),
    }
    kinds = [
        _draw_group({}, overlap),
        _draw_group(optimizer, {**overlap, "num_distributed_optimizer_instances": st.just(2)}),
        _draw_group({**optimizer, **gather, **stepwise}),
        _draw_group({**optimizer, **gather}, {"ddp_bucket_size": overlap["ddp_bucket_size"]}),
    ]
    if _has(version, "use_megatron_fsdp"):
        kinds.append(_draw_group({**optimizer, **megatron, **strategy}, fusion))
    elif _has(version, "use_custom_fsdp"):
        kinds.append(_draw_group({**optimizer, **strategy, **fusion, "use_custom_fsdp": TRUE}))
    if _has(version, "use_torch_fsdp2"):
        kinds.append(
            _draw_group({**torch, **fusion}, {"torch_fsdp2_reshard_after_forward": st.just(False)})
        )
    return st.one_of(kinds)


@cache
def _draw_recompute(version: str) -> Groups:
    full = {
        "recompute_granularity": st.just("full"),
        "recompute_method": st.sampled_from(("uniform", "block")),
    }
    return st.one_of(
        st.just({}),
        _draw_group({"recompute_granularity": st.just("selective")}),
        _draw_group({"recompute_activations": TRUE}),
        _draw_group(
            {**full, "recompute_num_layers": SMALL}, {"distribute_saved_activations": TRUE}
        ),
    )


def _draw_experts(draw: DrawFn, case: StrategyCase, sizes: Mapping[str, int]) -> Group:
    """Draw experts and expert parallelism, which in some releases requires sequence parallelism."""
    # 0 twice: most models have no experts. The expert grid has as many stages as the model's.
    size = draw(st.sampled_from([0, 0, *divisors((case.world_size or 8) // sizes[PIPELINE])[:4]]))
    together = {"sequence_parallel": True} if sizes[TENSOR] > 1 else {}
    experts = (
        {**together, "num_experts": size * draw(SMALL), "expert_model_parallel_size": size}
        if size
        else {}
    )
    no_bias: bool = draw(st.booleans())
    return {**experts, "add_bias_linear": False} if experts and no_bias else experts


@cache
def _draw_optimizer(version: str) -> Groups:
    adam = {
        "adam_beta1": st.floats(0, 0.99),
        "adam_beta2": st.floats(0, 0.999),
        "adam_eps": st.floats(0, 1e-3),
    }
    names = [
        name
        for flag in options.by_dest(version)["optimizer"]
        for name in flag.choices
        if name not in ("adam", "sgd")
    ]
    others = [_draw_group({"optimizer": st.sampled_from(names)})] if names else []
    sgd = _draw_group({"optimizer": st.just("sgd")}, {"sgd_momentum": st.floats(0, 0.99), **adam})
    rest = _draw_group({}, {"weight_decay": st.floats(0, 1), "clip_grad": st.floats(0, 10)})
    return st.builds(
        lambda own, more: {**own, **more}, st.one_of(_draw_group({}, adam), sgd, *others), rest
    )


@cache
def _draw_schedule(version: str) -> Groups:
    """Draw a learning rate and a schedule, counted in iterations or in samples."""
    # min_lr lies below every rate that is drawn, since Megatron refuses one above it.
    common = {"lr": RATE, "min_lr": st.floats(0, 1e-6), "lr_decay_style": st.sampled_from(SHAPES)}
    warmup, count = {"lr_warmup_init": st.floats(0, 1e-6)}, st.integers(1, 10**6)
    styles = next(flag.choices for flag in options.by_dest(version)["lr_wsd_decay_style"])
    choices: list[Groups] = []
    for unit in ("iters", "samples"):  # a launch counts everything in one of them
        train, decay = {f"train_{unit}": count}, {**common, f"lr_decay_{unit}": count}
        # The warmup is a fraction of the decay or a length, never both.
        choices.append(_draw_group({**train, "lr_warmup_fraction": st.floats(0, 1)}, decay))
        choices.append(
            _draw_group(train, {**decay, **warmup, f"lr_warmup_{unit}": st.integers(1, 100)})
        )
    for unit in ("iters", "samples"):
        length = {
            f"train_{unit}": st.integers(100, 10**6),
            f"lr_wsd_decay_{unit}": st.integers(0, 100),
        }
        rest = {
            "lr": RATE,
            "min_lr": common["min_lr"],
            "lr_wsd_decay_style": st.sampled_from(styles),
        }
        choices.append(_draw_group({"lr_decay_style": st.just("WSD"), **length}, rest))
    return st.one_of(choices)


@cache
def _draw_offload(version: str) -> Groups:
    aware = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}
    cpu = _draw_group(
        {"optimizer_cpu_offload": TRUE}, {"optimizer_offload_fraction": st.floats(0, 1)}
    )
    dtypes = _draw_group({}, {"main_params_dtype": st.sampled_from(("fp32", "fp16"))})
    return st.just({}) | st.just({}) | (cpu | dtypes).map(lambda group: {**aware, **group})


def _same(groups: Groups) -> Callable[[str], Groups]:
    """Return a function that returns the same `groups` for every release."""
    return lambda version: groups


# The model


FREQUENCY = st.integers(2, 4)
STRETCH = st.floats(1, 64, exclude_min=True)
TRUTH = st.lists(st.integers(0, 1), min_size=2, max_size=8)


@cache
def _draw_positions(version: str) -> Groups:
    """Draw a kind of positions and a scaling of rotary positions; latent attention has another scaling."""
    rope = {"position_embedding_type": st.just("rope")}
    rotary = {
        "rotary_base": st.integers(1000, 10**6),
        "rotary_percent": st.floats(0.25, 1),
        "no_rope_freq": FREQUENCY,
    }
    weights = {"mscale": st.floats(0, 2), "mscale_all_dim": st.floats(0, 2)}
    bounds = {
        "yarn_beta_fast": STRETCH,
        "yarn_beta_slow": STRETCH,
        "yarn_original_max_position_embeddings": COUNT,
    }
    rounding = {"yarn_correction_range_round_to_int": st.booleans()}
    yarn = {"position_embedding_type": st.just("yarn"), "rotary_scaling_factor": STRETCH}
    ranks = {
        "q_lora_rank": SMALL,
        "kv_lora_rank": SMALL,
        **dict.fromkeys(("qk_head_dim", "qk_pos_emb_head_dim"), SMALL),
    }
    latent = {**rope, "multi_latent_attention": TRUE, "apply_rope_fusion": st.just(False)}
    return st.one_of(
        _draw_group({"position_embedding_type": st.sampled_from(("none", "learned_absolute"))}),
        _draw_group(rope, rotary),
        _draw_group(
            {**rope, "rotary_interleaved": TRUE, "apply_rope_fusion": st.just(False)}, rotary
        ),
        _draw_group({**rope, "use_rope_scaling": TRUE}, {**rotary, "rope_scaling_factor": STRETCH}),
        _draw_group({**rope, "rotary_seq_len_interpolation_factor": SMALL}, rotary),
        _draw_group(yarn, {**rotary, **weights, **bounds, **rounding}),
        _draw_group(
            latent,
            {
                **ranks,
                **weights,
                "v_head_dim": SMALL,
                "qk_layernorm": TRUE,
                "rotary_scaling_factor": STRETCH,
            },
        ),
    )


@cache
def _draw_block(version: str) -> Groups:
    """Draw the settings of a block: feed-forward layer, norms, biases, heads and window."""
    no_bias = {"add_bias_linear": st.just(False)}
    norms = {
        "normalization": st.just("RMSNorm"),
        **dict.fromkeys(("norm_epsilon", "layernorm_epsilon"), st.floats(0, 1e-2)),
    }
    heads = {
        "kv_channels": st.integers(1, 64),
        "qk_layernorm": TRUE,
        "softmax_type": st.sampled_from(("learnable", "off-by-one")),
    }
    clamp = {"activation_func_clamp_value": STRETCH, "softmax_scale": st.floats(0.01, 1)}
    mlp = st.one_of(
        _draw_group({"swiglu": TRUE}, no_bias),
        _draw_group({"squared_relu": TRUE, "bias_gelu_fusion": st.just(False)}, no_bias),
        _draw_group({"quick_geglu": TRUE}, {**clamp, "glu_linear_offset": st.floats(-2, 2)}),
        _draw_group({"bias_gelu_fusion": st.just(False)}),
    )
    window = _draw_group(
        {"window_size": st.integers(0, 64).map(lambda before: [before, 0])},
        {"window_attn_skip_freq": FREQUENCY | TRUTH},
    )
    rest = _draw_group(
        {},
        {
            **norms,
            **heads,
            **clamp,
            "fp32_residual_connection": TRUE,
            "mtp_num_layers": st.integers(1, 3),
        },
    )
    return st.builds(
        lambda *groups: {name: value for group in groups for name, value in group.items()},
        mlp,
        window,
        rest,
    )


@cache
def _draw_router(version: str) -> Groups:
    """Draw routing, weighting and load balancing, which take effect only with experts."""
    shared = {"moe_shared_expert_intermediate_size": SMALL, "moe_shared_expert_gate": TRUE}
    scaling = {
        "moe_router_topk": SMALL,
        "moe_router_topk_scaling_factor": STRETCH,
        "moe_z_loss_coeff": SHARE,
    }
    balance = {
        "moe_router_load_balancing_type": st.sampled_from(("seq_aux_loss", "none")),
        "moe_aux_loss_coeff": SHARE,
    }
    bias = {"moe_router_score_function": st.just("sigmoid"), "moe_router_enable_expert_bias": TRUE}
    rest = {
        **shared,
        **scaling,
        **balance,
        "moe_layer_freq": FREQUENCY | TRUTH,
        "moe_router_dtype": st.just("fp32"),
    }
    return st.one_of(
        _draw_group({"moe_router_pre_softmax": TRUE}, rest),
        _draw_group(bias, {**rest, "moe_ffn_hidden_size": SMALL}),
    )


@cache
def _draw_rest(version: str) -> Groups:
    """Draw recomputed modules, formats of moments, a decoupled learning rate, or an fp8 recipe."""
    modules = st.lists(
        st.sampled_from(("core_attn", "mlp", "layernorm", "moe")),
        min_size=1,
        max_size=3,
        unique=True,
    )
    moments = {
        "exp_avg_dtype": st.sampled_from(("bf16", "fp16")),
        "exp_avg_sq_dtype": st.sampled_from(("bf16", "fp16")),
    }
    aware = {"use_precision_aware_optimizer": TRUE, "use_distributed_optimizer": TRUE}
    return st.one_of(
        _draw_group({"recompute_granularity": st.just("selective"), "recompute_modules": modules}),
        _draw_group(aware, moments),
        _draw_group({"lr": RATE, "decoupled_lr": RATE}, {"decoupled_min_lr": st.floats(0, 1e-6)}),
        _draw_group(
            {
                "fp8": st.just("hybrid"),
                "fp8_recipe": st.sampled_from(("tensorwise", "blockwise", "mxfp8")),
            }
        ),
        st.just({}),
    )


CHOICES = (
    _draw_precision,
    _same(st.sampled_from(({}, {"sequence_parallel": True}))),
    *(_draw_sharding, _draw_recompute, _draw_optimizer, _draw_schedule, _draw_offload),
    # What most launches leave alone is drawn less often.
    _same(st.just({}) | st.just({}) | _draw_group({"fp8": st.sampled_from(("e4m3", "hybrid"))})),
    _same(st.sampled_from(({}, {}, {"use_tp_pp_dp_mapping": True}))),
    *(_draw_positions, _draw_block, _draw_router, _draw_rest),
)


# Single fields


def paths(case: StrategyCase) -> Iterable[str]:
    """Return the arguments that a flag of the release, or a field of its config class, can set."""
    return settable(case.version, case.entry)


@cache
def settable(version: str, entry: str) -> tuple[str, ...]:
    """Return the names of fields that a config of the entry point `entry` can set to a plain value."""
    if entry == FLAGS:
        return tuple(
            dest for dest in options.by_dest(version) if dest not in UNSETTABLE and dest != "help"
        )
    return tuple(
        path
        for path, name in _names_by_argument(version, entry).items()
        if path in OWN or _of_field(version, name) is not None
    )


def opaque(case: StrategyCase) -> tuple[str, ...]:
    """Return the fields whose values are live objects."""
    return (
        ()
        if case.entry == FLAGS
        else tuple(_names_by_argument(case.version, case.entry).keys() - set(paths(case)))
    )


@cache
def _names_by_argument(version: str, cls: str) -> Mapping[str, str]:
    """Return the name of each field of a class, by the name of the field's argument."""
    return {options.RENAMED.get(name, name): name for name in defaults(version, cls)}


RESERVED = (
    "num_layers",
    "num_layers_per_virtual_pipeline_stage",
    "encoder_num_layers",
    "num_virtual_stages_per_pipeline_rank",
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "hybrid_layer_pattern",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_",
    TEXT,
)
"""Names of settings that have to fit the number of layers: they spread layers over stages, or describe each layer."""

REFUSED = "a removed option, which is still parsed and then always refused"
UNSETTABLE = {
    **dict.fromkeys(
        ("batch_size", "warmup", "model_parallel_size", "checkpoint_activations"), REFUSED
    ),
    "init_method_xavier_uniform": "a flag that sets a field which no class has",
    "data_parallel_size": (
        "a size without a flag, derived from the number of ranks and the other sizes"
    ),
}


def values(case: StrategyCase, path: str) -> SearchStrategy[Any] | None:
    """Return a strategy for one field by the type of its flag or class. None if the values are
    drawn from the type in the schema.
    """
    if path in DIVISORS or path in OWN:
        return OWN.get(path)
    if path == "cp_comm_type":
        return EXCHANGES.map(lambda kind: [kind]) if case.entry == FLAGS else EXCHANGES
    if case.entry != FLAGS:
        return _of_field(case.version, _names_by_argument(case.version, case.entry)[path])
    strategy = st.one_of([_of_flag(flag) for flag in options.by_dest(case.version)[path]])
    if path not in UNWRAPPED:
        return strategy
    # A list of one is read as its element, so the element is drawn.
    return strategy.map(
        lambda value: value[0] if isinstance(value, list) and len(value) == 1 else value
    )


EXCHANGES = st.sampled_from(("p2p", "a2a", "allgather", "a2a+p2p"))
COUNT = SMALL | st.integers(1, 10**6)
SHARE = st.floats(0, 1)
AMOUNT = st.floats(0, 1e3)
OWN: Mapping[str, SearchStrategy[Any]] = {
    **dict.fromkeys(
        ("vocab_size", "num_query_groups", "num_distributed_optimizer_instances", "hysteresis"),
        COUNT,
    ),
    "microbatch_group_size_per_vp_stage": SMALL,
    **dict.fromkeys(
        ("encoder_tensor_model_parallel_size", "encoder_pipeline_model_parallel_size"),
        st.just(1) | SMALL,
    ),
    "encoder_seq_length": st.integers(1, 16).map(lambda count: 48 * count),
    "lr_decay_style": st.sampled_from(SHAPES),
    **dict.fromkeys(
        ("train_iters", "train_samples", "lr_decay_iters", "lr_decay_samples", "ddp_bucket_size"),
        COUNT,
    ),
    "hidden_size": st.integers(1, 16).map(lambda count: 192 * count),
    **dict.fromkeys(("lr_warmup_iters", "lr_warmup_samples"), st.integers(0, 10**6)),
    "lr": RATE,
    **dict.fromkeys(("min_lr", "lr_warmup_init"), st.floats(0, 1e-6)),
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2", "sgd_momentum"), st.floats(0, 1, exclude_max=True)
    ),
    **dict.fromkeys(("adam_eps", "weight_decay", "clip_grad", "min_loss_scale"), AMOUNT),
    **dict.fromkeys(("loss_scale", "initial_loss_scale"), st.floats(0, 1e6, exclude_min=True)),
    **dict.fromkeys(("optimizer_offload_fraction", "lr_warmup_fraction"), SHARE),
    "ffn_hidden_size": st.integers(1, 16).map(lambda count: 96 * count),
    "loss_scale_window": COUNT.map(float),
    "fp8": st.sampled_from(("e4m3", "hybrid")),
    "recompute_granularity": st.sampled_from(("selective", "full")),
    "recompute_method": st.sampled_from(("uniform", "block")),
    "attention_backend": st.sampled_from(("flash", "fused", "unfused")),
    "activation_func": st.sampled_from(("silu", "quick_gelu", "relu")),
    "phase_transition_iterations": st.lists(
        st.integers(0, 10**6).map(str), min_size=1, max_size=3
    ).map(",".join),
    "moe_router_group_topk": st.just(1) | SMALL,
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "rotary_percent"), SHARE),
    **dict.fromkeys(("norm_epsilon", "layernorm_epsilon"), st.floats(0, 1e-2)),
    **dict.fromkeys(("init_method_std", "moe_z_loss_coeff", "moe_router_bias_update_rate"), SHARE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), st.floats(0, 2)),
    **dict.fromkeys(
        ("rope_scaling_factor", "rotary_scaling_factor", "yarn_beta_fast", "yarn_beta_slow"),
        st.floats(1, 64),
    ),
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "padded_vocab_size",
            "make_vocab_size_divisible_by",
            "rotary_base",
        ),
        COUNT,
    ),
    **dict.fromkeys(
        ("kv_channels", "moe_router_topk", "moe_router_num_groups", "moe_ffn_hidden_size"), COUNT
    ),
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), COUNT
    ),
    **dict.fromkeys(
        ("moe_shared_expert_intermediate_size", "yarn_original_max_position_embeddings"), COUNT
    ),
    "mtp_num_layers": st.integers(0, 3),
    "log_memory_interval": st.integers(1, 9).map(lambda count: 100 * count),
    # Divides the eval_global_batch_size that BESIDE sets, on any number of ranks that is drawn.
    "eval_micro_batch_size": SMALL,
    "gtp_remat_opt_in_modules": st.just(["moe_latent_proj"]),
}
"""Useful values of fields whose type also allows values that no run can use."""

SWITCHES = {"true": TRUE, "false": st.just(False), "switch": st.booleans()}
TEXTS: Mapping[str, SearchStrategy[Any]] = {
    "int": st.integers(0, 8) | st.integers(0, 64) | st.integers(-8, 10**6),
    "float": st.floats(0, 1, allow_subnormal=False) | st.floats(-8, 1e6, allow_subnormal=False),
    "bool": TRUE,
    "integers": st.lists(SMALL, min_size=2, max_size=2),
    "layers": SMALL | st.lists(st.integers(0, 1), min_size=2, max_size=8),
    "layers_spaced": SMALL | st.lists(st.integers(0, 1), min_size=2, max_size=8),
}


def _of_flag(flag: Flag) -> SearchStrategy[Any]:
    if flag.action != "store":
        return SWITCHES[flag.action]
    one = st.sampled_from(flag.choices) if flag.choices else TEXTS.get(flag.type, words())
    if flag.nargs is None:
        return one
    # `*` and `+`: one to three values.
    count = flag.nargs if isinstance(flag.nargs, int) else None
    return st.lists(one, min_size=count or 1, max_size=count or 3)


BASE: Mapping[str, SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int": TEXTS["int"],
    "float": TEXTS["float"],
    "str": words(),
    "torch.dtype": st.sampled_from(DTYPES),
}


@cache
def _of_field(version: str, name: str) -> SearchStrategy[Any] | None:
    """Return a strategy for a field of a class, by the text of the field's type. None for callables
    and live objects.
    """
    classes = (releases.fields(version, cls) for cls in (TRANSFORMER, PARALLEL))
    text = next(fields[name].type for fields in classes if name in fields)
    if literal := re.search(r"Literal(\[.*?\])", text):
        return st.sampled_from(ast.literal_eval(literal[1]))
    # The text of a callable names types too: Callable[[int], float].
    base = None if "Callable" in text else re.search(r"\b(bool|int|float|str|torch\.dtype)\b", text)
    if base is None:
        return None
    one = BASE[base[1]]
    return st.lists(one, min_size=2, max_size=2) if re.match(r"Optional\[(L|l)ist", text) else one


FP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
DECAY = {"start_weight_decay": 0.0, "end_weight_decay": 0.1, "weight_decay_incr_style": "linear"}
EXPERTS = {"num_experts": 8}
OVERLAPPED = {
    "transformer_impl": "transformer_engine",
    "overlap_moe_expert_parallel_comm": True,
    "bf16": True,
    **EXPERTS,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
}
REUSED = {
    **FP8,
    "fp8_param_gather": True,
    "use_distributed_optimizer": True,
    "overlap_param_gather": True,
    "overlap_grad_reduce": True,
}
UNTIED = {
    "untie_embeddings_and_output_weights": True,
    "ckpt_format": "torch_dist",
    "gradient_accumulation_fusion": False,
}
FLEX = {**EXPERTS, "moe_token_dispatcher_type": "flex"}
SERVED = {
    "transformer_impl": "inference_optimized",
    "normalization": "RMSNorm",
    "moe_router_dtype": "fp32",
    "add_bias_linear": False,
    "expert_tensor_parallel_size": 1,
}
FUSED = {
    **FLEX,
    "moe_flex_dispatcher_backend": "hybridep",
    "use_transformer_engine_op_fuser": True,
    "moe_grouped_gemm": True,
}
EIGHT_BITS = {**FUSED, "moe_flex_dispatcher_backend": "ncclep"}
FIM = dict.fromkeys(
    ("fim_prefix_token", "fim_middle_token", "fim_suffix_token", "fim_pad_token", "fim_eod_token"),
    "<fim>",
)
SAVE = {"save": "out", "save_interval": 100}
FLASH = {"attention_backend": "flash", "flash_attention_version": 3, "attention_dropout": 0.0}
LINEAR = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 8)
STEPWISE = {
    "use_distributed_optimizer": True,
    "overlap_param_gather": True,
    "overlap_grad_reduce": True,
    "ckpt_format": "torch",
}
LOCAL = {
    "non_persistent_ckpt_type": "local",
    "non_persistent_local_ckpt_dir": "out",
    "replication_jump": 2,
}
NARROW_FP4 = {"fp4": "e2m1", "use_distributed_optimizer": True}

BESIDE: Mapping[str, Group] = {
    "activation_func_fp8_input_store": {"activation_func": "silu", "gated_linear_unit": True},
    "add_position_embedding": {"position_embedding_type": "rope"},
    "add_qkv_bias": {"add_bias_linear": False},
    "align_param_gather": {},
    "cpu_offloading": {"cpu_offloading_num_layers": 1},
    "apply_rope_fusion": {"position_embedding_type": "rope"},
    "batch_invariant_mode": FLASH,
    "defer_embedding_wgrad_compute": {"gradient_accumulation_fusion": True},
    "delay_wgrad_compute": OVERLAPPED,
    "encoder_seq_length": {},
    "encoder_tensor_model_parallel_size": {"encoder_pipeline_model_parallel_size": 1},
    "end_weight_decay": DECAY,
    "ep_overlap_early_attn_memory_release": OVERLAPPED,
    "eval_micro_batch_size": {"eval_global_batch_size": 840 * 192},
    "experimental_attention_variant": {"linear_attention_freq": 2, **LINEAR},
    "fim_data": {**FIM, "fim_rate": 0.5, "fim_spm_rate": 0.5},
    "fine_grained_activation_offloading": {
        "offload_modules": ["core_attn"],
        "transformer_impl": "transformer_engine",
    },
    "fp16_lm_cross_entropy": {"fp16": True},
    "fp4_param": NARROW_FP4,
    "fp4_param_gather": NARROW_FP4,
    "fp8_output_proj": FP8,
    "fp8_param_gather": {"fp8": "e4m3", "use_distributed_optimizer": True},
    "fsdp_manual_registration": {
        "use_megatron_fsdp": True,
        "nccl_ub": True,
        "ckpt_format": "fsdp_dtensor",
    },
    "fused_residual_rmsnorm": {"normalization": "RMSNorm"},
    "hybrid_context_parallel": {"calculate_per_token_loss": True},
    "inference_cuda_graph_scope": {"cuda_graph_impl": "local"},
    "inference_disable_triton_nvls_kernels": SERVED,
    "inference_fuse_tp_communication": SERVED,
    "load_main_params_from_ckpt": {"no_load_optim": True},
    "logits_save_dir": {
        "logits_save_top_k": 8,
        "async_save": True,
        "use_persistent_ckpt_worker": True,
    },
    "mla_down_proj_fusion": {"multi_latent_attention": True},
    "moe_combine_bwd_dtype": EIGHT_BITS,
    "moe_dispatch_fwd_dtype": EIGHT_BITS,
    "moe_enable_deepep": FLEX,
    "moe_expert_rank_capacity_factor": FUSED,
    "moe_latent_size": EXPERTS,
    "moe_pad_expert_input_to_capacity": {
        **EXPERTS,
        "moe_expert_capacity_factor": 1.0,
        "moe_token_dispatcher_type": "alltoall",
    },
    "moe_paged_stash": {**FUSED, "moe_expert_rank_capacity_factor": 1.0},
    "moe_router_enable_expert_bias": {**EXPERTS, "moe_router_score_function": "sigmoid"},
    "moe_router_group_topk": {**EXPERTS, "moe_router_num_groups": 1},
    "moe_router_padding_for_fp8": {**EXPERTS, **FP8, "moe_token_dispatcher_type": "alltoall"},
    "moe_router_padding_for_quantization": {
        **EXPERTS,
        **FP8,
        "moe_token_dispatcher_type": "alltoall",
    },
    "moe_single_grouped_bias": {**EXPERTS, "moe_grouped_gemm": True, "add_bias_linear": True},
    "moe_single_grouped_weight": {
        **EXPERTS,
        **FP8,
        "moe_grouped_gemm": True,
        "use_transformer_engine_op_fuser": True,
    },
    "moe_use_upcycling": {**SAVE, **EXPERTS},
    "enable_cuda_graph": {},
    "mtp_num_layers": {},
    "overlap_p2p_comm_warmup_flush": {"batch_p2p_comm": False, "overlap_p2p_comm": True},
    "overlap_param_gather_with_optimizer_step": STEPWISE,
    # A multiple of every global batch size that is drawn: 840 and 27720 are the least common
    # multiples of 1 to 8 and of 1 to 12.
    "perform_rl_step": {"grpo_prompts_per_step": 840 * 27720 * 192},
    "replication": LOCAL,
    "retro_add_retriever": {"train_samples": 1000},
    "reuse_grad_buf_for_mxfp8_param_ag": REUSED,
    "save": SAVE,
    "squared_relu": {"bias_gelu_fusion": False},
    "start_weight_decay": DECAY,
    "step_batch_size_schedule": {},
    "use_legacy_models": {"ckpt_format": "torch"},
    "use_precision_aware_optimizer": {"use_distributed_optimizer": True},
    "use_torch_fsdp2": UNTIED,
    "weight_decay_incr_style": DECAY,
    "use_te_activation_func": {},
}
"""The settings that a field requires, at least in some releases."""


def source(config: Config) -> Group:
    """Return the flags, each with the list of its values. The value is True if a flag has none."""
    lines = (_line(config, path) for path in config.given)
    return {option: list(words) or True for option, *words in lines}


def spell_flag(config: Config, path: str) -> tuple[str, ...]:
    """Return the flag of a field, with a value attached by `=` if the flag has one."""
    return (_line(config, path)[0],)


def _line(config: Config, path: str) -> tuple[str, ...]:
    return flag_lines({path: config.given[path]}, config.version)[0]


def requirements_of(config: Config) -> Iterable[str]:
    """Return the given settings that full recomputation requires (transformer_config.py,
    `__post_init__`).
    """
    full = config.given.get("recompute_granularity") == "full"
    return [
        path
        for path in ("recompute_method", "recompute_num_layers")
        if full and path in config.given
    ]


PART = StrategyPart(
    core,
    paths,
    values,
    opaque,
    BESIDE,
    RESERVED,
    ENTRIES,
    source,
    spell_flag,
    requirements_of,
    "--made-up-flag",
    rounds=True,
    unsettable=UNSETTABLE,
)
