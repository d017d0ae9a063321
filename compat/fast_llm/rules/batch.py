"""Rules that convert Fast-LLM's batch to the plan's batch, and back. Fast-LLM sets the microbatch
in tokens since 0.4.0, and in sequences before.
"""

from __future__ import annotations

from math import prod

from bridge.stack.rules import Context, Effect, Group, convert
from compat.fast_llm.effective import (
    BREADTH,
    DEPTH,
    LENGTH,
    MICRO,
    ORDER,
    PIPELINE,
    SPLIT,
    STEPS,
    TENSOR,
    TOTAL,
    WORLD,
)

TOKENS, DOCUMENT = "data.micro_batch_size", "data.maximum_document_length"
ROUNDS, TOGETHER = ORDER + "depth_first_micro_batches", ORDER + "breadth_first_micro_batches"
USUAL = 2048
"""Number of tokens in a sequence if a plan does not set it. All releases have this default."""
AXES = (TENSOR, PIPELINE, SPLIT)


def _product(*sizes: int | None) -> int:
    """Return the product of the sizes. None counts as 1."""
    return prod(size or 1 for size in sizes)


def _read_batch(values: Group, context: Context) -> Group:
    depth, breadth = _count_rounds(values, context)
    micro, sequence = (
        _count_samples(values)
        if context.since("0.4.0")
        else (values.get(MICRO), values.get(LENGTH))
    )
    steps = depth * breadth if depth and breadth else values.get(STEPS)
    total, data = values.get(TOTAL), None
    if values.get(WORLD):
        data = values[WORLD] // _product(*map(values.get, AXES)) or None
    if data is None and total and micro and steps:
        # Without a world size, the global batch tells how many data ranks there are.
        data = total // (micro * steps) or None
    return {
        "batch.micro": micro,
        "batch.accumulation": steps,
        "batch.global_": micro * steps * data if micro and steps and data else values.get(TOTAL),
        "parallel.data": data,
        "model.sequence": sequence,
    }


def _count_rounds(values: Group, context: Context) -> tuple[int | None, int | None]:
    """Return the number of depth-first and the number of breadth-first microbatches. A number that
    is not set is None.
    """
    depth, breadth = (ROUNDS, TOGETHER) if context.since("0.4.0") else (DEPTH, BREADTH)
    return values.get(depth), values.get(breadth)


def _count_samples(values: Group) -> tuple[int, int]:
    """Return the number of sequences in a microbatch, and the number of tokens in each sequence.

    If the maximum length of a document divides the microbatch, a sequence has the length of such a
    document. Otherwise the whole microbatch is one sequence.
    """
    tokens, document = values.get(TOKENS) or USUAL, values.get(DOCUMENT)
    whole = document is not None and 0 < document <= tokens and tokens % document == 0
    length = document if whole and document else tokens
    return tokens // length, length


def _write_batch(values: Group, context: Context) -> Group:
    batch = _write_newest(values) if context.since("0.4.0") else _write_old(values)
    data, world = values.get("parallel.data"), None
    if data:
        axes = (values.get(f"parallel.{axis}") for axis in ("tensor", "pipeline", "context"))
        world = data * _product(*axes)
    # The launcher passes the number of ranks to Fast-LLM, so the file repeats it only if it is
    # another one.
    return {**batch, WORLD: None if world == context.world_size else world}


def _write_newest(values: Group) -> Group:
    micro, sequence = values.get("batch.micro"), values.get("model.sequence")
    if micro is None and sequence is None:
        return {}
    # Fast-LLM stops if documents may be longer than the learned positions (models/gpt/config.py:
    # GPTTrainerConfig._validate).
    learned = values.get("model.embedding.positions") == "learned"
    reach = values.get("model.embedding.max_positions") if learned else None
    length = sequence or min(USUAL, reach or USUAL)
    # Documents of at most that length, and a microbatch that is a multiple of it: that reads back
    # as the same sequences.
    return {TOKENS: (micro or 1) * length, DOCUMENT: length}


def _write_old(values: Group) -> Group:
    micro, steps = values.get("batch.micro"), values.get("batch.accumulation")
    # With both known the total follows, on any number of ranks. Written too, it would be refused on
    # another number.
    open_ = micro is None or steps is None
    return {
        MICRO: micro,
        LENGTH: values.get("model.sequence"),
        TOTAL: values.get("batch.global_") if open_ else None,
    }


def _read_order(values: Group, context: Context) -> Group:
    depth, breadth = _count_rounds(values, context)
    return {"schedule.depth_first": depth, "schedule.breadth_first": breadth}


def _write_order(values: Group, context: Context) -> Group:
    """Write the numbers of depth-first and breadth-first microbatches.

    If the plan does not set a valid pair, the microbatches are all breadth-first with a pipeline,
    and all depth-first without one, as in Fast-LLM before 0.4.0.
    """
    new, has_pipeline = context.since("0.4.0"), (values.get("parallel.pipeline") or 1) > 1
    steps, depth, breadth = (
        values.get(path)
        for path in ("batch.accumulation", "schedule.depth_first", "schedule.breadth_first")
    )
    if has_pipeline and not new and (depth or 1) > 1:  # Fast-LLM before 0.4.0 refuses that
        depth = breadth = None
    # The accumulation of the plan decides; an order that does not multiply to it is replaced.
    if steps is not None and (depth is None or breadth is None or depth * breadth != steps):
        depth, breadth = (1, steps) if has_pipeline else (steps, 1)
    return {ROUNDS if new else DEPTH: depth, TOGETHER if new else BREADTH: breadth}


RULES = (
    convert(
        (TOKENS, DOCUMENT, MICRO, STEPS, TOTAL, LENGTH, WORLD),
        ("batch.micro", "batch.accumulation", "batch.global_", "parallel.data", "model.sequence"),
        _read_batch,
        _write_batch,
        sees=(
            *AXES,
            ROUNDS,
            TOGETHER,
            DEPTH,
            BREADTH,
            "parallel.tensor",
            "parallel.pipeline",
            "parallel.context",
            "model.embedding.positions",
            "model.embedding.max_positions",
        ),
        blurs=lambda values: (
            values.get(DOCUMENT) is not None and _count_samples(values)[1] != values[DOCUMENT]
        ),
        carries={
            TOKENS: ("batch.micro", "model.sequence"),
            # The length of a sequence is said by this alone; how many there are, by both.
            DOCUMENT: "model.sequence",
            **dict.fromkeys((ROUNDS, TOGETHER, DEPTH, BREADTH, STEPS), "batch.accumulation"),
            MICRO: "batch.micro",
            TOTAL: ("batch.global_", "parallel.data"),
            LENGTH: "model.sequence",
            WORLD: "parallel.data",
        },
        lossy="Fast-LLM fills microbatches with packed documents: a fixed sequence length becomes the largest length"
        " of a document",
        source="data/dataset/config.py: micro_batch_size in tokens; schedule/config.py: the batch section before 0.4.0",
    ),
    convert(
        (ROUNDS, TOGETHER, DEPTH, BREADTH),
        ("schedule.depth_first", "schedule.breadth_first"),
        _read_order,
        _write_order,
        effect=Effect.COST,
        sees=("batch.accumulation", "parallel.pipeline"),
        carries={
            **dict.fromkeys((ROUNDS, DEPTH), "schedule.depth_first"),
            **dict.fromkeys((TOGETHER, BREADTH), "schedule.breadth_first"),
        },
        note="the order of a step's microbatches; "
        "the number of depth-first times the number of breadth-first microbatches is "
        "the number of gradient accumulation steps",
        source="schedule/schedule.py: order of steps; schedule/config.py before 0.4.0: how the batch is divided",
    ),
)
