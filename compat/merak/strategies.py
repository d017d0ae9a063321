"""Hypothesis strategies for Merak configs: consistent mesh sizes, batches and schedules, and every
argument of each release.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from bridge.plan.section import fields
from bridge.testing.strategies import (
    Group,
    StrategyCase,
    StrategyPart,
    values as typed_values,
    words,
)
from compat.merak.effective import OLD_SCHEDULES, SPLITS
from compat.merak.formats import kind
from compat.merak.releases import REWRITTEN, release
from compat.merak.rules.learning_rate import KWARGS, TYPE
from compat.merak.schema import Merak

Groups = SearchStrategy[Group]
AXES = ("pp", "tp", "sp")
DEGREES = ("init.pp", "init.tp", "init.dp", "init.sp")
SMALL = st.integers(1, 8)
SHARE = st.floats(0, 1).map(repr)
NAMES = st.sampled_from(("model", "data.train", "collate", "LlamaAttention"))
PLAIN_WORDS = words().filter(lambda word: not word.startswith("-"))
MICRO, STEPS = "args.per_device_train_batch_size", "args.gradient_accumulation_steps"
PARTITION = ("args.partition_method", "args.custom_partition")


def _draw_field(path: str) -> SearchStrategy[Any]:
    return typed_values(fields(Merak)[path].annotation)


def _draw_group(must: Mapping[str, SearchStrategy[Any]], *may: str) -> Groups:
    return st.fixed_dictionaries(dict(must), optional={path: _draw_field(path) for path in may})


@st.composite
def core(draw: DrawFn, case: StrategyCase) -> Sequence[Group]:
    """Draw mesh sizes and batch first, then groups of settings. The settings within each group are
    consistent.
    """
    degrees = draw(_draw_degrees(case))
    batch = draw(st.fixed_dictionaries({}, optional={MICRO: SMALL, STEPS: SMALL}))
    script = draw(_draw_script(case)) if degrees else ()
    model = draw(_draw_model(degrees))
    # A custom partition: one cut between two stages, with 0 before and the number of shards behind.
    cuts = (degrees.get("init.pp") or 2) - 1
    inner = st.lists(st.integers(0, 40), min_size=cuts, max_size=cuts)
    whole = inner.map(lambda cuts: ",".join(map(str, (0, *sorted(cuts), 48))))
    custom = st.fixed_dictionaries(
        {PARTITION[0]: st.just("custom"), PARTITION[1]: st.tuples(whole)}
    )
    cut: Group = draw(st.just({}) | custom)
    return [{**degrees, **batch}, *(draw(choice(case)) for choice in CHOICES), model, cut, *script]


@st.composite
def _draw_degrees(draw: DrawFn, case: StrategyCase) -> Group:
    """Draw the arguments of `init`; empty for a command line without a script."""
    if draw(st.sampled_from((True, False, False))):
        return {}
    rest, sizes = case.world_size or draw(st.sampled_from((1, 2, 4, 8))), {}
    for axis in AXES:
        if f"init.{axis}" in release(case.version).defaults:
            sizes[f"init.{axis}"] = draw(
                st.sampled_from([size for size in (1, 2, 3, 4, 8) if rest % size == 0])
            )
            rest //= sizes[f"init.{axis}"]
    return {**sizes, "init.dp": rest}


@st.composite
def _draw_model(draw: DrawFn, degrees: Group) -> Group:
    """Draw sizes of a model that are multiples of the mesh sizes in `degrees`, so that other stacks
    accept them too.
    """
    heads = draw(st.sampled_from((1, 2, 8))) * (degrees.get("init.tp") or 1)
    layers, width, tokens = draw(SMALL), draw(SMALL), draw(SMALL)
    facts = {
        "args.num_layers": layers * (degrees.get("init.pp") or 1),
        "args.num_heads": heads,
        "args.hidden_size": heads * 16 * width,
        "args.seq_length": 256 * tokens,
    }
    return {path: value for path, value in facts.items() if draw(st.booleans())}


def _draw_schedule(case: StrategyCase) -> Groups:
    critical = {
        "args.train_schedule": st.sampled_from(
            ("shifted_critical_path", "full_critical_path_1f1b")
        ),
        "args.activation_checkpoint_ratio": st.tuples(SHARE),
    }
    return st.just({}) | _draw_group({}, "args.train_schedule") | st.fixed_dictionaries(critical)


def _draw_precision(case: StrategyCase) -> Groups:
    scales = (
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "min_loss_scale",
        "loss_scale",
    )
    return st.one_of(
        st.just({}),
        _draw_group({"args.fp16": st.just(True)}, *(f"args.{name}" for name in scales)),
        _draw_group({"args.bf16": st.just(True)}),
        _draw_group(
            {"args.half_precision_backend": st.sampled_from(_draw_backends(case))},
            "args.fp16_opt_level",
        ),
    )


def _draw_backends(case: StrategyCase) -> tuple[str, ...]:
    return (
        ("cuda_amp", "apex", "cpu_amp")
        if release(case.version).since(REWRITTEN)
        else ("auto", "amp", "apex")
    )


def _draw_sharding(case: StrategyCase) -> Groups:
    buckets = ("args.zero_reduce_bucket_size", "args.zero_allgather_bucket_size")
    on = {"args.zero_stage": st.just(1)}
    old = (
        {} if release(case.version).since(REWRITTEN) else {"args.zero_optimization": st.booleans()}
    )
    return st.just({}) | _draw_group(
        {**on, **old}, *buckets, "args.prescale_gradients", "args.gradient_predivide_factor"
    )


SHARES = st.floats(0, 1)
RATES = ("min_lr", "lr_end")
"""Arguments that are learning rates. They are drawn as shares of the peak."""
SHAPES: Mapping[str, Groups] = {
    "polynomial": st.fixed_dictionaries(
        {}, optional={"lr_end": SHARES, "power": st.sampled_from((1.0, 2.0))}
    ),
    "cosine": st.fixed_dictionaries({}, optional={"num_cycles": st.sampled_from((0.5, 1.5))}),
    "cosine_with_restarts": st.fixed_dictionaries({}, optional={"num_cycles": SMALL}),
    "inverse_sqrt": st.fixed_dictionaries({}, optional={"timescale": SMALL}),
    "cosine_with_min_lr": st.fixed_dictionaries({"min_lr": SHARES})
    | st.fixed_dictionaries({"min_lr_rate": SHARES}),
    "warmup_stable_decay": st.fixed_dictionaries(
        {"num_stable_steps": st.integers(0, 99), "num_decay_steps": st.integers(0, 99)},
        optional={"min_lr_ratio": SHARES},
    ),
}


@st.composite
def _learning_rate(draw: DrawFn, case: StrategyCase) -> Group:
    steps = draw(
        _draw_group(
            {}, "args.warmup_steps", "args.warmup_ratio", "args.max_steps", "args.learning_rate"
        )
    )
    if not release(case.version).since(REWRITTEN):
        return {**steps, TYPE: draw(st.sampled_from(OLD_SCHEDULES))}
    name = draw(_draw_field(TYPE))
    # These arguments have to stay below the peak, so they are drawn as shares of it.
    peak = steps.get("args.learning_rate", 5e-5)
    arguments = draw(SHAPES[name]) if name in SHAPES else {}
    kwargs = {key: value * peak if key in RATES else value for key, value in arguments.items()}
    plateau = {"args.eval_strategy": "steps"} if name == "reduce_lr_on_plateau" else {}
    return {**steps, **plateau, TYPE: name, **({KWARGS: kwargs} if kwargs else {})}


@st.composite
def _draw_script(draw: DrawFn, case: StrategyCase) -> Sequence[Group]:
    """Draw settings of the script other than the mesh sizes."""
    paths = [
        path
        for path in release(case.version).defaults
        if not path.startswith("args.") and path not in DEGREES
    ]
    lists = [path for path in paths if path.startswith("tp_lists.")]
    # Objects of the script are drawn as names; their type alone would allow any text.
    objects = {}
    for path in paths:
        if path not in lists:
            own = values(case, path)
            objects[path] = _draw_field(path) if own is None else own
    enough = {
        path: _draw_field(path) for path in ("tp_lists.col_para_list", "tp_lists.row_para_list")
    }
    more = [path for path in lists if path not in enough]
    ratios = "tp_lists.input_output_mapping"
    chosen: Groups = (
        st.just({}) | _draw_group(enough, *more) | _draw_group({ratios: _draw_field(ratios)})
    )
    return [draw(st.fixed_dictionaries({}, optional=objects)), draw(chosen)]


CHOICES = (_draw_schedule, _draw_precision, _draw_sharding, _learning_rate)


def paths(case: StrategyCase) -> Iterable[str]:
    """Return the paths that the release has."""
    return tuple(release(case.version).defaults)


def values(case: StrategyCase, path: str) -> SearchStrategy[Any] | None:
    """Return a strategy for a field whose type alone is not enough to draw values; None for other
    fields.
    """
    if path.startswith("trainer."):
        return st.lists(NAMES, min_size=1, max_size=2).map(tuple) if kind(path) is tuple else NAMES
    if path == "args.split_method":
        return st.sampled_from(("min_deps", *SPLITS) if case.version == REWRITTEN else SPLITS)
    if path == "args.half_precision_backend":
        return st.sampled_from(_draw_backends(case))
    if path == "args.trace_method":
        return st.sampled_from(("fx", "dynamo", "None"))
    if path == "args.activation_checkpoint_ratio":
        return st.lists(SHARE, min_size=1, max_size=3).map(tuple)
    if path.startswith("args.") and kind(path) is tuple:
        return st.lists(PLAIN_WORDS, min_size=1, max_size=3).map(tuple)
    return OWN.get(path)


OWN: Mapping[str, SearchStrategy[Any]] = {
    "args.zero_stage": st.just(1),
    "args.partition_method": st.sampled_from(
        ("uniform", "uniform_floor", "parameters", "autopipe")
    ),
}

BESIDE: Mapping[str, Group] = {
    "args.load_best_model_at_end": {"args.eval_strategy": "steps", "args.save_strategy": "steps"}
}
"""For each field that requires other settings: these settings."""
FACTS = ("args.num_layers", "args.num_heads", "args.hidden_size", "args.seq_length")
RESERVED = ("init.", "trainer.", "tp_lists.", MICRO, STEPS, KWARGS, "args.learning_rate", *FACTS)
"""Fields that `core` draws, because they depend on the number of ranks or on other fields, and
fields of the script.
"""

PART = StrategyPart(core, paths, values, beside=BESIDE, reserved=RESERVED, entries=("arguments",))
"""The strategies of Merak."""
