"""Strategies for plans, and for configs that their stack accepts, made from annotated types, bounds and facts about releases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import prod
from random import Random
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from bridge.errors import BridgeError
from bridge.plan.plan import Plan, paths
from bridge.plan.section import fields, nest
from bridge.stack.dialect import Config, Dialect, Reader
from bridge.stack.stack_tables import StackTables

Group = Mapping[str, Any]
"""Values by path that belong together: they are tried together, and a stack accepts all of them or none."""

WORDS = "abcxyzABC019_-. /:'\"\\#$é"
WORLDS = (1, 2, 4, 8, 3, 6, 12, 16, 24, 32, 64, 96, None)
LARGE = 10**6
"""Largest number that is drawn for a field without a bound."""
EXTRAS = 64
"""Largest number of fields that are tried in addition to the core of a config."""
NEEDY = 10
"""Number of fields that are tried before all others, because they need other settings."""
# Hypothesis shrinks towards the first element, so shrinking drops fields.
KEPT = st.sampled_from((False, True, True, True))
RARE = 40
"""A field that few releases have is tried more often, but at most by this factor."""


@dataclass(frozen=True)
class StrategyCase:
    """A case for which configs are drawn: a release, a world size in ranks or None, and an entry point."""

    version: str
    world_size: int | None
    entry: str


def _nest_values(config: Config) -> Group:
    return nest(
        {
            path: list(value) if isinstance(value, tuple) else value
            for path, value in config.given.items()
        }
    )


@dataclass(frozen=True)
class StrategyPart:
    """Additions to a dialect's schema for strategies, as `PART` in the dialect's module
    `strategies`.

    - `core`: draws groups of values. The stack must accept the first; each further one stays if it
      is accepted.
    - `paths`: the fields of a case; None: all of the schema.
    - `values`: draws one field if its type is not specific enough; None: the type suffices.
    - `opaque`: fields of a case that hold live objects, which are kept unchanged.
    - `beside`: settings that a field needs. Such fields are also tried first.
    - `reserved`: paths, or beginnings up to a dot or an underscore, that only the core draws.
    - `entries`: the entry points; likelier ones are repeated.
    - `unsettable`: fields that accept nothing but their default, each with the reason.
    - `least`: settings that every config needs.

    For mutations:

    - `source`: a config as a mapping that `read` accepts.
    - `spelled`: the keys that lead to a field in that mapping, the outermost first.
    - `required`: fields without which a config is refused.
    - `stranger`: a key that the dialect does not know.
    - `coerced`: fields whose stack accepts other types for the same value.
    - `rounds`: true if a global batch that is no multiple of the microbatches of all data ranks is
      not refused, but gets a finding.
    """

    core: Callable[[StrategyCase], SearchStrategy[Sequence[Group]]] = lambda case: st.just(())
    paths: Callable[[StrategyCase], Iterable[str]] | None = None
    values: Callable[[StrategyCase, str], SearchStrategy[Any] | None] = lambda case, path: None
    opaque: Callable[[StrategyCase], tuple[str, ...]] = lambda case: ()
    beside: Mapping[str, Group] = field(default_factory=dict)
    reserved: tuple[str, ...] = ()
    entries: tuple[str, ...] = ("",)
    source: Callable[[Config], Group] = _nest_values
    spelled: Callable[[Config, str], tuple[str, ...]] = lambda config, path: tuple(path.split("."))
    required: Callable[[Config], Iterable[str]] = lambda config: ()
    stranger: str = "made_up_key"
    coerced: tuple[str, ...] = ()
    rounds: bool = False
    unsettable: Mapping[str, str] = field(default_factory=dict)
    least: Group = field(default_factory=dict)


@cache
def part_of(dialect: StackTables) -> StrategyPart:
    """Return `PART` of the module `strategies` in the dialect's package; an empty `StrategyPart` if there is no such module."""
    name = dialect.package + ".strategies"
    part: StrategyPart = import_module(name).PART if find_spec(name) else StrategyPart()
    return part


# Configs


def entries(dialect: StackTables) -> tuple[str, ...]:
    """Return the names of the entry points for which configs are drawn. The first one reads a file."""
    return tuple(dict.fromkeys(part_of(dialect).entries))


def configs(
    dialect: Dialect,
    version: str | None = None,
    world_size: int | None = None,
    entry: str | None = None,
) -> SearchStrategy[Config]:
    """Return a strategy for configs that `dialect` accepts.

    Release, world size and entry point are drawn unless given. Every field of every release differs
    from its default in some configs. No given value is None.
    """
    if version is not None:
        dialect.release(version)
    return _configs(dialect, version, world_size, entry)


@st.composite
def _configs(
    draw: DrawFn, dialect: Reader, version: str | None, world_size: int | None, entry: str | None
) -> Config:
    part = part_of(dialect)
    release = version or draw(st.sampled_from(dialect.versions[::-1]))
    world = world_size or draw(st.sampled_from(WORLDS))
    case = StrategyCase(release, world, entry or draw(st.sampled_from(part.entries)))
    first, *more = draw(part.core(case)) or [{}]
    config = dialect.config(
        _without_unknown(first, dialect, case), case.version, case.world_size, case.entry
    )
    # Fields with needs go first: later ones could only be added if they agree with those needs.
    needy, extras = draw(_fields(config, case, NEEDY)), draw(_fields(config, case, EXTRAS))
    config = grown(
        config, [_without_unknown(group, dialect, case) for group in (*needy, *more, *extras)]
    )
    return replace(
        config, opaque={path: stand_in for path in part.opaque(case) if draw(st.booleans())}
    )


def stand_in(*arguments: Any) -> None:
    """Stand in for any function that a live config contains."""


def _without_unknown(group: Group, dialect: StackTables, case: StrategyCase) -> Group:
    """Return a group without the fields and values that the release does not know."""
    return {
        path: value
        for path, value in group.items()
        if dialect.knows(path, value, case.version, case.entry)
    }


def grown(config: Config, groups: Sequence[Group]) -> Config:
    """Return `config` with all of `groups` that the stack accepts. Values that the config has do not change.

    Groups are tried together, and by halves if the stack refuses them.
    """
    more = _config_or_none(config, groups)
    if more is not None:
        return more
    if len(groups) == 1:
        return config
    half = len(groups) // 2
    return grown(grown(config, groups[:half]), groups[half:])


def _config_or_none(config: Config, groups: Sequence[Group]) -> Config | None:
    settings = dict(config.given)
    for group in groups:
        settings = {**group, **settings}
    try:
        return (
            config
            if settings == config.given
            else config.dialect.config(settings, config.version, config.world_size, config.entry)
        )
    except BridgeError:
        return None


@st.composite
def _fields(draw: DrawFn, config: Config, case: StrategyCase, count: int) -> Sequence[Group]:
    """Draw groups for some fields that are not set yet, each with the settings that the field needs."""
    part, dialect = part_of(config.dialect), config.dialect
    weights = _weights(dialect, case, count < EXTRAS)
    # By a seed, because Hypothesis's own choices are not spread evenly over the fields. Shrinking
    # can still drop each of them.
    seed = draw(st.integers(0, 2**32))
    chosen = (
        Random(seed).choices(tuple(weights), tuple(weights.values()), k=count) if weights else []
    )
    selection = [path for path in dict.fromkeys(chosen) if draw(KEPT)]
    new_values = {
        path: _off(draw, path, config, case) for path in selection if path not in config.given
    }
    return [{path: value, **part.beside.get(path, {})} for path, value in new_values.items()]


def _off(draw: DrawFn, path: str, config: Config, case: StrategyCase) -> Any:
    """Draw a value for a field. If it is the default, draw again, or take the opposite of a boolean."""
    strategy = _values(config.dialect, case, path)
    value = draw(strategy)
    if value != config.effective.get(path):
        return value
    if not isinstance(value, bool):
        return draw(strategy)
    return not value if config.dialect.knows(path, not value, case.version, case.entry) else value


@cache
def _values(dialect: StackTables, case: StrategyCase, path: str) -> SearchStrategy[Any]:
    own = part_of(dialect).values(case, path)
    return own if own is not None else values(fields(dialect.schema)[path].annotation)


def paths_of(dialect: StackTables, case: StrategyCase) -> tuple[str, ...]:
    """Return the fields that the release has at the entry point of a case."""
    own = part_of(dialect).paths
    return tuple(fields(dialect.schema)) if own is None else tuple(own(case))


@cache
def _weights(dialect: StackTables, case: StrategyCase, needy: bool) -> Mapping[str, float]:
    """Return a weight for each field of a case. The weight is higher if fewer releases have the field."""
    spread, part = _spread(dialect, case.entry), part_of(dialect)
    begins = tuple(begin for begin in part.reserved if begin.endswith((".", "_")))
    weights: dict[str, float] = {}
    for path in paths_of(dialect, case):
        is_reserved = path in part.reserved or path.startswith(begins)
        if not is_reserved and (path in part.beside or not needy):
            weights[path] = min(RARE, len(dialect.versions) / spread[path])
    return weights


@cache
def _spread(dialect: StackTables, entry: str) -> Mapping[str, int]:
    """Return the number of releases that have each field."""
    counts: dict[str, int] = {}
    for version in dialect.versions:
        for path in paths_of(dialect, StrategyCase(version, None, entry)):
            counts[path] = counts.get(path, 0) + 1
    return counts


# Values of a type


def values(annotation: Any) -> SearchStrategy[Any]:
    """Return a strategy for the values of an annotated type, within its bounds and without None."""
    return _of(annotation, ())


def _of(annotation: Any, bounds: tuple[Any, ...]) -> SearchStrategy[Any]:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        # Bounds stand among the metadata, or inside a pydantic field that is a part of them.
        own = tuple(
            bound for item in inside[1:] for bound in (item, *getattr(item, "metadata", ()))
        )
        return _of(inside[0], (*own, *bounds))
    if origin in (Union, UnionType):
        return st.one_of([_of(part, bounds) for part in inside if part is not NoneType])
    if origin is Literal:
        return st.sampled_from(inside)
    if origin is tuple and inside[-1] is Ellipsis:
        return st.lists(_of(inside[0], ()), min_size=1, max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(_of(part, ()) for part in inside))
    if origin is list:
        return st.lists(_of(inside[0], ()), min_size=1, max_size=3)
    return _plain(origin or annotation, bounds)


def _plain(kind: Any, bounds: tuple[Any, ...]) -> SearchStrategy[Any]:
    if kind is bool:
        return st.booleans()
    if kind is int:
        return _whole(bounds)
    if kind is float:
        return _real(bounds)
    if kind is str:
        return words()
    return (
        st.dictionaries(st.sampled_from(("a", "b c", "d")), _free(), min_size=1)
        if kind is dict
        else _free()
    )


def words() -> SearchStrategy[str]:
    """Return a strategy for short texts, never empty, with characters that need quoting."""
    return st.text(WORDS, min_size=1, max_size=8)


def _free() -> SearchStrategy[Any]:
    return st.one_of(
        st.booleans(),
        st.integers(0, 99),
        st.floats(0, 1),
        words(),
        st.lists(st.integers(0, 9), max_size=2),
    )


def _least(bounds: tuple[Any, ...]) -> float | None:
    limits: list[Any] = [
        bound.ge if isinstance(bound, Ge) else bound.gt
        for bound in bounds
        if isinstance(bound, Ge | Gt)
    ]
    return max(limits, default=None)


def _most(bounds: tuple[Any, ...]) -> float | None:
    limits: list[Any] = [
        bound.le if isinstance(bound, Le) else bound.lt
        for bound in bounds
        if isinstance(bound, Le | Lt)
    ]
    return min(limits, default=None)


def _whole(bounds: tuple[Any, ...]) -> SearchStrategy[int]:
    least, most = _least(bounds), _most(bounds)
    low = -8 if least is None else int(least)
    if least is not None and Gt(least) in bounds:
        low += 1
    high = LARGE if most is None else int(most)
    if most is not None and Lt(most) in bounds:
        high -= 1
    # Small numbers are the usual ones, and edges of ranges are where mistakes are.
    return (
        st.integers(low, min(high, low + 8))
        | st.integers(low, min(high, low + 64))
        | st.integers(low, high)
    )


def _real(bounds: tuple[Any, ...]) -> SearchStrategy[float]:
    least, most = _least(bounds), _most(bounds)
    return st.floats(
        -LARGE if least is None else least,
        LARGE if most is None else most,
        exclude_min=least is not None and Gt(least) in bounds,
        exclude_max=most is not None and Lt(most) in bounds,
        allow_subnormal=False,
    )


# Plans

AXES = ("parallel.data", "parallel.tensor", "parallel.pipeline", "parallel.context")
SIZES: Mapping[str, SearchStrategy[Any]] = {
    **dict.fromkeys(
        (*AXES, "parallel.expert", "parallel.expert_tensor"), st.sampled_from((1, 2, 4, 8, 3))
    ),
    **dict.fromkeys(
        ("batch.micro", "batch.accumulation", "schedule.virtual", "recompute.layers"),
        st.integers(1, 8),
    ),
    "model.layers": st.integers(1, 96),
    "model.hidden": st.integers(1, 64).map(lambda count: 192 * count),
    **dict.fromkeys(
        ("model.heads", "model.kv_heads", "model.experts"), st.sampled_from((24, 48, 96))
    ),
    "model.sequence": st.integers(1, 64).map(lambda count: 48 * count),
    "optimizer.lr": st.floats(1e-5, 1e-2),
    **dict.fromkeys(
        ("optimizer.schedule.minimum", "optimizer.schedule.warmup_from"), st.floats(0, 1e-6)
    ),
}
"""Realistic sizes and rates for fields whose types would allow far larger values."""


@st.composite
def plans(draw: DrawFn) -> Plan:
    """Return a strategy for plans with any fields set, in which batch sizes and stage boundaries fit together."""
    chosen = [path for path in paths() if draw(KEPT)]
    flat = {path: draw(SIZES.get(path, values(paths()[path].annotation))) for path in chosen}
    # The global batch follows from the other sides, and is not set if one of them is not.
    sides = [flat.get(side) for side in ("batch.micro", "batch.accumulation", "parallel.data")]
    factors = [side for side in sides if side is not None]
    whole = prod(factors) if len(factors) == len(sides) else None
    return Plan.of({**flat, "batch.global_": whole, **_boundaries(draw, flat)})


def _boundaries(draw: DrawFn, flat: Group) -> Group:
    """Draw boundaries of stages that cover all layers, if the plan has layers and a pipeline."""
    layers, ranks = flat.get("model.layers"), flat.get("parallel.pipeline")
    if "stages.boundaries" not in flat or layers is None or ranks is None:
        return {"stages.boundaries": None}
    cuts = ranks * (flat.get("schedule.virtual") or 1) - 1
    inner = sorted(draw(st.lists(st.integers(0, layers), min_size=cuts, max_size=cuts)))
    return {"stages.boundaries": (0, *inner, layers)}
