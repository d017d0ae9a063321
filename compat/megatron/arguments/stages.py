"""Checks and derivations for the pipeline: interleaving, uneven stages, and the settings that need
interleaving.
"""

from __future__ import annotations

from compat.megatron.arguments import layout
from compat.megatron.arguments.namespace import Namespace, Step
from compat.megatron.arguments.steps import any_given, check, derive, when

STAGES = "validate_args: virtual pipeline"
WAYS = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
)
UNEVEN = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


def _layers(a: Namespace) -> int | None:
    """Return the number of layers to distribute over stages; None if it is not known. Embedding and
    loss are included if settings count them as layers.
    """
    # decoder_num_layers is for T5, which has no num_layers (validate_args falls back to it in the
    # same way).
    layers = a.decoder_num_layers if a.num_layers is None else a.num_layers
    if layers is None:
        return None
    ends = (a.account_for_embedding_in_pipeline_split, a.account_for_loss_in_pipeline_split)
    return int(layers) + sum(map(bool, ends))


def _by_layers(a: Namespace) -> bool:
    # Upstream reads the number of layers only if the number of stages is not given.
    return (
        a.num_layers_per_virtual_pipeline_stage is not None
        and a.num_virtual_stages_per_pipeline_rank is None
    )


def _has_virtual_stages(a: Namespace) -> bool:
    """Whether there are virtual stages.

    How many there are may be unknown, because the number of layers is missing.
    """
    return a.virtual_pipeline_model_parallel_size is not None or (
        _by_layers(a) and _layers(a) is None
    )


def _indivisible(a: Namespace) -> bool:
    layers = _layers(a)
    return layers is not None and layers % a.transformer_pipeline_model_parallel_size != 0


def _rank_indivisible(a: Namespace) -> bool:
    """Whether the virtual stages do not divide the layers of a pipeline rank evenly."""
    layers, each = _layers(a), a.num_layers_per_virtual_pipeline_stage
    if layers is None:
        return False
    # Upstream divides by `each`; a size below 1 is refused here instead of ending with
    # ZeroDivisionError.
    return bool(each < 1 or layers // a.transformer_pipeline_model_parallel_size % each != 0)


def _virtual(a: Namespace) -> None:
    if a.pipeline_model_parallel_layout is not None:
        size = len(layout.of(a) or ()) // a.pipeline_model_parallel_size
        a.virtual_pipeline_model_parallel_size = size if size > 1 else None
    elif _by_layers(a):
        layers, each = _layers(a), a.num_layers_per_virtual_pipeline_stage
        per_rank = (layers or 0) // a.transformer_pipeline_model_parallel_size
        # `each` below 1 was refused by an earlier row, but all rows are taken, so it must not
        # divide here.
        a.virtual_pipeline_model_parallel_size = (
            per_rank // max(each, 1) if layers is not None else None
        )
    elif a.num_virtual_stages_per_pipeline_rank is not None:
        a.virtual_pipeline_model_parallel_size = a.num_virtual_stages_per_pipeline_rank
    elif a.hybrid_layer_pattern is None:  # else the | of the pattern have set it (hybrid.py)
        a.virtual_pipeline_model_parallel_size = None


STANDALONE = (
    "standalone_embedding_stage: found with pipeline_model_parallel_size 1, which leaves no stage for the"
    " layers; use more pipeline ranks"
)

STAGE_STEPS: tuple[Step, ...] = (
    check(
        "validate_args: layers over stages",
        lambda a: a.transformer_pipeline_model_parallel_size < 1 and any_given(WAYS[0])(a),
        STANDALONE,
        until="0.10.0",
        last=True,
    ),
    check(
        "validate_args: layers over stages",
        lambda a: a.transformer_pipeline_model_parallel_size < 1 and not any_given(*UNEVEN)(a),
        STANDALONE,
        since="0.10.0",
        until="0.11.0",
        last=True,
    ),
    check(
        "validate_args: layers over stages",
        lambda a: (
            not any_given(*UNEVEN)(a)
            and a.num_layers % a.transformer_pipeline_model_parallel_size != 0
        ),
        "num_layers: found {num_layers}; expected a multiple of pipeline_model_parallel_size"
        " ({pipeline_model_parallel_size}); change one of them, or add"
        " --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers",
        since="0.10.0",
        until="0.11.0",
        needs=("num_layers",),
    ),
    check(
        STAGES,
        lambda a: any_given(WAYS[0])(a) and any_given(WAYS[1])(a),
        "num_virtual_stages_per_pipeline_rank: found with num_layers_per_virtual_pipeline_stage; keep one of them",
        since="0.11.0",
        until="0.13.0",
    ),
    check(
        STAGES,
        lambda a: sum(getattr(a, name) is not None for name in WAYS) > 1,
        "pipeline_model_parallel_layout: found more than one of num_layers_per_virtual_pipeline_stage"
        " ({num_layers_per_virtual_pipeline_stage}), num_virtual_stages_per_pipeline_rank"
        " ({num_virtual_stages_per_pipeline_rank}) and pipeline_model_parallel_layout"
        " ({pipeline_model_parallel_layout}); keep one of them",
        since="0.13.0",
        last=True,
    ),
    *layout.READABLE,
    layout.multiple(STAGES),
    check(
        STAGES,
        lambda a: _by_layers(a) and any_given(*UNEVEN)(a),
        "num_layers_per_virtual_pipeline_stage: found with decoder_first_pipeline_num_layers or"
        " decoder_last_pipeline_num_layers; with uneven stages, use --num-virtual-stages-per-pipeline-rank"
        " instead",
        since="0.11.0",
    ),
    check(
        STAGES,
        lambda a: _by_layers(a) and _indivisible(a),
        "num_layers: found {num_layers}, plus embedding and loss if they count as layers; expected a"
        " multiple of pipeline_model_parallel_size ({pipeline_model_parallel_size})",
        name="found-with-embedding-and-loss",
    ),
    check(
        STAGES,
        lambda a: _by_layers(a) and not _indivisible(a) and _rank_indivisible(a),
        "num_layers_per_virtual_pipeline_stage: found {num_layers_per_virtual_pipeline_stage}; expected a"
        " divisor of the layers of one pipeline rank: num_layers ({num_layers}) /"
        " pipeline_model_parallel_size ({pipeline_model_parallel_size})",
    ),
    check(
        "validate_args: layers over stages",
        # T5 (no num_layers) and hybrid patterns are spread in other ways, so their layers need not
        # divide.
        lambda a: (
            not any_given(*WAYS, *UNEVEN)(a)
            and a.hybrid_layer_pattern is None
            and a.num_layers is not None
            and _indivisible(a)
        ),
        "num_layers: found {num_layers}, plus embedding and loss if they count as layers; expected a"
        " multiple of pipeline_model_parallel_size ({pipeline_model_parallel_size}); change one of them, or"
        " add --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers",
        since="0.11.0",
        name="found-with-embedding-and-loss",
    ),
    derive(STAGES, _virtual),
    # Since 0.14, one virtual stage is no interleaving. For a layout, `_virtual` has set None in
    # every release.
    derive(
        STAGES,
        when(
            lambda a: (
                a.virtual_pipeline_model_parallel_size == 1
                and a.pipeline_model_parallel_layout is None
                and any_given(*WAYS)(a)
            ),
            virtual_pipeline_model_parallel_size=None,
        ),
        since="0.14.0",
    ),
    check(
        STAGES,
        lambda a: (
            _has_virtual_stages(a) and a.overlap_p2p_comm and a.pipeline_model_parallel_size <= 1
        ),
        "pipeline_model_parallel_size: found {pipeline_model_parallel_size} with an interleaved schedule;"
        " expected more than 1; drop the virtual stages, or use more pipeline ranks",
    ),
    # Without overlap, a rank exchanges messages with both neighbours in one batch. On two ranks
    # both neighbours are the same rank, and upstream rules out several messages between two ranks
    # in one batch.
    check(
        STAGES,
        lambda a: (
            _has_virtual_stages(a)
            and not a.overlap_p2p_comm
            and a.pipeline_model_parallel_size <= 2
        ),
        "pipeline_model_parallel_size: found {pipeline_model_parallel_size} with an interleaved schedule"
        " that does not overlap its communication; expected more than 2; drop"
        " --no-overlap-p2p-communication, or use more pipeline ranks",
    ),
    derive(
        STAGES,
        when(
            lambda a: not _has_virtual_stages(a), overlap_p2p_comm=False, align_param_gather=False
        ),
    ),
)
