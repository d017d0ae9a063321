"""Lift a config to the Plan that it means, and lower a Plan to a config of a dialect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from math import prod
from typing import Any

from bridge import limits
from bridge.errors import ConfigError
from bridge.plan.batch import solve
from bridge.plan.equality import plain
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config, Dialect, Writer
from bridge.stack.rules import Context, Rule
from bridge.stack.stack_tables import StackTables

DECAYED = "optimizer.decay_scope"
ROWS = "model.embedding.padded_vocab"
"""The plan field for the number of rows of the embedding table: the vocabulary size after padding
by the stack.
"""


class Meaning(dict[str, Any]):
    """Values of a plan as a config sets them. `plain` holds the values that take effect in the run."""

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The values that take effect: values without an effect are left out, and open fields have
        the values that they mean.
        """
        return plain(self)


def lift(config: Config) -> Plan:
    """The plan that `config` means; raises `BridgeError` if the stack refuses `config`."""
    return Plan.of(meaning_of(config))


def lower(
    plan: Plan, dialect: Dialect, version: str | None = None, world_size: int | None = None
) -> Config:
    """`plan` as a config of `dialect`; raises `BridgeError` if the stack would refuse the config."""
    ours = plan.values()
    return lower_values(ours, dialect, dialect.release(version), world_size or world_of(ours))


def meaning_of(config: Config) -> Meaning:
    """The plan values that `config` means; raises `BridgeError` if the stack refuses `config`."""
    # Each rule looks only at settings that it claims or sees, and a test holds it to that. So all
    # of them get the same mapping.
    effective: Mapping[str, Any] = config.effective.flat()
    ours: dict[str, Any] = {}
    for rule in config.dialect.rules:
        if rule.ours:
            ours.update(rule.read(effective, config.context))
    if config.caller is not None:
        decides = config.dialect.decides
        told = meaning_of(config.caller).items()
        ours |= {path: value for path, value in told if not path.startswith(decides)}
    ConfigError.raise_if([*_beyond(ours)])
    return Meaning((path, value) for path, value in ours.items() if value is not None)


def _beyond(ours: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each field above its limit. Loops over more layers or ranks than that
    would take too long.
    """
    for path, most in limits.PLAN.items():
        value = ours.get(path)
        if isinstance(value, int) and value > most:
            yield f"{path}: found {value:,}, expected at most {most:,}; no run has that many"


def lower_values(
    ours: Mapping[str, Any], dialect: Dialect, version: str, world_size: int | None
) -> Config:
    """The plan values `ours` as a config of `dialect`; raises `BridgeError` if the stack would
    refuse the config.
    """
    settings, entry = settings_for(ours, dialect, version, world_size), dialect.default_entry
    return dialect.config(settable(settings, dialect, version, entry), version, world_size, entry)


def settings_for(
    ours: Mapping[str, Any],
    dialect: StackTables,
    version: str,
    world_size: int | None,
    had: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the settings that the table of `dialect` writes for the values of a plan. None means
    that the table leaves the setting open.

    If a rule can choose between several settings, the rule prefers one in `had`, the settings of
    the config that is replaced.
    """
    settings: dict[str, Any] = {}
    values, context = _solve_batch(ours, world_size), Context(version, world_size, frozenset(had))
    for rule in dialect.rules:
        if rule.theirs:
            settings.update(rule.write(values, context))
    return settings


def rules_for(
    ours: Mapping[str, Any], dialect: StackTables, world_size: int | None
) -> Iterator[tuple[Rule, dict[str, Any]]]:
    """Yield the rules of `dialect` that write settings, each with the plan values that the rule
    sees.
    """
    values = _solve_batch(ours, world_size)
    yield from (
        (rule, rule.values_in_view(rule.ours, values))
        for rule in dialect.rules
        if rule.ours and rule.theirs
    )


def settable(
    settings: Mapping[str, Any], dialect: Writer, version: str, entry: str
) -> dict[str, Any]:
    """Return the settings in `settings` that the release knows. The others are left out without a
    message here; a translation reports a left-out setting as lost if the run then has another
    value.
    """
    values = {path: value for path, value in settings.items() if value is not None}
    release_settings = {
        path: value for path, value in values.items() if dialect.knows(path, value, version, entry)
    }
    return dialect.fitting(release_settings, version)


def _solve_batch(ours: Mapping[str, Any], world_size: int | None) -> dict[str, Any]:
    sides = ("batch.micro", "batch.accumulation", "batch.global_", "parallel.data")
    micro, accumulation, global_, data = (ours.get(side) for side in sides)
    if not data and world_size:
        data = (
            world_size // _model_ranks(ours) or None
        )  # a world smaller than one copy leaves it open
    triangle = solve(micro, accumulation, global_, data)
    solution = zip(
        sides, (triangle.micro, triangle.accumulation, triangle.global_, triangle.data), strict=True
    )
    return {**ours, **{side: value for side, value in solution if value is not None}}


def world_of(ours: Mapping[str, Any]) -> int | None:
    """Return the number of ranks in the mesh of a plan, or None if the number of data ranks is
    open.
    """
    data: int | None = ours.get("parallel.data")
    return data * _model_ranks(ours) if data else None


def _model_ranks(ours: Mapping[str, Any]) -> int:
    """Number of ranks that hold one copy of the model."""
    # Expert ranks are not a factor: they are among the data ranks.
    return prod(ours.get(f"parallel.{axis}") or 1 for axis in ("tensor", "pipeline", "context"))


@cache
def claims(dialect: StackTables) -> Mapping[str, Rule]:
    """Return the rule of `dialect` that claims each path of the schema."""
    return {path: rule for rule in dialect.rules for path in rule.theirs}


@cache
def plan_claims(dialect: StackTables) -> Mapping[str, Rule]:
    """Return the rule of `dialect` that claims each path of a Plan."""
    return {path: rule for rule in dialect.rules for path in rule.ours}


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Return the paths whose values differ, or that have a value in one of the two mappings only."""
    paths = {path for path, value in before.items() if after.get(path) != value}
    return paths | {path for path in after.keys() - before.keys() if after[path] is not None}


def unlike(one: Meaning, other: Meaning) -> set[str]:
    """Return the plan fields that have different values in the two meanings."""
    fields = differing(one.plain, other.plain)
    # Tables with equally many rows are the same tensors, however many of the rows stand for words.
    if ROWS not in fields:
        fields.discard("model.vocab")
    # "matrices" and "not_layernorm" spare the same parameters where all norms are LayerNorm. A default
    # tells the norms of a config that describes a model, and of no other.
    norms = {side.get("model.norm.kind") for side in (one, other) if side.get("model.hidden")} - {
        None
    }
    scopes = {one.plain.get(DECAYED), other.plain.get(DECAYED)}
    if norms == {"layer"} and scopes == {"matrices", "not_layernorm"}:
        fields.discard(DECAYED)
    # What follows from other fields alone differs because they do, and so does a behaviour that has no
    # effect in one of the two runs.
    idle = {
        path
        for path in fields
        if path.startswith("habits.")
        and any(path in side and path not in side.plain for side in (one, other))
    }
    fields -= idle
    return fields & (one.keys() | other.keys())
