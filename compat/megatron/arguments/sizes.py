"""Checks and derivations for the parallel sizes; `validate_args` makes them before those for
batches and layers.
"""

from __future__ import annotations

from math import lcm, prod

from bridge.stack.checks import Check, excludes, needs, one_of, positive, set_
from compat.megatron.arguments.namespace import Namespace, Step, member_name
from compat.megatron.arguments.steps import (
    any_given,
    check,
    compute_argument,
    derive,
    drop,
    follow,
    inherit,
    when,
)

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
DIVISORS = (
    *SIZES,
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "recompute_num_layers",
)
"""Names of sizes that Megatron divides by, and that therefore have to be positive."""


def decoder_size(a: Namespace) -> int:
    """Return the number of ranks of one replica of the decoder: tensor x pipeline x context x
    weight shards.
    """
    return int(prod(getattr(a, name) for name in SIZES) * (a.gtp_weight_remat_size or 1))


def encoder_size(a: Namespace) -> int:
    """Return the number of ranks of one replica of a separate encoder, or 0 if there is none.
    Releases since 0.14 have no separate encoder.
    """
    tensor = a.encoder_tensor_model_parallel_size or 0
    pipeline = a.encoder_pipeline_model_parallel_size or 0
    return int(tensor * pipeline * a.context_parallel_size)


def model_size(a: Namespace) -> int:
    """Return the number of ranks of one replica of the whole model."""
    return encoder_size(a) + decoder_size(a)


def expert_size(a: Namespace) -> int:
    """Return the number of ranks of the expert grid: expert tensor x expert x pipeline x weight
    shards.
    """
    tensor = a.expert_tensor_parallel_size or a.tensor_model_parallel_size
    experts = (a.expert_model_parallel_size or 1) * a.pipeline_model_parallel_size
    return int(tensor * experts * (a.expert_gtp_weight_remat_size or 1))


def least(a: Namespace) -> int:
    """Return the smallest number of ranks that is a multiple of the model's grid and of the
    experts' grid.
    """
    # initialize_model_parallel makes the groups of both grids over all ranks. A separate encoder
    # has no grid of experts.
    return model_size(a) if encoder_size(a) else lcm(model_size(a), expert_size(a))


_encoder = compute_argument(
    "encoder_tensor_model_parallel_size",
    lambda a: a.tensor_model_parallel_size,
    lambda a: (
        a.encoder_pipeline_model_parallel_size > 0 and a.encoder_tensor_model_parallel_size == 0
    ),
)


_expert_tensor = inherit("expert_tensor_parallel_size", "tensor_model_parallel_size")


def shards(a: Namespace, total: str, size: str, extra: str) -> None:
    """Make `total` equal `size` x `extra`, as resolve_tensor_parallel_weight_shards does. All
    three are names of arguments.

    `total` is the number of shards of a weight, `size` the number of tensor ranks, and `extra` the
    number of shards into which the weight on each tensor rank is split. If `total` is given,
    `extra` is computed from it.
    """
    if getattr(a, total) is None:
        setattr(a, total, getattr(a, size) * (getattr(a, extra) or 1))
    setattr(a, extra, getattr(a, total) // getattr(a, size))


def dense_shards(a: Namespace) -> None:
    """Set the numbers of weight shards of the dense layers."""
    shards(
        a,
        "tensor_parallel_num_weight_shards",
        "tensor_model_parallel_size",
        "gtp_weight_remat_size",
    )


def expert_shards(a: Namespace) -> None:
    """Set the numbers of weight shards of the experts."""
    total = "expert_tensor_parallel_num_weight_shards"
    shards(a, total, "expert_tensor_parallel_size", "expert_gtp_weight_remat_size")


def _uneven(total: str, size: str) -> Step:
    def fails(a: Namespace) -> bool:
        shards, ranks = getattr(a, total), getattr(a, size)
        # The first condition refuses 0, which every number of ranks divides.
        return shards is not None and (shards < ranks or shards % ranks != 0)

    return check(
        "resolve_tensor_parallel_weight_shards",
        fails,
        f"{total}: found {{{total}}}; expected a multiple of {size} ({{{size}}}); change one of them",
        since="0.19.0",
        last=True,
    )


DENSE_SHARDS = _uneven("tensor_parallel_num_weight_shards", "tensor_model_parallel_size")
EXPERT_SHARDS = _uneven("expert_tensor_parallel_num_weight_shards", "expert_tensor_parallel_size")


ENCODER_SIZES = ("encoder_tensor_model_parallel_size", "encoder_pipeline_model_parallel_size")
DIVIDES = "validate_args: sizes are divisors"


def _encoder_size(name: str) -> Check:
    return check(
        DIVIDES,
        lambda a: a[name] < 0,
        f"{name}: found {{{name}}}; expected 0 (no separate encoder) or a positive number",
        needs=(name,),
        last=True,
    )


# Upstream has no such statement: it divides by the sizes, and a 0 ends the run with
# ZeroDivisionError.
POSITIVE: tuple[Check, ...] = (
    *(positive(name, DIVIDES, last=True) for name in (*DIVISORS, "world_size")),
    *map(_encoder_size, ENCODER_SIZES),
)

WORLD_STEPS: tuple[Step, ...] = (
    *POSITIVE,
    derive("validate_args: encoder tensor size", _encoder, until="0.14.0"),
    derive("validate_args: expert tensor size", _expert_tensor, since="0.10.0"),
    DENSE_SHARDS,
    EXPERT_SHARDS,
    derive("validate_args: weight shards", dense_shards, since="0.19.0"),
    derive("validate_args: weight shards", expert_shards, since="0.19.0"),
)
"""The checks and derivations on which the smallest world size depends."""

SIZE_STEPS: tuple[Step, ...] = (
    *POSITIVE,
    excludes(
        set_("kitchen_config_file"),
        set_("kitchen_recipe_number"),
        "_add_kitchen_quantization_arguments",
        since="0.13.0",
        until="0.16.0",
    ),
    check(
        "validate_args: checkpoint conversion",
        lambda a: (
            a.ckpt_convert_format is not None and (a.ckpt_convert_save is None or a.load is None)
        ),
        "ckpt_convert_format: found {ckpt_convert_format}; expected ckpt_convert_save and load too; add"
        " --ckpt-convert-save and --load",
        since="0.18.0",
    ),
    derive(
        "validate_args: checkpoint conversion",
        when(lambda a: a.ckpt_convert_format is not None, exit_on_missing_checkpoint=True),
        since="0.18.0",
    ),
    check(
        "validate_args: non-persistent checkpoints",
        lambda a: a.non_persistent_ckpt_type not in ("global", None),
        "non_persistent_ckpt_type: found {non_persistent_ckpt_type}; expected global, the only type in"
        " this release",
        until="0.11.0",
        name="found-this-release-has-only",
    ),
    one_of(
        "non_persistent_ckpt_type",
        ("global", "local", None),
        "validate_args: non-persistent checkpoints",
        since="0.11.0",
    ),
    check(
        "validate_args: legacy models",
        lambda a: a.use_legacy_models and a.ckpt_format != "torch",
        "ckpt_format: found {ckpt_format} with use_legacy_models; expected torch; set --ckpt-format torch",
        since="0.11.0",
        until="0.18.0",
    ),
    derive(
        "update_use_dist_ckpt",
        compute_argument("use_dist_ckpt", lambda a: a.ckpt_format != "torch"),
    ),
    check(
        "validate_args: encoder tensor size",
        lambda a: (
            a.encoder_pipeline_model_parallel_size == 0
            and a.num_experts == 0
            and a.encoder_tensor_model_parallel_size != a.tensor_model_parallel_size
        ),
        "encoder_tensor_model_parallel_size: found {encoder_tensor_model_parallel_size} for an encoder on"
        " the first decoder rank; expected tensor_model_parallel_size ({tensor_model_parallel_size})",
        since="0.10.0",
        until="0.14.0",
    ),
    check(
        "validate_args: encoder tensor size",
        lambda a: (
            a.encoder_tensor_model_parallel_size > 0
            and not a.encoder_pipeline_model_parallel_size > 0
        ),
        "encoder_tensor_model_parallel_size: found {encoder_tensor_model_parallel_size} without an encoder"
        " pipeline; add --encoder-pipeline-model-parallel-size",
        until="0.11.0",
    ),
    check(
        "validate_args: encoder tensor size",
        lambda a: (
            a.encoder_tensor_model_parallel_size > 0
            and a.num_attention_heads % a.encoder_tensor_model_parallel_size
        ),
        "encoder_tensor_model_parallel_size: found {encoder_tensor_model_parallel_size}; expected a divisor"
        " of num_attention_heads ({num_attention_heads})",
        until="0.14.0",
        needs=("num_attention_heads",),
    ),
    check(
        "validate_args: encoder tensor size",
        lambda a: a.encoder_tensor_model_parallel_size > a.tensor_model_parallel_size,
        "encoder_tensor_model_parallel_size: found {encoder_tensor_model_parallel_size}; expected at most"
        " tensor_model_parallel_size ({tensor_model_parallel_size})",
        until="0.14.0",
    ),
    derive("validate_args: encoder tensor size", _encoder, until="0.14.0"),
    DENSE_SHARDS,
    derive("validate_args: weight shards", dense_shards, since="0.19.0"),
    check(
        "validate_args: total model size",
        lambda a: a.world_size % model_size(a) != 0,
        "world_size: found {world_size}, which tensor ({tensor_model_parallel_size}) x pipeline"
        " ({pipeline_model_parallel_size}) x context ({context_parallel_size}) does not divide;"
        " weight shards multiply this product, and the ranks of an encoder are added to it; use a"
        " multiple, or smaller sizes",
        needs=("world_size",),
        last=True,
    ),
    check(
        "validate_args: attention backend",
        lambda a: (
            member_name(a.attention_backend) == "local" and (not a.spec or a.spec[0] != "local")
        ),
        "attention_backend: found local without spec local; add --spec local, or choose another backend",
        since="0.11.0",
        name="found-local-expected-spec-local",
    ),
    # The stages that hold layers: up to 0.10, --standalone-embedding-stage keeps the first one for
    # the embedding.
    derive(
        "validate_args: pipeline size",
        compute_argument(
            "transformer_pipeline_model_parallel_size",
            lambda a: a.pipeline_model_parallel_size - (1 if a.standalone_embedding_stage else 0),
        ),
    ),
    derive(
        "validate_args: data parallel size",
        compute_argument("data_parallel_size", lambda a: a.world_size // model_size(a)),
        needs=("world_size",),
    ),
)

AFTER_SIZES: tuple[Step, ...] = (
    derive(
        "validate_args: split rank",
        follow("encoder_pipeline_model_parallel_size", "pipeline_model_parallel_split_rank"),
        until="0.14.0",
    ),
    derive(
        "validate_args: split rank",
        compute_argument(
            "pipeline_model_parallel_size",
            lambda a: a.pipeline_model_parallel_size - (a.pipeline_model_parallel_split_rank or 0),
        ),
        until="0.14.0",
    ),
    # The step above made pipeline_model_parallel_size the size of the decoder alone.
    check(
        "validate_args: split rank",
        lambda a: a.pipeline_model_parallel_size <= 0,
        "pipeline_model_parallel_split_rank: found {pipeline_model_parallel_split_rank}; expected less than"
        " pipeline_model_parallel_size",
        until="0.14.0",
        last=True,
    ),
    needs(
        "tp_comm_overlap",
        "sequence_parallel",
        "validate_args: tensor-parallel overlap",
        "add --sequence-parallel, or drop --tp-comm-overlap",
        until="0.10.0",
    ),
    check(
        "validate_args: hierarchical context parallelism",
        lambda a: (
            a.hierarchical_context_parallel_sizes
            and prod(a.hierarchical_context_parallel_sizes) != a.context_parallel_size
        ),
        "hierarchical_context_parallel_sizes: found {hierarchical_context_parallel_sizes}; expected sizes"
        " whose product is context_parallel_size ({context_parallel_size})",
        since="0.10.0",
        name="found-expected-a-product-of",
    ),
    # a2a+p2p exchanges heads within inner groups of ranks, and keys and values between these
    # groups: it needs both sizes.
    check(
        "validate_args: hierarchical context parallelism",
        lambda a: "a2a+p2p" in a.cp_comm_type and a.hierarchical_context_parallel_sizes is None,
        "cp_comm_type: found a2a+p2p without hierarchical_context_parallel_sizes; add --hierarchical-context-parallel-sizes",
        since="0.10.0",
        name="found-a2a-p2p-expected-hierarchical_context_parallel_sizes",
    ),
    derive("validate_args: expert tensor size", _expert_tensor, since="0.10.0"),
    *(
        check(
            "validate_args: removed flags",
            any_given(name),
            f"{name}: found {{{name}}}; the flag is no longer valid; use {instead}",
            name="found-no-longer-valid-use",
        )
        for name, instead in (
            ("batch_size", "--micro-batch-size"),
            ("warmup", "--lr-warmup-fraction"),
            ("model_parallel_size", "--tensor-model-parallel-size"),
        )
    ),
    # This flag is a switch, so it is false rather than None if it is absent.
    check(
        "validate_args: removed flags",
        lambda a: a.checkpoint_activations,
        "checkpoint_activations: no longer valid; Megatron exits when it finds the flag; "
        "use --recompute-activations, or"
        " --recompute-granularity with --recompute-method",
        name="no-longer-valid-and-the",
    ),
    derive(
        "validate_args: recompute_activations",
        when(lambda a: a.recompute_activations, recompute_granularity="selective"),
    ),
    derive(
        "validate_args: removed flags",
        drop(
            "batch_size",
            "warmup",
            "model_parallel_size",
            "checkpoint_activations",
            "recompute_activations",
        ),
    ),
)

MSC: tuple[Step, ...] = (
    derive(
        "parse_args: storage client",
        when(lambda a: a.disable_msc_deprecated, enable_msc=False),
        since="0.18.0",
    ),
)
