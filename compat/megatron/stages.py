"""Converts between Megatron's settings for the layers of each (virtual) pipeline stage and the
plan's stage boundaries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from bridge.errors import TranslationError
from bridge.stack.rules import Context, Effect, Group, convert, rename

VIRTUAL = "virtual_pipeline_model_parallel_size"
VIRTUAL_FLAGS = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    VIRTUAL,
)
STANDALONE = "standalone_embedding_stage"
UNEVEN_FLAGS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    STANDALONE,
)


def layout_counts(layout: str) -> tuple[int, ...]:
    """Return the number of decoder layers of each stage of a `--pipeline-model-parallel-layout`
    string, in model order.

    Grammar (pipeline_parallel_layer_layout.py): `E` embedding, `t` decoder layer, `m` multi-token
    prediction, `L` loss, `|` between stages; `(...)*n` and `x*n` repeat; commas are ignored.
    """
    flat = layout.replace(",", "").replace(" ", "")
    flat = re.sub(r"\(([^()]*)\)\*(\d+)", lambda match: match[1] * int(match[2]), flat)
    flat = re.sub(r"([^)*])\*(\d+)", lambda match: match[1] * int(match[2]), flat)
    return tuple(stage.count("t") for stage in flat.split("|"))


def layout_of(counts: Sequence[int]) -> str:
    """Return the layout string for stages with these numbers of decoder layers."""
    stages = ["t" * count for count in counts]
    return "|".join(
        ["E" + stages[0], *stages[1:-1], stages[-1] + "L"]
        if len(stages) > 1
        else [f"E{stages[0]}L"]
    )


def counts_of(values: Group) -> tuple[int, ...] | None:
    """Return the number of decoder layers of each virtual stage, in model order. None if the split
    is even, or if the values do not determine it.
    """
    if layout := values.get("pipeline_model_parallel_layout"):
        return layout_counts(layout) if isinstance(layout, str) else None
    layers, ranks = values.get("num_layers"), values.get("pipeline_model_parallel_size") or 1
    if not layers or ranks == 1:
        return None
    # The order of these branches is that of get_num_layers_to_build.
    chunks = values.get(VIRTUAL) or 1
    if values.get("account_for_embedding_in_pipeline_split") or values.get(
        "account_for_loss_in_pipeline_split"
    ):
        return _with_ends(values, layers, ranks * chunks)
    first, last = (values.get(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    if first is None and last is None:
        return _behind_embedding(layers, ranks, chunks) if values.get(STANDALONE) else None
    return _uneven_counts(layers, ranks, chunks, first, last)


def _behind_embedding(layers: int, ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the layer counts of all stages if the first rank has only the embedding, and the other
    ranks share the layers equally.
    """
    return (0, *[layers // (ranks - 1) // chunks] * (ranks - 1)) * chunks


def _with_ends(values: Group, layers: int, stages: int) -> tuple[int, ...]:
    embedding = bool(values.get("account_for_embedding_in_pipeline_split"))
    loss = bool(values.get("account_for_loss_in_pipeline_split"))
    # Embedding and loss each take the place of one decoder layer.
    counts = [(layers + int(embedding) + int(loss)) // stages] * stages
    counts[0] -= int(embedding)
    counts[-1] -= int(loss)
    return tuple(counts)


def _uneven_counts(
    layers: int, ranks: int, chunks: int, first: int | None, last: int | None
) -> tuple[int, ...]:
    """Return the layer counts of all stages if the first rank, the last rank, or both have a given
    number of layers.

    The other ranks share the remaining layers equally.
    """
    before = [] if first is None else [first]
    after = [] if last is None else [last]
    middle = ranks - len(before) - len(after)
    rest = (layers - sum(before) - sum(after)) // middle if middle else 0
    per_rank = before + [rest] * middle + after
    # Each rank cuts its layers into equal virtual stages. Stages go round the ranks, so the row of
    # ranks repeats.
    return tuple(count // chunks for count in per_rank) * chunks


def boundaries_of(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the first layer of each stage, followed by the number of all layers."""
    return (0, *accumulate(counts))


def _read_stages(values: Group, context: Context) -> Group:
    if (values.get("pipeline_model_parallel_size") or 1) == 1:
        return {}
    virtual, counts = values.get(VIRTUAL), counts_of(values)
    return {
        "stages.rule": "even" if counts is None else "explicit",
        "stages.boundaries": None if counts is None else boundaries_of(counts),
        "schedule.name": "1f1b" if virtual is None else "interleaved_1f1b",
        "schedule.virtual": virtual,
    }


def _write_stages(values: Group, context: Context) -> Group:
    ranks = values.get("parallel.pipeline") or 1
    if ranks == 1:
        return {}
    virtual, boundaries = values.get("schedule.virtual"), values.get("stages.boundaries")
    if boundaries is None:
        return _virtual_flags(virtual, ranks, values.get("model.layers"), context)
    counts = tuple(end - start for start, end in pairwise(boundaries))
    return next(_forms(counts, ranks, virtual, context), None) or _refuse(
        counts, ranks, virtual, context
    )


def _virtual_flags(virtual: int | None, ranks: int, layers: int | None, context: Context) -> Group:
    if virtual is None:
        return {}
    if context.since("0.11.0"):
        return {"num_virtual_stages_per_pipeline_rank": virtual}
    # Before, only the number of layers of a virtual stage can be given.
    return {"num_layers_per_virtual_pipeline_stage": layers // (ranks * virtual)} if layers else {}


def _forms(
    counts: tuple[int, ...], ranks: int, virtual: int | None, context: Context
) -> Iterator[Group]:
    """Yield sets of flags from which Megatron computes these layer counts, simplest first."""
    chunks, layers = virtual or 1, sum(counts)
    if len(counts) != ranks * chunks:
        return
    flags = _virtual_flags(virtual, ranks, layers, context)
    # Flags give every stage at least one layer. Before 0.11 they do not go with virtual stages.
    if all(counts) and (not virtual or context.since("0.11.0")):
        for form in _flag_forms(counts, ranks, chunks, context):
            settings = {
                **form,
                "num_layers": layers,
                "pipeline_model_parallel_size": ranks,
                VIRTUAL: virtual,
            }
            if counts_of(settings) == counts:
                yield {**flags, **form}
    # The flag was removed in 0.11; --pipeline-model-parallel-layout came with 0.13.
    if not context.since("0.11.0") and counts == _behind_embedding(layers, ranks, chunks):
        yield {STANDALONE: True, **_virtual_flags(virtual, ranks - 1, layers, context)}
    if context.since("0.13.0"):
        yield {"pipeline_model_parallel_layout": layout_of(counts)}


def _flag_forms(
    counts: tuple[int, ...], ranks: int, chunks: int, context: Context
) -> Iterator[Group]:
    """Yield candidate flags for uneven stages; most of them lead to other layer counts."""
    # The flags take the layers of a whole rank: all of its virtual stages together.
    first, last = counts[0] * chunks, counts[ranks - 1] * chunks
    yield {"decoder_first_pipeline_num_layers": first}
    yield {"decoder_last_pipeline_num_layers": last}
    if ranks > 2:
        yield {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": last}
    if context.since("0.11.0"):
        embedding = "account_for_embedding_in_pipeline_split"
        loss = "account_for_loss_in_pipeline_split"
        yield from ({embedding: True}, {loss: True}, {embedding: True, loss: True})


def _refuse(counts: tuple[int, ...], ranks: int, virtual: int | None, context: Context) -> Group:
    raise TranslationError(
        f"stages.boundaries: {len(counts)} stages of {list(counts)} layers on {ranks} pipeline ranks with "
        f"{virtual or 1} stages each cannot be set by flags of Megatron {context.version}; "
        "let only the first and the last stage differ, or convert to 0.13.0 or later "
        "(--pipeline-model-parallel-layout)"
    )


RULES = (
    convert(
        (*VIRTUAL_FLAGS, *UNEVEN_FLAGS, "pipeline_model_parallel_layout"),
        (
            "stages.rule",
            "stages.layers_per_stage",
            "stages.boundaries",
            "schedule.name",
            "schedule.virtual",
        ),
        _read_stages,
        _write_stages,
        effect=Effect.COST,
        sees=("num_layers", "pipeline_model_parallel_size", "model.layers", "parallel.pipeline"),
        carries={
            **dict.fromkeys(VIRTUAL_FLAGS, ("schedule.name", "schedule.virtual")),
            **dict.fromkeys(
                UNEVEN_FLAGS, ("stages.rule", "stages.layers_per_stage", "stages.boundaries")
            ),
        },
        lossy="Megatron splits layers evenly unless stages are set; "
        "its only schedules are 1F1B and interleaved 1F1B",
        source="arguments.py: virtual stages from layers; transformer_block.py: get_num_layers_to_build",
    ),
    rename("microbatch_group_size_per_vp_stage", "schedule.group", effect=Effect.COST),
    convert(
        "overlap_p2p_comm",
        "schedule.overlap",
        lambda values, context: {
            "schedule.overlap": values.get("overlap_p2p_comm")
            if values.get(VIRTUAL) is not None
            else None
        },
        # Megatron refuses virtual stages on two ranks unless communication is overlapped.
        lambda values, context: (
            {
                "overlap_p2p_comm": values["schedule.overlap"]
                or (values.get("parallel.pipeline") or 1) == 2
            }
            if values.get("schedule.overlap") is not None and values.get("schedule.virtual")
            else {}
        ),
        effect=Effect.COST,
        sees=(VIRTUAL, "schedule.virtual", "parallel.pipeline"),
        lossy="Megatron overlaps pipeline communication only with virtual stages; "
        "virtual stages on two pipeline ranks require this overlap",
        source="arguments.py: overlap_p2p_comm is switched off without virtual stages",
    ),
)
