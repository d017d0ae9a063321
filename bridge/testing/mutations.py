"""Configs with one mistake, made from valid configs.

Each names the edited key and the kind of mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from bridge.errors import BridgeError, ConfigError
from bridge.plan.section import fields
from bridge.stack.dialect import Config, Dialect
from bridge.testing.strategies import StrategyCase, configs, entries, part_of, paths_of
from bridge.translation.lift import lift

Path = tuple[str, ...]
"""Path of a value in a source: the keys that lead to the value, the outermost first."""


REST = "*"
"""Name of the field that holds all other entries of its section."""


class Mistake(StrEnum):
    """Kind of mistake that an edit makes."""

    UNKNOWN = "unknown key"
    MISSPELLED = "misspelled key"
    TYPE = "wrong type"
    SWITCH = "true for a number"
    FRACTION = "fraction for a whole number"
    INFINITE = "not a finite number"
    BOUNDS = "out of bounds"
    CHOICE = "not a choice"
    RELATION = "broken relation"
    REMOVED = "removed required key"


@dataclass(frozen=True)
class Edit:
    """One edit: the path to change, and the new value or `REMOVE`.

    If the edit moves a value, `leaves` is the old path. If the edit makes a size inconsistent, `ours`
    is the plan field of that size.
    """

    mistake: Mistake
    at: Path
    value: Any
    leaves: Path | None = None
    ours: str = ""


class _Remove:
    def __repr__(self) -> str:
        return "REMOVE"


REMOVE = _Remove()
"""Marks an edit that removes the key."""


@dataclass(frozen=True)
class Mutation:
    """A valid config, and its source with one edit.

    `key` is the edited key in the source's spelling (dotted), `value` its new value, `source` the edited mapping, `error` the
    error that reading must raise. Where an edit keeps the meaning, reading may also succeed, with equal effective values.
    """

    config: Config
    mistake: Mistake
    key: str
    value: Any
    source: Mapping[str, Any]
    error: type[BridgeError] = ConfigError
    ours: str = ""

    def read(self) -> Config:
        """Read the edited source at the release and world size of the valid config.

        Raises the dialect's errors.
        """
        return self.config.dialect.read(self.source, self.config.version, self.config.world_size)

    def is_named_by(self, error: BridgeError) -> bool:
        """Return whether a message of `error` names the edited key.

        If the edit makes a size inconsistent, the name of its plan field is enough.
        """
        names = (_word(path.rpartition(".")[2]) for path in (self.key, self.ours))
        return any(name in _word(str(error)) for name in names if name)


def _word(text: str) -> str:
    """Return a flag as the name of the setting: `--micro-batch` becomes `micro_batch`."""
    return text.lstrip("-").replace("-", "_")


def mutations(
    dialect: Dialect, version: str | None = None, world_size: int | None = None
) -> SearchStrategy[Mutation]:
    """Return a strategy for configs of `dialect` with one edit. All kinds of mistakes that the fields allow are equally frequent.

    Release and world size are drawn if they are not given. Reading the `source` of a mutation must raise its `error`, with
    the key in the message, or give the same effective values.
    """
    return _mutations(dialect, version, world_size)


@st.composite
def _mutations(
    draw: DrawFn, dialect: Dialect, version: str | None, world_size: int | None
) -> Mutation:
    config = draw(configs(dialect, version, world_size, entries(dialect)[0]))
    seed = Random(draw(st.integers(0, 2**32)))
    by_mistake = edits(config)
    edit = seed.choice(by_mistake[seed.choice(sorted(by_mistake))])
    source = edit_mapping(part_of(dialect).source(config), edit)
    return Mutation(config, edit.mistake, ".".join(edit.at), edit.value, source, ours=edit.ours)


def edits(config: Config) -> Mapping[Mistake, list[Edit]]:
    """Return all single edits of a config that are mistakes, grouped by kind of mistake."""
    by_mistake: dict[Mistake, list[Edit]] = {}
    for maker in MAKERS:
        for edit in maker(config):
            by_mistake.setdefault(edit.mistake, []).append(edit)
    return by_mistake


def edit_mapping(source: Mapping[str, Any], edit: Edit) -> dict[str, Any]:
    """Return a copy of the nested mapping `source` with one edit.

    Missing sections are added, sections that become empty are removed.
    """
    copy: dict[str, Any] = deepcopy(dict(source))
    # A renamed key keeps its value, which is taken from its old place first.
    value = _take(copy, edit.leaves) if edit.leaves else edit.value
    if edit.value is REMOVE:
        _take(copy, edit.at)
        return copy
    place = copy
    for name in edit.at[:-1]:
        place = place.setdefault(name, {})
    place[edit.at[-1]] = value
    return copy


def _take(source: dict[str, Any], path: Path) -> Any:
    name, *rest = path
    if not rest:
        return source.pop(name)
    value = _take(source[name], tuple(rest))
    if not source[name]:
        del source[name]
    return value


# Keys


def _unknown(config: Config) -> Iterator[Edit]:
    """Yield edits that add an unknown key, at the top and in each section of the source."""
    spell = part_of(config.dialect).spelled
    parents = dict.fromkeys(spell(config, path)[:-1] for path in config.given)
    for parent in {(): None, **parents}:
        if not _free(config, parent):
            yield Edit(Mistake.UNKNOWN, (*parent, part_of(config.dialect).stranger), 1)


def _free(config: Config, parent: Path) -> bool:
    """Return whether `parent` is a free-form section, all of whose entries belong to a single field."""
    leaves = fields(config.dialect.schema)
    above = [parent[:length] for length in range(len(parent) + 1)]
    return any(".".join(path) in leaves for path in above) or ".".join((*parent, REST)) in leaves


def _misspell_keys(config: Config) -> Iterator[Edit]:
    """Yield edits that swap two letters of a key and keep its value."""
    part = part_of(config.dialect)
    keys = {tuple(path.split(".")) for path in fields(config.dialect.schema)}
    keys |= {part.spelled(config, path) for path in config.given}
    for path in config.given:
        *parent, name = part.spelled(config, path)
        wrong = (*parent, _swap_letters(name))
        if wrong not in keys and wrong[-1] != name and not _free(config, tuple(parent)):
            yield Edit(Mistake.MISSPELLED, wrong, config.given[path], leaves=(*parent, name))


def _swap_letters(name: str) -> str:
    """Return `name` with two neighbouring letters swapped: the first pair from the middle on whose letters differ."""
    for place in range(len(name) // 2, len(name) - 1):
        if name[place] != name[place + 1] and name[place : place + 2].isalpha():
            return name[:place] + name[place + 1] + name[place] + name[place + 2 :]
    return name


# Values


@dataclass(frozen=True)
class _Kind:
    """Allowed values of a field: plain types, bounds, and choices.

    Empty choices allow any value of the types.
    """

    types: frozenset[Any]
    bounds: tuple[Any, ...] = ()
    choices: tuple[Any, ...] = ()


def _kind(annotation: Any, bounds: tuple[Any, ...] = ()) -> _Kind:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        metadata = tuple(
            bound for item in inside[1:] for bound in (item, *getattr(item, "metadata", ()))
        )
        return _kind(inside[0], (*metadata, *bounds))
    if origin in (Union, UnionType):
        kinds = [_kind(part, bounds) for part in inside if part is not NoneType]
        return (
            kinds[0]
            if len(kinds) == 1
            else _Kind(frozenset().union(*(kind.types for kind in kinds)))
        )
    if origin is Literal:
        return _Kind(frozenset(map(type, inside)), (), inside)
    return _Kind(frozenset({origin or annotation}), bounds)


def _wrong_values(config: Config) -> Iterator[Edit]:
    """Yield edits that give a field a value which its annotation does not allow."""
    part, leaves = part_of(config.dialect), fields(config.dialect.schema)
    settable = set(
        paths_of(config.dialect, StrategyCase(config.version, config.world_size, config.entry))
    )
    for path in config.given:
        if path in leaves and path in settable and path not in part.coerced:
            at = part.spelled(config, path)
            yield from (
                Edit(mistake, at, value)
                for mistake, value in _wrong(_kind(leaves[path].annotation))
            )


def _wrong(kind: _Kind) -> Iterator[tuple[Mistake, Any]]:
    if Any in kind.types or object in kind.types:
        return
    if kind.types <= {int, float, bool}:
        yield from ((Mistake.TYPE, value) for value in ("many", {"a": 1}, [[1]]))
    if kind.types <= {int, float}:
        yield Mistake.SWITCH, True
        yield from ((Mistake.INFINITE, value) for value in (float("nan"), float("inf")))
    if kind.types == {int}:
        yield Mistake.FRACTION, 1.5
    if kind.types == {str} and kind.choices:
        yield Mistake.CHOICE, "no such choice"
    yield from ((Mistake.BOUNDS, value) for value in map(_beyond, kind.bounds) if value is not None)


def _beyond(bound: Any) -> float | int | None:
    """Return the nearest integer outside a bound."""
    # A bound of "above 0" already excludes 0 itself, so no step is needed.
    limits: tuple[tuple[Any, str, int], ...] = (
        (Ge, "ge", -1),
        (Gt, "gt", 0),
        (Le, "le", 1),
        (Lt, "lt", 0),
    )
    for kind, name, step in limits:
        if isinstance(bound, kind):
            limit: int | float = getattr(bound, name)
            return limit + step
    return None


# Relations

MICRO, TOTAL, DATA = "batch.micro", "batch.global_", "parallel.data"
AXES = ("parallel.tensor", "parallel.pipeline", "parallel.context")


def _relations(config: Config) -> Iterator[Edit]:
    """Yield edits that make sizes inconsistent: an axis with more ranks than there are, or a global
    batch that is no multiple of the microbatch times the data ranks.
    """
    if config.world_size is None:
        return
    part, plan = part_of(config.dialect), lift(config).values()
    for axis in AXES:
        for path in _paths_of_value(config, axis, plan.get(axis)):
            yield Edit(
                Mistake.RELATION, part.spelled(config, path), config.world_size + 1, ours=axis
            )
    # A global batch that is one larger cannot be a multiple of micro x data, unless that is 1.
    if (
        not part.rounds
        and _paths_of_value(config, MICRO, plan.get(MICRO))
        and plan[MICRO] * (plan.get(DATA) or 1) > 1
    ):
        for path in _paths_of_value(config, TOTAL, plan.get(TOTAL)):
            yield Edit(
                Mistake.RELATION, part.spelled(config, path), config.given[path] + 1, ours=TOTAL
            )


def _paths_of_value(config: Config, ours: str, value: Any) -> list[str]:
    """Return the paths of given values that equal `value` and determine the plan field `ours`."""
    rule = next(rule for rule in config.dialect.rules if ours in rule.ours)
    return [
        path
        for path in rule.carriers(ours)
        if value is not None and config.given.get(path) == value
    ]


def _remove_required(config: Config) -> Iterator[Edit]:
    """Yield edits that remove a field which the dialect requires."""
    part = part_of(config.dialect)
    for path in part.required(config):
        yield Edit(Mistake.REMOVED, part.spelled(config, path), REMOVE)


MAKERS: tuple[Callable[[Config], Iterable[Edit]], ...] = (
    _unknown,
    _misspell_keys,
    _wrong_values,
    _relations,
    _remove_required,
)
