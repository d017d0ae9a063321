"""The table between Megatron's arguments of the model and the plan's fields: sizes, biases, feed-forward
layer, norms and embedding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bridge.stack.rules import EFFECTS, Context, Effect, Group, Rule, always, convert, rename
from bridge.stack.words import (
    above,
    among,
    beyond,
    effect_if,
    either,
    every,
    first,
    give,
    has_value,
    no,
    nonzero,
    of,
    off,
    on,
    some,
)
from compat.megatron.rules import (
    attention as attention_rules,
    experts as expert_rules,
    rotary as rotary_rules,
)

SCRIPT = "the model is defined by the training script"
TENSOR = "tensor_model_parallel_size"
USUAL = 128
"""Default of `make_vocab_size_divisible_by`."""
KIND = "model.embedding.positions"


def fact(theirs: str, ours: str, source: str = "") -> Rule:
    """Return a rule for a fact about the model. `theirs` is the name of the argument, and `ours`
    the plan field.
    """
    return replace(rename(theirs, ours, note=SCRIPT, source=source), model=True)


# Sizes


def _write_groups(values: Group, context: Context) -> Group:
    groups = values.get("model.kv_heads")
    if not groups or values.get("model.attention.latent.kv_rank"):
        return {}
    return {"group_query_attention": True, "num_query_groups": groups}


GROUPS = convert(
    ("group_query_attention", "num_query_groups"),
    "model.kv_heads",
    # Without --group-query-attention there are as many key and value heads as attention heads.
    give(
        "model.kv_heads",
        either(
            every(on("group_query_attention"), no(on("multi_latent_attention"))),
            of("num_query_groups"),
            of("num_attention_heads"),
        ),
    ),
    _write_groups,
    sees=("num_attention_heads", "multi_latent_attention", "model.attention.latent.kv_rank"),
    lossy="num_query_groups takes effect only with --group-query-attention; latent attention has no query groups",
    note=SCRIPT,
    source="arguments.py: num_query_groups takes effect only with --group-query-attention",
    model=True,
)


# Vocabulary


def pad_vocabulary(vocab: int, multiple: int) -> int:
    """Return the number of rows of a padded embedding: `vocab` rounded up to a multiple of
    `multiple`.
    """
    # Floor division of the negative number rounds up.
    return -(-vocab // multiple) * multiple


def _read_padded(values: Group, context: Context) -> Group:
    if rows := values.get("padded_vocab_size"):
        return {"model.embedding.padded_vocab": rows}
    words, divisor = values.get("vocab_size"), values.get("make_vocab_size_divisible_by") or 0
    if not words or divisor < 1:
        return {}
    # A NullTokenizer added one word to --vocab-size before 0.18; that of images,
    # NullMultimodalTokenizer, still does.
    tokenizer = str(values.get("tokenizer_type"))
    if tokenizer.startswith("Null") and not (
        tokenizer == "NullTokenizer" and context.since("0.18.0")
    ):
        words += 1
    # Each tensor rank holds equally many rows, and each share is a multiple of the divisor.
    return {
        "model.embedding.padded_vocab": pad_vocabulary(words, divisor * (values.get(TENSOR) or 1))
    }


def _write_padded(values: Group, context: Context) -> Group:
    """Return the argument with which Megatron pads the vocabulary to the number of rows in the plan.

    If a divisor fits, the argument is this divisor: the default, a smaller power of two, or the
    number of rows on one tensor rank, in this order. If no divisor fits, or if the size of the
    vocabulary is not known, the argument is the number of rows itself.
    """
    vocab, ranks = values.get("model.vocab"), values.get("parallel.tensor") or 1
    rows = values.get("model.embedding.padded_vocab") or vocab
    if rows is None:
        return {}
    if not vocab:
        return {"padded_vocab_size": rows}
    divisors = [*(USUAL >> power for power in range(8)), rows // ranks]  # 128, 64, ... 1
    divisor = next(
        (size for size in divisors if size and pad_vocabulary(vocab, size * ranks) == rows), None
    )
    return {"make_vocab_size_divisible_by": divisor} if divisor else {"padded_vocab_size": rows}


VOCABULARY = convert(
    ("make_vocab_size_divisible_by", "padded_vocab_size"),
    "model.embedding.padded_vocab",
    _read_padded,
    _write_padded,
    sees=("vocab_size", "tokenizer_type", TENSOR, "model.vocab", "parallel.tensor"),
    blurs=every(no(on("vocab_size")), no(among("make_vocab_size_divisible_by", USUAL))),
    lossy="Megatron pads the vocabulary to a multiple of make_vocab_size_divisible_by x tensor parallel size",
    note="rows of the embedding, padding included",
    source="tokenizer.py: _vocab_size_with_padding, since 0.19 vocab_utils.py; tokenizers/text/libraries/null_tokenizer.py",
    model=True,
)


# Biases


LINEAR = ("model.attention.output_bias", "model.mlp.bias")
QKV, ROUTER = "model.attention.qkv_bias", "model.moe.router_bias"


def _read_biases(values: Group, context: Context) -> Group:
    """Read which linear layers have biases: all, none, or only the projections to queries, keys and
    values. In latent attention these projections never have biases.
    """
    if "add_bias_linear" not in values:
        return {}
    linear = bool(values["add_bias_linear"])
    return {
        **dict.fromkeys(LINEAR, linear),
        QKV: not values.get("multi_latent_attention")
        and (linear or bool(values.get("add_qkv_bias"))),
        # Since 0.15 the router has a bias exactly if the linear layers have.
        ROUTER: linear and context.since("0.15.0") if values.get("num_experts") else None,
    }


def _write_biases(values: Group, context: Context) -> Group:
    biases = [values[path] for path in LINEAR if values.get(path) is not None]
    linear = all(biases) if biases else None
    if values.get("model.experts") is not None and not _experts_have_biases(values, context):
        linear = False
    # add_qkv_bias says nothing beside add_bias_linear, which sets it.
    alone = values.get(QKV) and linear is False and not values.get("model.attention.latent.kv_rank")
    return {"add_bias_linear": linear, **({"add_qkv_bias": True} if alone else {})}


def _experts_have_biases(values: Group, context: Context) -> bool:
    """Whether Megatron's experts can have biases."""
    # TransformerConfig refuses them from 0.12.1 to before 0.15, and since then on several tensor
    # ranks of experts.
    tensor = values.get("parallel.expert_tensor") or values.get("parallel.tensor") or 1
    return not context.since("0.12.1") or (tensor == 1 and context.since("0.15.0"))


BIASES = convert(
    ("add_bias_linear", "add_qkv_bias"),
    (*LINEAR, QKV, ROUTER),
    _read_biases,
    _write_biases,
    sees=(
        *(
            "multi_latent_attention",
            "num_experts",
            "model.experts",
            "model.attention.latent.kv_rank",
        ),
        *("parallel.expert_tensor", "parallel.tensor"),
    ),
    carries={"add_bias_linear": (*LINEAR, ROUTER), "add_qkv_bias": QKV},
    lossy="Megatron's linear layers all have biases, or only the projections to queries, keys and values; its experts have none "
    "from 0.12.1 to before 0.15, and since 0.15 none under expert tensor parallelism",
    note=SCRIPT,
    source="attention.py: linear_qkv bias=add_bias_linear or add_qkv_bias; moe/router.py: bias, since 0.15; "
    "transformer_config.py: biases of experts",
    model=True,
)


# Feed-forward layer


ACTIVATION, GATED = "model.mlp.activation", "model.mlp.gated"
FUNCTIONS = {
    "gelu": "gelu",
    "fast_gelu": "gelu_tanh",
    **{name: name for name in ("silu", "quick_gelu", "relu", "squared_relu")},
}
WAYS: dict[tuple[Any, Any], Group] = {
    ("silu", True): {"swiglu": True},
    ("quick_gelu", True): {"quick_geglu": True},
    ("squared_relu", False): {"squared_relu": True, "bias_gelu_fusion": False},
    ("gelu", False): {"bias_gelu_fusion": False},
}
"""The flag of each activation, with and without a gate.

Without a flag, the activation is GELU; its fused kernel computes the tanh approximation.
"""


def _read_activation(values: Group, context: Context) -> Group:
    if "swiglu" not in values:
        return _read_function(values)
    gated = bool(values["swiglu"] or values.get("quick_geglu")) and not values.get("squared_relu")
    if gated:
        return {ACTIVATION: "silu" if values["swiglu"] else "quick_gelu", GATED: True}
    # The fused kernel adds the bias too, so without biases it is not used.
    plain = (
        "gelu_tanh" if values.get("bias_gelu_fusion") and values.get("add_bias_linear") else "gelu"
    )
    return {ACTIVATION: "squared_relu" if values.get("squared_relu") else plain, GATED: False}


def _read_function(values: Group) -> Group:
    """Read the activation of a config object, which has the name of a function."""
    if "activation_func" not in values:
        return {}
    # The value may be a dotted name; None is the class's default, F.gelu.
    name = FUNCTIONS.get(str(values["activation_func"] or "gelu").rpartition(".")[2])
    gated = bool(values.get("gated_linear_unit"))
    fused = values.get("bias_activation_fusion") and (gated or values.get("add_bias_linear"))
    return {ACTIVATION: "gelu_tanh" if name == "gelu" and fused else name, GATED: gated}


FLAGS = ("swiglu", "squared_relu", "quick_geglu")
ACTIVATIONS = convert(
    (*FLAGS, "bias_gelu_fusion", "activation_func", "gated_linear_unit"),
    (ACTIVATION, GATED),
    _read_activation,
    # Both forms, because flags and config objects name it in different ways; the target drops what
    # it lacks.
    lambda values, context: {
        **WAYS.get((values.get(ACTIVATION), values.get(GATED)), {}),
        "activation_func": next(
            (theirs for theirs, ours in FUNCTIONS.items() if ours == values.get(ACTIVATION)), None
        ),
        "gated_linear_unit": values.get(GATED),
    },
    sees=("add_bias_linear", "bias_activation_fusion"),
    carries={
        "bias_gelu_fusion": ACTIVATION,
        "activation_func": ACTIVATION,
        "gated_linear_unit": GATED,
    },
    lossy="Megatron has flags for GELU, squared ReLU, SwiGLU and gated quick GELU only",
    note=SCRIPT,
    source="arguments.py: core_transformer_config_from_args; mlp.py: forward; fusions/fused_bias_gelu.py",
    model=True,
)


CLAMP = convert(
    "activation_func_clamp_value",
    "model.mlp.clamp",
    # A plan has only positive bounds.
    give(
        "model.mlp.clamp",
        either(above("activation_func_clamp_value", 0), of("activation_func_clamp_value"), None),
    ),
    note=SCRIPT,
    source="mlp.py: forward, since 0.15",
    model=True,
)


def _write_offset(values: Group) -> Group:
    offset = values.get("model.mlp.offset")
    if not offset:
        return {}
    # The fused SwiGLU kernel would leave the offset out.
    return {
        "glu_linear_offset": offset,
        **({"bias_swiglu_fusion": False} if values.get(ACTIVATION) == "silu" else {}),
    }


OFFSET = convert(
    ("glu_linear_offset", "bias_swiglu_fusion"),
    "model.mlp.offset",
    give("model.mlp.offset", nonzero("glu_linear_offset")),
    _write_offset,
    effect=effect_if(on("glu_linear_offset"), Effect.NUMBERS, Effect.ROUNDING),
    sees=(ACTIVATION,),
    carries={"bias_swiglu_fusion": ()},
    kernels=("bias_swiglu_fusion",),
    note="a kernel choice inside Megatron",
    source="mlp.py: MLP.forward adds glu_linear_offset since 0.15; transformer_config.py: the fused SwiGLU leaves it out",
    model=True,
)


# Norms


KINDS = {"LayerNorm": "layer", "RMSNorm": "rms"}
NORMS = {ours: theirs for theirs, ours in KINDS.items()}
EPSILONS, CENTRED = (
    ("norm_epsilon", "layernorm_epsilon"),
    ("apply_layernorm_1p", "layernorm_zero_centered_gamma"),
)
AFTER = "apply_residual_connection_post_layernorm"


def _read_norm(values: Group, context: Context) -> Group:
    kind = KINDS.get(values.get("normalization") or "")
    if kind is None:
        return {}
    return {
        "model.norm.kind": kind,
        "model.norm.eps": next(
            (values[name] for name in EPSILONS if values.get(name) is not None), None
        ),
        "model.norm.zero_centred": any(values.get(name) for name in CENTRED),
        "model.norm.bias": kind == "layer",
        "model.norm.place": "before",
        "model.norm.parallel": False,
    }


def _write_norm(values: Group, context: Context) -> Group:
    return {
        "normalization": NORMS.get(values.get("model.norm.kind") or ""),
        # Both names of each setting; a release has one of them.
        **dict.fromkeys(EPSILONS, values.get("model.norm.eps")),
        **(dict.fromkeys(CENTRED, True) if values.get("model.norm.zero_centred") else {}),
    }


NORM = convert(
    ("normalization", *EPSILONS, *CENTRED, AFTER),
    tuple(
        f"model.norm.{name}"
        for name in ("kind", "eps", "zero_centred", "bias", "place", "parallel")
    ),
    _read_norm,
    _write_norm,
    # Megatron-Core's own layers do not read the switch.
    blurs=every(on(AFTER), on("use_legacy_models")),
    sees=("use_legacy_models",),
    carries={
        "normalization": tuple(
            f"model.norm.{name}" for name in ("kind", "bias", "place", "parallel")
        ),
        **dict.fromkeys(EPSILONS, "model.norm.eps"),
        **dict.fromkeys(CENTRED, "model.norm.zero_centred"),
        AFTER: "model.norm.place",
    },
    lossy="Megatron's blocks run attention and then the MLP, with one norm before each; stagebridge "
    "does not translate a residual connection that starts after the norm",
    note=SCRIPT,
    source="transformer_layer.py: forward; arguments.py: dests named as the config's fields since 0.16",
    model=True,
)


# Embedding, dropout, initial weights


def _read_tied(values: Group, context: Context) -> Group:
    unties = values.get("untie_embeddings_and_output_weights")
    if unties is None:
        return {}
    return {
        "model.tied": not unties,
        "model.embedding.norm": False,
        "model.embedding.output_bias": False,
    }


TIED = convert(
    "untie_embeddings_and_output_weights",
    ("model.tied", "model.embedding.norm", "model.embedding.output_bias"),
    _read_tied,
    give("untie_embeddings_and_output_weights", True, off("model.tied")),
    lossy="Megatron's embedding has no norm, and its output layer no bias",
    note=SCRIPT,
    source="gpt_model.py: output_layer bias=False; language_model_embedding.py",
    model=True,
)


DROPOUTS = ("model.dropout", "model.embedding.dropout")
DROPOUT = convert(
    "hidden_dropout",
    DROPOUTS,
    give(dict.fromkeys(DROPOUTS, of("hidden_dropout")), when=has_value("hidden_dropout")),
    give("hidden_dropout", first(*DROPOUTS)),
    lossy="Megatron has one dropout rate for the embedding and for the output of each layer",
    note=SCRIPT,
    source="language_model_embedding.py and transformer_layer.py: hidden_dropout",
    model=True,
)
INIT = convert(
    "init_method_std",
    ("model.init.std", "model.init.scaled"),
    give(
        {"model.init.std": of("init_method_std"), "model.init.scaled": True},
        when=has_value("init_method_std"),
    ),
    give("init_method_std", of("model.init.std")),
    lossy="Megatron always initialises projections into the residual stream with std / sqrt(2 x layers)",
    note=SCRIPT,
    source="transformer_config.py: init_method_normal, scaled_init_method_normal",
    model=True,
)
PREDICTED = convert(
    "mtp_num_layers",
    "model.predicted",
    give("model.predicted", nonzero("mtp_num_layers")),
    lambda values, context: (
        {"mtp_num_layers": values.get("model.predicted") or None}
        if not rotary_rules.is_yarn(values, context)
        else {}
    ),
    effect=EFFECTS["model.predicted"],
    sees=(rotary_rules.KIND, attention_rules.KV_RANK),
    lossy="Megatron has multi-token prediction since 0.12, but not together with YaRN",
    note=SCRIPT,
    source="multi_token_prediction.py, since 0.12; arguments.py: position_embedding_type with mtp_num_layers",
    model=True,
)

# Without a table of positions the number only has to reach the length of a sequence.
POSITIONS = convert(
    "max_position_embeddings",
    "model.embedding.max_positions",
    write=give(
        "max_position_embeddings",
        either(
            some(on("model.embedding.max_positions"), no(beyond(KIND, "learned"))),
            nonzero("model.embedding.max_positions"),
            of("model.sequence"),
        ),
    ),
    effect=EFFECTS["model.embedding.max_positions"],
    sees=(KIND, "model.sequence"),
    note=SCRIPT,
    source="arguments.py: validate_args",
    model=True,
)

RULES = (
    fact("num_layers", "model.layers"),
    fact("hidden_size", "model.hidden"),
    fact("num_attention_heads", "model.heads"),
    fact("ffn_hidden_size", "model.ffn"),
    fact("vocab_size", "model.vocab"),
    fact("num_experts", "model.experts"),
    fact("seq_length", "model.sequence"),
    POSITIONS,
    GROUPS,
    VOCABULARY,
    BIASES,
    ACTIVATIONS,
    CLAMP,
    OFFSET,
    NORM,
    TIED,
    DROPOUT,
    INIT,
    PREDICTED,
    always(
        "model.embedding.padding",
        "none",
        "Megatron trains the row of the padding token as all others, in inputs that contain this token",
        source="core/tensor_parallel/layers.py: VocabParallelEmbedding",
    ),
    *attention_rules.RULES,
    *rotary_rules.RULES,
    *expert_rules.RULES,
)
