"""Generated Fast-LLM configs: sizes that divide the ranks, batches that hold together, and what each release has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from bridge.config import nest
from bridge.testing.strategies import Case, Group, Part
from compat.fast_llm.batch import AXES, DOCUMENT, ROUNDS, TOGETHER, TOKENS
from compat.fast_llm.effective import BREADTH, DEPTH, GRADS, LENGTH, LEVEL, MICRO, NODE, RANK, STEPS, TOTAL, WEIGHTS, WORLD
from compat.fast_llm.effective import PART as PIECE
from compat.fast_llm.learning_rate import BASE as PEAK
from compat.fast_llm.learning_rate import DECAYS, END, STYLE, TEXT, WARMUP
from compat.fast_llm.learning_rate import STEPS as RUN
from compat.fast_llm.model import BASE, LAYOUTS
from compat.fast_llm.releases import release

SMALL = st.integers(1, 8)
LENGTHS = st.sampled_from((768, 1536, 3072))
"""Tokens of a sequence that any number of its ranks divides."""


@st.composite
def core(draw: DrawFn, case: Case) -> Sequence[Group]:
    """Axes and batch first, then choices that each hold together."""
    world = case.world_size or draw(st.sampled_from((1, 2, 4, 8, None)))
    axes = _axes(draw, world)
    data = (world or 0) // (axes[AXES[0]] * axes[AXES[1]] * axes[AXES[2]])
    told = _told(draw, world, axes) if world is not None and draw(st.booleans()) else {}
    batch = _old_batch(draw, data) if release(case.version).has_batch else _new_batch(draw)
    return [{**told, **axes}, batch, *(draw(choice) for choice in CHOICES)]


def _axes(draw: DrawFn, world: int | None) -> dict[str, int]:
    left, sizes = world or draw(st.sampled_from((1, 2, 4, 8))), {}
    for axis in AXES:
        sizes[axis] = draw(st.sampled_from([size for size in (1, 2, 3, 4, 8) if left % size == 0]))
        left //= sizes[axis]
    return sizes


def _told(draw: DrawFn, world: int, axes: Mapping[str, int]) -> Group:
    """What the launcher says otherwise; tensor groups stay within a node."""
    nodes = [ranks for ranks in range(1, world + 1) if world % ranks == 0 and ranks % axes[AXES[0]] == 0]
    return {WORLD: world, RANK: draw(st.integers(0, world - 1)), NODE: draw(st.sampled_from(nodes))}


def _new_batch(draw: DrawFn) -> Group:
    length = draw(LENGTHS)
    whole = {TOKENS: length * draw(SMALL), DOCUMENT: length}
    other = {TOKENS: draw(st.integers(1, 9999)), DOCUMENT: draw(st.integers(1, 9999))}
    return {**draw(st.sampled_from((whole, other, {}))), ROUNDS: draw(SMALL), TOGETHER: draw(SMALL)}


def _old_batch(draw: DrawFn, data: int) -> Group:
    micro, steps = draw(SMALL), draw(SMALL)
    total = micro * steps * max(1, data)
    length = draw(LENGTHS)
    batch = draw(
        st.sampled_from(
            (
                {MICRO: micro, TOTAL: total},
                {MICRO: micro, BREADTH: steps},
                {TOTAL: total, BREADTH: steps},
                {MICRO: micro, DEPTH: steps},
                {MICRO: micro, TOTAL: total, DEPTH: 1, BREADTH: steps},
            )
        )
    )
    counted = {STEPS: steps} if draw(st.booleans()) else {}
    return {**batch, **counted, LENGTH: length, PIECE: length // draw(st.sampled_from((1, 2)))}


_SHARDING: SearchStrategy[Group] = st.one_of(
    st.fixed_dictionaries({LEVEL: st.sampled_from((1, 2, 3))}),
    st.fixed_dictionaries({}, optional={WEIGHTS: SMALL, GRADS: SMALL}),
    st.fixed_dictionaries({LEVEL: st.just(2), WEIGHTS: SMALL}),
)
_RATE: SearchStrategy[Group] = st.one_of(
    st.just({}),
    st.tuples(st.sampled_from((*DECAYS, "power")), SMALL, SMALL).map(
        lambda drawn: {STYLE: drawn[0], WARMUP: drawn[1], END: drawn[1] + drawn[2]}
    ),
)
LASTS = ("linear,{},{},{}", "cosine,{},{},{}", "power,{},{},{},0.5", "power,{},{},{},3.0")


@st.composite
def _text(draw: DrawFn) -> Group:
    """A learning rate as text that warms up, stays and decays."""
    peak, end = draw(st.floats(1e-5, 1e-2)), draw(st.floats(0, 1e-6))
    up, stay, down = (draw(SMALL) for _ in range(3))
    last = draw(st.sampled_from(LASTS)).format(down, peak, end)
    run = draw(st.sampled_from((up + stay + down, 1000)))
    return {TEXT: f"linear,{up},0.0,{peak};constant,{stay},{peak};{last}", PEAK: peak, RUN: run}


CHOICES = (_SHARDING, _RATE | _text())

RESERVED = (*AXES, WORLD, RANK, NODE, TOKENS, DOCUMENT, ROUNDS, TOGETHER, MICRO, DEPTH, BREADTH, STEPS, TOTAL, LENGTH, PIECE)
"""What hangs on the number of ranks and on the batch."""


@st.composite
def _model(draw: DrawFn) -> dict[str, Any]:
    heads = draw(st.sampled_from((8, 16)))
    sizes = {
        "model.layers": 24 * draw(SMALL),
        "model.hidden": 64 * heads,
        "model.heads": heads,
        "model.kv_heads": draw(st.sampled_from((8, heads))),
        "model.ffn": 256 * draw(SMALL),
        "model.experts": draw(st.sampled_from((8, 16))),
        "model.vocab": 1000 * draw(SMALL),
        "model.tied": draw(st.booleans()),
    }
    places, kept = draw(st.sampled_from(LAYOUTS)), draw(st.sets(st.sampled_from(sorted(sizes))))
    told = {place: sizes[ours] for ours, place in places.items() if ours in kept}
    return {**nest(told), **draw(st.sampled_from(({}, {"type": "gpt"})))}


OWN: Mapping[str, SearchStrategy[Any]] = {
    BASE: _model(),
    STYLE: st.sampled_from(("constant", "linear", "cosine", "power")),
    "optimizer.learning_rate.schedule": st.just("linear,10,0.0,1e-3;constant,-1,1e-3"),
}
"""Values that a field takes only in a form which its type does not tell."""


def paths(case: Case) -> Iterable[str]:
    """What the release has."""
    return sorted(release(case.version).keys)


def values(case: Case, path: str) -> SearchStrategy[Any] | None:
    """Values of one field where its type is not enough."""
    return OWN.get(path)


BESIDE: Mapping[str, Group] = {"run.tensor_logs.save": {"run.experiment_dir": "runs"}}
"""What a field cannot do without."""

UNSETTABLE = {
    "model.multi_stage.stages_per_pipeline_stage": "takes nothing but 1",
    "schedule.estimate_critical_batch": "takes nothing but false",
}

PART = Part(core, paths, values, beside=BESIDE, reserved=RESERVED, entries=("file",), unsettable=UNSETTABLE)
