"""What Fast-LLM accepts and then ignores, gets wrong, or fails on later."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from bridge.checks import Remark, Seen, told
from bridge.config import Values
from bridge.dialect import Config
from bridge.findings import Finding
from bridge.rules import Effect
from compat.fast_llm.effective import (
    GRADS,
    PIPELINE,
    RANKS,
    SEQUENCE_TENSOR,
    STAGES,
    TENSOR,
    TEXT_SCHEDULE,
    WORLD,
    data_ranks,
    implied,
)
from compat.fast_llm.model import facts
from compat.fast_llm.releases import release

RATE = "optimizer.learning_rate."
STYLES = ("constant", "linear", "power", "cosine")


def inspect(config: Config) -> Iterator[Finding]:
    """Findings on `config`; each says what really happens."""
    seen = Seen(config.effective, config.given, config.context)
    for remarks in (_stages, _buffers, _formats, _debug, _ranks, _microbatches, _rate):
        yield from told(remarks(config), seen, config.origins)


def _stages(config: Config) -> Iterator[Remark]:
    path, values = STAGES + "layers_per_stage", config.effective
    size = values[path]
    if path in config.given and size != int(size):
        yield path, f"{size:g} cuts as {ceil(size)} does: a stage ends at the first whole layer", Effect.NONE
    layers = facts(values).get("model.layers")
    if layers and (stages := stages_of(layers, size)) < values[PIPELINE]:
        message = f"{layers} layers make {stages} stages, fewer than {values[PIPELINE]} pipeline ranks; the model is refused"
        yield path, message, Effect.STOPS
    if values[STAGES + "pipeline_delay"]:
        yield STAGES + "pipeline_delay", "not used by any release; drop it", Effect.NONE


EMBEDDING = 1000
"""Layers that the embedding counts for, so that it has a stage of its own (language_model/embedding.py, layer_count)."""


def stages_of(layers: int, size: float) -> int:
    """Stages of embedding, `layers` blocks and head at `size` layers each (multi_stage.py, _split_into_stages)."""
    blocks_and_head = layers + 1
    beside = min(blocks_and_head, max(0, ceil(size - EMBEDDING)))
    return 1 + ceil((blocks_and_head - beside) / ceil(size))


def _buffers(config: Config) -> Iterator[Remark]:
    at, values = release(config.version), config.effective
    for path, count in implied(values.get(STAGES + "zero_stage")).items():
        if at.overwrites_buffers and config.given.get(path, count) != count:
            message = f"replaced by {count}, which zero_stage {values[STAGES + 'zero_stage']} sets in {at.version}"
            yield path, message, Effect.COST
    steps = values.get(("batch." if at.has_batch else "schedule.") + "depth_first_micro_batches") or 1
    alone = data_ranks(values) == 1 and values[RANKS + "sequence_data_parallel"] == 1
    if not at.since("0.4.0+20260720") and values.get(GRADS) is not None and steps > 1 and alone:
        message = f"shared on one data rank, {at.version} keeps the gradient of the last of {steps} microbatches only"
        yield GRADS, message + " (issue 550); use no buffers or breadth-first microbatches", Effect.NUMBERS


def _formats(config: Config) -> Iterator[Remark]:
    values = config.effective
    compute, master = (
        values.get(RANKS + "compute_dtype") or values.get(RANKS + "training_dtype"),
        values[RANKS + "optimization_dtype"],
    )
    if values[STAGES + "full_precision_gradients"] is False and compute == "bfloat16":
        yield (
            STAGES + "full_precision_gradients",
            "gradients are summed in bfloat16, which Fast-LLM advises against",
            Effect.ROUNDING,
        )
    frozen = STAGES + "store_frozen_weights_in_optimization_precision"
    if values.get(frozen) is False and compute != master:
        yield frozen, "a model with frozen and trained weights fails when it is built; only true works", Effect.STOPS


def _debug(config: Config) -> Iterator[Remark]:
    path, values = STAGES + "debug_tensor_parallel", config.effective
    if values[path] and values[SEQUENCE_TENSOR]:
        yield path, "reports every layer as different where sequence_tensor_parallel splits its output", Effect.NONE


def _ranks(config: Config) -> Iterator[Remark]:
    given = config.given
    if given.get(SEQUENCE_TENSOR) and config.effective[TENSOR] == 1:
        yield SEQUENCE_TENSOR, "switched off without tensor groups", Effect.NONE
    told = config.world_size
    if told is not None and given.get(WORLD) is not None and given[WORLD] != told:
        yield WORLD, f"the file says {given[WORLD]} and the run has {told} ranks; Fast-LLM goes by the file", Effect.NUMBERS


def _microbatches(config: Config) -> Iterator[Remark]:
    values, section = config.effective, "batch." if release(config.version).has_batch else "schedule."
    depth, breadth = (values.get(f"{section}{way}_first_micro_batches") or 1 for way in ("depth", "breadth"))
    ranks = values[PIPELINE]
    if ranks > 1 and depth > 1:
        path = section + "depth_first_micro_batches"
        yield path, f"{depth} rounds that do not overlap keep pipeline ranks idle; use breadth-first microbatches", Effect.COST
    elif depth * breadth * (values.get("schedule.micro_batch_splits") or 1) < ranks:
        path = section + "breadth_first_micro_batches"
        yield path, f"{depth * breadth} microbatches leave some of {ranks} pipeline ranks idle", Effect.COST


def _rate(config: Config) -> Iterator[Remark]:
    """Schedules that fail when training starts (optimizer/learning_rate.py, create_schedule_from_config)."""
    values: Values = config.effective
    if values.get(TEXT_SCHEDULE) is not None:
        for path in config.given:
            if path.startswith(RATE) and path != TEXT_SCHEDULE:
                yield path, "replaced by optimizer.learning_rate.schedule", Effect.NONE
        return
    style, end, warmup = values[RATE + "decay_style"], values.get(RATE + "decay_iterations"), values[RATE + "warmup_iterations"]
    if style not in STYLES:
        yield RATE + "decay_style", f"{style} is none of {', '.join(STYLES)}; training fails at its start", Effect.STOPS
    elif style != "constant" and end is None:
        yield RATE + "decay_iterations", f"decay_style {style} needs it; training fails at its start", Effect.STOPS
    elif end is not None and end <= warmup:
        yield (
            RATE + "decay_iterations",
            f"{end} is not after the {warmup} steps of warmup; training fails at its start",
            Effect.STOPS,
        )
