"""Settings that Fast-LLM accepts, and later ignores, gets wrong, or fails on."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from bridge.plan.section import Values
from bridge.stack.check_tables import Checks, report_remarks
from bridge.stack.checks import Check, Remark, Seen
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from compat.fast_llm.effective import (
    GRADS,
    PIPELINE,
    RANKS,
    SEQUENCE_TENSOR,
    STAGES,
    TENSOR,
    TEXT_SCHEDULE,
    WORLD,
    buffers_of_level,
    data_ranks,
)
from compat.fast_llm.releases import RELEASES, release
from compat.fast_llm.rules import text_schedule
from compat.fast_llm.rules.model import facts

DOCUMENT = "data.maximum_document_length"
RATE = "optimizer.learning_rate."
STYLES = ("constant", "linear", "power", "cosine")


SPLIT = RANKS + "sequence_data_parallel"
BUILDS = "Fast-LLM stops when it builds the model"
DIMENSION = "engine/config_utils/tensor_dim.py: TensorDim"


def _check_split(path: str, what: str, name: str, only: str = "") -> Check:
    """Return a check that holds if the size at `path`, a plan field, cannot be split over the
    tensor ranks. If `only` is given, this field has to be true.
    """

    def uneven(view: Seen) -> bool:
        # Experts as wide as the MLP, or in its place everywhere, have a row of their own.
        other = path == "model.ffn" and view[path] == view["model.moe.ffn"]
        return (not only or bool(view[only])) and not other and view[path] % view[TENSOR] != 0

    message = f"found {{{TENSOR}}} ranks, which cannot split {{{path}}} {what}: {BUILDS}; expected a divisor"
    return Check(TENSOR, uneven, message, Effect.STOPS, DIMENSION, needs=(path,), name=name)


def _has_odd_tokens(view: Seen) -> bool:
    """Return whether the tokens of a microbatch cannot be split over all ranks that share it."""
    parts = (view["schedule.micro_batch_splits"] or 1) * (view[SPLIT] or 1)
    return bool(view["data.micro_batch_size"] % parts)


CHECKS = Checks(
    RELEASES,
    _check_split("model.ffn", "channels of the MLP", "mlp-no-multiple-of-the-tensor-ranks"),
    _check_split(
        "model.moe.ffn", "channels of an expert", "expert-no-multiple-of-the-tensor-ranks"
    ),
    _check_split(
        "model.vocab",
        "rows of the vocabulary",
        "vocabulary-no-multiple-of-the-tensor-ranks",
        "parallel.vocabulary",
    ),
    Check(
        TENSOR,
        lambda view: (
            (view["model.kv_heads"] if view["model.kv_heads"] > 1 else view["model.heads"])
            % view[TENSOR]
            != 0
        ),
        f"found {{{TENSOR}}} ranks, which cannot split {{model.kv_heads}} groups of heads (or the"
        f" {{model.heads}} heads of a single group): {BUILDS}; expected a divisor",
        Effect.STOPS,
        f"layers/attention/attention.py: Attention.__init__; {DIMENSION}",
        needs=("model.heads", "model.kv_heads"),
        name="heads-no-multiple-of-the-tensor-ranks",
    ),
    Check(
        "model.base_model",
        lambda view: view["model.heads"] % view["model.kv_heads"] != 0,
        "found {model.heads} heads in {model.kv_heads} groups, which Fast-LLM refuses; expected a"
        " multiple",
        Effect.STOPS,
        "layers/attention/config.py: AttentionConfig._validate",
        needs=("model.heads", "model.kv_heads"),
        name="heads-no-multiple-of-their-groups",
    ),
    Check(
        "model.base_model",
        lambda view: view["model.moe.top_k"] > view["model.experts"],
        "found {model.experts} experts that are not shared, fewer than the {model.moe.top_k} of a"
        " token, which Fast-LLM refuses; use more experts",
        Effect.STOPS,
        "layers/decoder/mlp/config.py: MoEMLPConfig._validate",
        needs=("model.experts", "model.moe.top_k"),
        name="fewer-experts-than-a-token-takes",
    ),
    Check(
        DOCUMENT,
        lambda view: (
            view["model.embedding.positions"] == "learned"
            and view["model.embedding.max_positions"] < view[DOCUMENT]
        ),
        f"found {{{DOCUMENT}}}, more than the model has learned positions"
        " ({model.embedding.max_positions}), which Fast-LLM refuses; use shorter documents, or more"
        " positions",
        Effect.STOPS,
        "models/gpt/config.py: GPTTrainerConfig._validate",
        since="0.4.0",
        needs=(DOCUMENT, "model.embedding.max_positions"),
        name="documents-longer-than-the-positions",
    ),
    Check(
        "batch.sequence_length",
        lambda view: (
            view["model.embedding.positions"] == "learned"
            and view["model.embedding.max_positions"] < view["batch.sequence_length"]
        ),
        "found {batch.sequence_length}, more than the model has learned positions"
        " ({model.embedding.max_positions}), which Fast-LLM refuses; use shorter sequences, or more"
        " positions",
        Effect.STOPS,
        "models/gpt/config.py: GPTTrainerConfig._validate",
        until="0.4.0",
        needs=("batch.sequence_length", "model.embedding.max_positions"),
        name="sequences-longer-than-the-positions",
    ),
    Check(
        "data.micro_batch_size",
        _has_odd_tokens,
        f"found {{data.micro_batch_size}} tokens, which schedule.micro_batch_splits and {SPLIT} cannot"
        " split: the first step stops; expected a multiple of their product",
        Effect.STOPS,
        "data/document/language_model.py: LanguageModelBatch.get_model_inputs",
        since="0.4.0",
        needs=("data.micro_batch_size",),
        name="tokens-no-multiple-of-the-splits",
    ),
)
"""Assertions of Fast-LLM's config classes and dimensions. Names such as `model.ffn` are plan fields,
which a model has in any release's layout.
"""


def inspect(config: Config) -> Iterator[Finding]:
    """Yield findings on settings of a config whose effect in a run is not what their names say."""
    values = {**facts(config.effective), **config.effective.flat()}
    yield from CHECKS.remarks(Seen(values, config.given, config.context), config.origins)
    view = Seen(config.effective, config.given, config.context)
    for remarks in (
        _check_stages,
        _check_buffers,
        _check_formats,
        _check_debug,
        _check_ranks,
        _check_microbatches,
        _check_rate,
    ):
        yield from report_remarks(remarks(config), view, config.origins)


def _check_stages(config: Config) -> Iterator[Remark]:
    path, values = STAGES + "layers_per_stage", config.effective
    size = values[path]
    if path in config.given and size != int(size):
        yield (
            path,
            f"found {size:g}, which has the effect of {ceil(size)}: a stage ends at the first whole layer",
            Effect.NONE,
        )
    layers = facts(values).get("model.layers")
    if layers and (stages := stages_of(layers, size)) < values[PIPELINE]:
        message = (
            f"{layers} layers make {stages} stages, fewer than {values[PIPELINE]} pipeline"
            " ranks: Fast-LLM refuses the model; set fewer layers per stage, or fewer pipeline ranks"
        )
        yield path, message, Effect.STOPS
    if values[STAGES + "pipeline_delay"]:
        yield STAGES + "pipeline_delay", "has no effect in any release; drop it", Effect.NONE


EMBEDDING = 1000
"""Number of layers that the embedding counts as, so large that it fills a stage of its own
(language_model/embedding.py, layer_count).
"""


def stages_of(layers: int, size: float) -> int:
    """Return the number of stages of a model with an embedding, `layers` blocks and a head, for
    `size` layers per stage (multi_stage.py, _split_into_stages).
    """
    blocks_and_head = layers + 1
    # Only a size beyond the embedding's cost leaves room for other layers in the first stage.
    beside = min(blocks_and_head, max(0, ceil(size - EMBEDDING)))
    return 1 + ceil((blocks_and_head - beside) / ceil(size))


def _check_buffers(config: Config) -> Iterator[Remark]:
    at, values = release(config.version), config.effective
    for path, count in buffers_of_level(values.get(STAGES + "zero_stage")).items():
        if at.overwrites_buffers and config.given.get(path, count) != count:
            message = (
                f"overwritten with {count} by zero_stage {values[STAGES + 'zero_stage']} in {at.version};"
                " keep one of the two settings"
            )
            yield path, message, Effect.COST
    steps = (
        values.get(("batch." if at.has_batch else "schedule.") + "depth_first_micro_batches") or 1
    )
    alone = data_ranks(values) == 1 and values[RANKS + "sequence_data_parallel"] == 1
    if not at.since("0.4.0+20260720") and values.get(GRADS) is not None and steps > 1 and alone:
        message = (
            f"with shared gradient buffers on one data rank, {at.version} keeps only the last"
            f" of {steps} microbatches' gradients (issue 550); drop num_grad_buffers and zero_stage,"
            " or use breadth-first microbatches"
        )
        yield GRADS, message, Effect.NUMBERS


def _check_formats(config: Config) -> Iterator[Remark]:
    values = config.effective
    compute = values.get(RANKS + "compute_dtype") or values.get(RANKS + "training_dtype")
    master = values[RANKS + "optimization_dtype"]
    if values[STAGES + "full_precision_gradients"] is False and compute == "bfloat16":
        yield (
            STAGES + "full_precision_gradients",
            "found false: gradients are summed in bfloat16, which Fast-LLM advises against; set true",
            Effect.ROUNDING,
        )
    frozen = STAGES + "store_frozen_weights_in_optimization_precision"
    if values.get(frozen) is False and compute != master:
        yield (
            frozen,
            "found false: a model with frozen and trained weights fails when it is built; set true",
            Effect.STOPS,
        )


def _check_debug(config: Config) -> Iterator[Remark]:
    path, values = STAGES + "debug_tensor_parallel", config.effective
    if values[path] and values[SEQUENCE_TENSOR]:
        yield (
            path,
            "reports a difference for every layer whose output sequence_tensor_parallel splits; "
            "switch off debug_tensor_parallel or sequence_tensor_parallel",
            Effect.NONE,
        )


def _check_ranks(config: Config) -> Iterator[Remark]:
    settings = config.given
    if settings.get(SEQUENCE_TENSOR) and config.effective[TENSOR] == 1:
        yield (
            SEQUENCE_TENSOR,
            "Fast-LLM switches this setting off, because tensor_parallel is 1; drop it",
            Effect.NONE,
        )
    world_size = config.world_size
    if world_size is not None and settings.get(WORLD) is not None and settings[WORLD] != world_size:
        yield (
            WORLD,
            f"the file has {settings[WORLD]} and the run has {world_size} ranks; "
            "Fast-LLM uses the value in the file; drop it",
            Effect.NUMBERS,
        )


def _check_microbatches(config: Config) -> Iterator[Remark]:
    values, section = (
        config.effective,
        "batch." if release(config.version).has_batch else "schedule.",
    )
    depth, breadth = (
        values.get(f"{section}{way}_first_micro_batches") or 1 for way in ("depth", "breadth")
    )
    ranks = values[PIPELINE]
    if ranks > 1 and depth > 1:
        path = section + "depth_first_micro_batches"
        yield (
            path,
            f"{depth} depth-first rounds do not overlap and leave pipeline ranks idle; use breadth-first microbatches",
            Effect.COST,
        )
    elif depth * breadth * (values.get("schedule.micro_batch_splits") or 1) < ranks:
        path = section + "breadth_first_micro_batches"
        yield (
            path,
            f"{depth * breadth} microbatches leave some of {ranks} pipeline ranks idle; use"
            " more microbatches",
            Effect.COST,
        )


def _check_rate(config: Config) -> Iterator[Remark]:
    """Yield findings on learning-rate schedules with which training fails at its start
    (optimizer/learning_rate.py, create_schedule_from_config).
    """
    values: Values = config.effective
    if (text := values.get(TEXT_SCHEDULE)) is not None:
        # The rate after the warmup, said once more, is no other than the text's.
        base = values.get(RATE + "base")
        peak = RATE + "base" if text_schedule.read_peak(text) == base else ""
        for path in config.given:
            if path.startswith(RATE) and path not in (TEXT_SCHEDULE, peak):
                yield (
                    path,
                    "has no effect: optimizer.learning_rate.schedule replaces it; drop it",
                    Effect.NONE,
                )
        if not config.context.since(text_schedule.READ_SINCE):
            yield (
                TEXT_SCHEDULE,
                "Fast-LLM before 0.3.0 reads no schedule as text: training fails at its start; describe the"
                " schedule by decay_style, or use Fast-LLM 0.3.0",
                Effect.STOPS,
            )
        return
    style, end, warmup = (
        values[RATE + "decay_style"],
        values.get(RATE + "decay_iterations"),
        values[RATE + "warmup_iterations"],
    )
    if style not in STYLES:
        yield (
            RATE + "decay_style",
            f"found {style}: training fails at its start; expected one of {', '.join(STYLES)}",
            Effect.STOPS,
        )
    elif style != "constant" and end is None:
        yield (
            RATE + "decay_iterations",
            f"missing: with decay_style {style}, training fails at its start; set decay_iterations",
            Effect.STOPS,
        )
    elif end is not None and end <= warmup:
        yield (
            RATE + "decay_iterations",
            f"found {end}: training fails at its start; expected more than warmup_iterations ({warmup})",
            Effect.STOPS,
        )
