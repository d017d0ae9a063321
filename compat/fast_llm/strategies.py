"""Hypothesis strategies for Fast-LLM configs: sizes that fit the ranks, valid batches, and each
release's keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from bridge.stack.rules import Context
from bridge.testing.strategies import Group, StrategyCase, StrategyPart
from compat.fast_llm.effective import (
    BREADTH,
    DEPTH,
    GRADS,
    LENGTH,
    LEVEL,
    MICRO,
    NODE,
    PART as PIECE,
    RANK,
    STEPS,
    TOTAL,
    WEIGHTS,
    WORLD,
)
from compat.fast_llm.releases import release
from compat.fast_llm.rules.batch import AXES, DOCUMENT, ROUNDS, TOGETHER, TOKENS
from compat.fast_llm.rules.intervals import CHECKPOINT, FOLDER, LOGS, PLACE, SHUTDOWN, WANDB
from compat.fast_llm.rules.learning_rate import (
    BASE as PEAK,
    DECAYS,
    END,
    STEPS as RUN,
    STYLE,
    TEXT,
    WARMUP,
)
from compat.fast_llm.rules.model import BASE, layout_of
from compat.fast_llm.rules.model.writing import write
from compat.fast_llm.rules.run_length import TIMEOUTS
from compat.fast_llm.signatures import SIMPLE, WITHIN, bags, fields_at

SMALL = st.integers(1, 8)
LENGTHS = st.sampled_from((768, 1536, 3072))
"""Sequence lengths that are a multiple of every generated number of ranks."""


@st.composite
def core(draw: DrawFn, case: StrategyCase) -> Sequence[Group]:
    """Draw a valid config: axes and batch first, then groups of settings that fit them."""
    world = case.world_size or draw(st.sampled_from((1, 2, 4, 8, None)))
    axes = _axes(draw, world)
    data = (world or 0) // (axes[AXES[0]] * axes[AXES[1]] * axes[AXES[2]])
    launch: Group = {}
    if world is not None and draw(st.booleans()):
        # Settings that the launcher makes otherwise; a tensor group stays within a node.
        nodes = [
            ranks
            for ranks in range(1, world + 1)
            if world % ranks == 0 and ranks % axes[AXES[0]] == 0
        ]
        launch = {
            WORLD: world,
            RANK: draw(st.integers(0, world - 1)),
            NODE: draw(st.sampled_from(nodes)),
        }
    batch = _old_batch(draw, data) if release(case.version).has_batch else _new_batch(draw)
    return [{**launch, **axes}, batch, *(draw(choice) for choice in CHOICES)]


def _axes(draw: DrawFn, world: int | None) -> dict[str, int]:
    ranks, sizes = world or draw(st.sampled_from((1, 2, 4, 8))), {}
    for axis in AXES:
        sizes[axis] = draw(st.sampled_from([size for size in (1, 2, 3, 4, 8) if ranks % size == 0]))
        ranks //= sizes[axis]
    return sizes


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
    accumulation = {STEPS: steps} if draw(st.booleans()) else {}
    return {**batch, **accumulation, LENGTH: length, PIECE: length // draw(st.sampled_from((1, 2)))}


_SHARDING: SearchStrategy[Group] = st.one_of(
    st.fixed_dictionaries({LEVEL: st.sampled_from((1, 2, 3))}),
    st.fixed_dictionaries({}, optional={WEIGHTS: SMALL, GRADS: SMALL}),
    st.fixed_dictionaries({LEVEL: st.just(2), WEIGHTS: SMALL}),
)
_RATE: SearchStrategy[Group] = st.one_of(
    st.just({}),
    st.tuples(st.sampled_from((*DECAYS, "power")), SMALL, SMALL).map(
        lambda values: {STYLE: values[0], WARMUP: values[1], END: values[1] + values[2]}
    ),
)
LASTS = ("linear,{},{},{}", "cosine,{},{},{}", "power,{},{},{},0.5", "power,{},{},{},3.0")


@st.composite
def _text(draw: DrawFn) -> Group:
    """Draw a learning-rate schedule as text: warmup, constant, decay."""
    peak, end = draw(st.floats(1e-5, 1e-2)), draw(st.floats(0, 1e-6))
    up, stay, down = (draw(SMALL) for _ in range(3))
    last = draw(st.sampled_from(LASTS)).format(down, peak, end)
    run = draw(st.sampled_from((up + stay + down, 1000)))
    # The rates of a text are absolute, whatever the base is.
    base = draw(st.sampled_from((peak, 1.0)))
    return {TEXT: f"linear,{up},0.0,{peak};constant,{stay},{peak};{last}", PEAK: base, RUN: run}


_COURSE: SearchStrategy[Group] = st.just({}) | st.fixed_dictionaries(
    {
        CHECKPOINT: st.sampled_from(
            ({"interval": 100}, {"interval": 50, "keep": 3}, {"interval": 100, "keep": None})
        ),
        FOLDER: st.sampled_from((PLACE, "runs")),
    },
    optional={
        SHUTDOWN: st.just({"interval": 200}),
        WANDB: st.just({"project_name": "a", "entity_name": "b"}),
        LOGS: st.sampled_from(({"interval": 10}, {"interval": None})),
    },
)

CHOICES = (_SHARDING, _RATE | _text(), _COURSE)

RESERVED = (
    CHECKPOINT,
    SHUTDOWN,
    *AXES,
    WORLD,
    RANK,
    NODE,
    TOKENS,
    DOCUMENT,
    ROUNDS,
    TOGETHER,
    MICRO,
    DEPTH,
    BREADTH,
    STEPS,
    TOTAL,
    LENGTH,
    PIECE,
)
"""Keys that are drawn together with other keys, because they depend on the number of ranks, on the
batch, or on each other.
"""


_SHARES = st.sampled_from((0.0, 0.1, 0.25))
_FLAGS = st.booleans()
_STD = st.sampled_from((0.006, 0.01, 0.02))


def _rotary() -> SearchStrategy[Group]:
    """Draw rotary positions, plain or scaled."""
    base = {"base": st.sampled_from((10000.0, 500000.0))}
    scaling = {
        "scaling.factor": st.sampled_from((4.0, 8.0)),
        "scaling.original": st.sampled_from((4096, 8192)),
    }
    llama = {
        "scaling.kind": st.just("llama3"),
        "scaling.low": st.just(1.0),
        "scaling.high": st.just(4.0),
    }
    ramp = {
        "scaling.fast": st.just(32.0),
        "scaling.slow": st.just(1.0),
        "scaling.attention": st.just(1.2),
    }
    yarn = {"scaling.kind": st.just("yarn"), **ramp}
    strategies = []
    for kind in ({**base}, {**base, **scaling, **llama}, {**base, **scaling, **yarn}):
        fields: dict[str, SearchStrategy[Any]] = {
            f"model.rotary.{name}": strategy for name, strategy in kind.items()
        }
        strategies.append(
            st.fixed_dictionaries({"model.embedding.positions": st.just("rotary"), **fields})
        )
    return st.one_of(*strategies)


_POSITIONS = _rotary() | st.fixed_dictionaries(
    {
        "model.embedding.positions": st.sampled_from(("learned", "none")),
        "model.embedding.max_positions": st.just(4096),
    }
)
_WINDOW: SearchStrategy[Group] = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {"model.attention.window": st.just(512)},
        optional={"model.attention.windowed": st.just((True, False) * 12)},
    ),
)
_EXPERTS = st.fixed_dictionaries(
    {
        "model.experts": st.sampled_from((8, 16)),
        "model.moe.ffn": st.sampled_from((256, 512)),
        "model.moe.top_k": st.sampled_from((1, 2, 4)),
        "model.moe.shared_ffn": st.sampled_from((0, 512)),
        "model.moe.balance": st.sampled_from(("none", "batch", "sinkhorn")),
        "model.moe.aux_loss": st.sampled_from((0.01, 0.02)),
        "model.moe.z_loss": st.sampled_from((0.0, 0.001)),
        "model.mlp.bias": st.just(False),
    },
    optional={"model.moe.layers": st.just((False, True, True) * 8)},
)
_NORM = st.fixed_dictionaries(
    {
        "model.norm.kind": st.sampled_from(("layer", "rms")),
        "model.norm.eps": st.sampled_from((1e-5, 1e-6)),
        "model.norm.zero_centred": _FLAGS,
        "model.norm.place": st.sampled_from(("before", "before", "after", "both")),
    }
)
_BESIDE = st.fixed_dictionaries(
    {},
    optional={
        "model.attention.qkv_bias": _FLAGS,
        "model.attention.output_bias": _FLAGS,
        "model.attention.norm": st.sampled_from(("none", "head")),
        "model.attention.scale": st.sampled_from((0.0625, 0.125, 0.25)),
        "model.attention.dropout": _SHARES,
        "model.dropout": _SHARES,
        "model.mlp.gated": _FLAGS,
        "model.mlp.activation": st.sampled_from(("gelu_tanh", "silu", "relu", "squared_relu")),
        "model.embedding.dropout": _SHARES,
        "model.embedding.scale": st.just(8.0),
        "model.embedding.softcap": st.just(30.0),
        "model.embedding.logit_scale": st.just(0.5),
        "model.init.std": _STD,
        "model.init.scaled": _FLAGS,
        "parallel.vocabulary": _FLAGS,
        "precision.residual": st.just("fp32"),
        "optimizer.embedding_lr": st.just(0.5),
        "optimizer.output_lr": st.just(2.0),
        "recompute.modules": st.just(("mlp", "experts")),
        "recompute.granularity": st.just("selective"),
        "adapters.rank": st.sampled_from((8, 16)),
        "adapters.alpha": st.just(16.0),
        "adapters.dropout": _SHARES,
    },
)


@st.composite
def _model(draw: DrawFn, case: StrategyCase) -> dict[str, Any]:
    """Draw a model section in the form that is written for a plan, sometimes with further settings
    that no plan field stands for.
    """
    heads = draw(st.sampled_from((8, 16)))
    sizes = {
        "model.layers": 24,
        "model.hidden": 64 * heads,
        "model.heads": heads,
        "model.kv_heads": draw(st.sampled_from((8, heads))),
        "model.attention.head_size": draw(st.sampled_from((64, 128))),
        "model.ffn": 256 * draw(SMALL),
        "model.vocab": 1000 * draw(SMALL),
        "model.tied": draw(st.booleans()),
    }
    paths = draw(st.sets(st.sampled_from(sorted(sizes)), min_size=4))
    groups = [
        draw(group) for group in (_POSITIONS, _WINDOW, _NORM, _BESIDE, st.just({}) | _EXPERTS)
    ]
    facts = {
        path: value for group in groups if draw(st.integers(0, 3)) for path, value in group.items()
    }
    section: dict[str, Any] = dict(
        write({**{path: sizes[path] for path in paths}, **facts}, Context(case.version))[BASE]
    )
    if layout_of(Context(case.version)) == "newest" and not draw(st.integers(0, 3)):
        more = {
            "cross_entropy_splits": draw(st.integers(1, 4)),
            "prediction_heads": draw(st.integers(1, 2)),
        }
        section["head"] = {**section.get("head", {}), **more}
    return section


OWN: Mapping[str, SearchStrategy[Any]] = {
    # No smaller limits: another stack counts minutes, in which the smallest floats are 0.
    **dict.fromkeys(TIMEOUTS, st.floats(1e-3, 1e6)),
    STYLE: st.sampled_from(("constant", "linear", "cosine", "power")),
    "optimizer.learning_rate.schedule": st.just("linear,10,0.0,1e-3;constant,-1,1e-3"),
}
"""Strategies for fields whose type alone does not determine the form of their values."""


def paths(case: StrategyCase) -> Iterable[str]:
    """Return the keys of the release."""
    return sorted(release(case.version).keys)


def values(case: StrategyCase, path: str) -> SearchStrategy[Any] | None:
    """Return a strategy for a field whose type alone does not determine its values; None for other
    fields.
    """
    if path == BASE:
        return _model(case)
    if path in OWN:
        return OWN[path]
    return _bag(case, path) if path in bags(case.version) else None


PLAIN: Mapping[str, SearchStrategy[Any]] = {
    "int": st.integers(2, 8),
    "float": st.floats(1, 2),
    "bool": st.booleans(),
    "str": st.sampled_from(("a", "b c")),
}


def _bag(case: StrategyCase, path: str) -> SearchStrategy[Any] | None:
    """Draw a section that takes any keys, with one plain field of the section's class."""
    has_names, own_fields = fields_at(path, case.version)
    if not own_fields and not has_names:
        return None
    entry = st.sampled_from(sorted(own_fields.items())).flatmap(_one) if own_fields else st.just({})
    return (
        st.dictionaries(st.sampled_from("abc"), entry, min_size=1, max_size=2)
        if has_names
        else entry
    )


def _one(field: tuple[str, str]) -> SearchStrategy[Any]:
    name, kind = field
    plain = SIMPLE.fullmatch(kind)
    assert plain is not None
    strategy = PLAIN[plain[1]]
    sound = strategy.filter(
        lambda value: plain[2] is None or WITHIN[plain[2]](value, float(plain[3]))
    )
    return sound.map(lambda value: {name: value})


BESIDE: Mapping[str, Group] = {"run.tensor_logs.save": {"run.experiment_dir": "runs"}}
"""For each field that requires other settings: these settings."""

UNSETTABLE = {
    "model.multi_stage.stages_per_pipeline_stage": "takes nothing but 1",
    "schedule.estimate_critical_batch": "takes nothing but false",
}

PART = StrategyPart(
    core, paths, values, beside=BESIDE, reserved=RESERVED, entries=("file",), unsettable=UNSETTABLE
)
