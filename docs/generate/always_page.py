"""The page of what stacks do when nothing is said: read from their defaults and rules, by release."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from markdown_text import MARK, code, named, prose, sentence, table, value as shown

import bridge
import compat
from bridge.errors import BridgeError
from bridge.plan.plan import Plan, paths
from bridge.stack import registry
from bridge.stack.dialect import Dialect
from bridge.stack.rules import EFFECTS, HABITS, Context
from bridge.translation import reference
from bridge.translation.lift import plan_claims

PAGE = "always.md"
INTRODUCTION = (
    "A stack does something in every run, or unless a setting says differently, that another stack makes a choice. A plan "
    "has a field for each such behaviour, and each stack says which value it has when nothing is said, so `convert`, `diff`"
    " and `drift` find the difference although no setting shows it. A flag that only says what the other stack does anyway "
    "is no loss. *Always* marks a value that no setting changes; of others, the value is the default. A dash stands for "
    "what the training script, its data or its model decides, or what the stack does not have."
)
OWN = (
    "The plan fields below `habits.` stand for behaviours that hardly any setting names. Where a behaviour has no effect in"
    " a run, such as the layers with an adapter in a run without adapters, it is not compared (`bridge/plan/equality.py`)."
)
DEFAULTS = (
    "These plan fields have settings in some of the stacks. Where none is given, stacks or releases differ, or some of them"
    " have no choice."
)


@cache
def dialects() -> tuple[Dialect, ...]:
    """The stacks that train, in the order of their titles."""
    found = (compat.load(name) for name in registry.names())
    return tuple(sorted((one for one in found if not one.about), key=lambda one: one.title))


RUN: Mapping[str, Any] = {
    "model.layers": 2,
    "model.hidden": 64,
    "model.heads": 4,
    "model.vocab": 1024,
    "model.sequence": 128,
    "model.embedding.max_positions": 128,
    "batch.micro": 1,
    "batch.accumulation": 2,
    "parallel.data": 2,
    "optimizer.lr": 1e-3,
}
PROBES: tuple[Mapping[str, Any], ...] = (
    {"run.steps": 100, "precision.compute": "bf16", "optimizer.name": "adamw"},
    {"run.steps": 100, "precision.compute": "fp16", "optimizer.schedule.name": "inverse_sqrt"},
    {"run.steps": 100, "model.experts": 4, "model.moe.ffn": 64, "model.moe.top_k": 2},
    {"run.steps": 100, "adapters.rank": 8, "model.predicted": 1, "optimizer.embedding_lr": 2.0},
    {"run.steps": 100, "optimizer.name": "muon", "parallel.pipeline": 2},
    {},
)
"""Runs that say little else than what every run has to say; together they reach what takes effect in some runs only."""


@cache
def unsaid(dialect: Dialect, version: str) -> Mapping[str, Any]:
    """The plan values of a release if nothing is said: its defaults, and what it derives in the runs above."""
    given, context = dialect.defaults(version), Context(version)
    found = {
        ours: value
        for rule in dialect.rules
        if rule.ours
        for ours, value in rule.read(given, context).items()
    }
    table = plan_claims(dialect)
    for probe in PROBES:
        said = {**RUN, **probe}
        try:
            config = bridge.lower(Plan.of(said), dialect, version)
        except BridgeError:
            continue  # this release has no such run
        for ours, value in bridge.lift(config).values().items():
            settings = [
                path
                for path in table[ours].carriers(ours)
                if not isinstance(config.given.get(path), Mapping)
            ]
            if (
                ours not in said
                and not any(path in config.given for path in settings)
                and found.get(ours) is None
            ):
                found[ours] = value
    return found


def history(dialect: Dialect, ours: str) -> list[tuple[str, Any]]:
    """The values of a plan field that nothing sets, each with the release that began with it."""
    found: list[tuple[str, Any]] = []
    for version in dialect.versions:
        value = unsaid(dialect, version).get(ours)
        if not found or found[-1][1] != value:
            found.append((version, value))
    return found


def rows() -> Iterator[str]:
    """The plan fields in which stacks or releases differ where nothing is said, or in which one stack
    has a choice and another always the same value.
    """
    for ours in paths():
        values = {
            repr(value)
            for dialect in dialects()
            for _, value in history(dialect, ours)
            if value is not None
        }
        settable = any(reference.carriers(dialect, ours) for dialect in dialects())
        if len(values) > 1 or (
            values and settable and any(is_fixed(dialect, ours) for dialect in dialects())
        ):
            yield ours


def is_fixed(dialect: Dialect, ours: str) -> bool:
    """Whether the newest release has one value of a plan field, which no setting changes."""
    return not reference.carriers(dialect, ours) and history(dialect, ours)[-1][1] is not None


def cell(dialect: Dialect, ours: str) -> str:
    """What a stack does where nothing is said, by release."""
    parts = []
    for place, (since, value) in enumerate(history(dialect, ours)):
        said = shown(value) or "-"
        parts.append(f"{said} since {since}" if place else said)
    return "\n".join((*parts, "always")) if is_fixed(dialect, ours) else "\n".join(parts)


def source(dialect: Dialect, ours: str) -> str:
    """The place of a behaviour in the stack's source; without one, the setting whose default it is."""
    rule = plan_claims(dialect).get(ours)
    if rule is None or all(value is None for _, value in history(dialect, ours)):
        return ""
    settings = ", ".join(map(code, reference.carriers(dialect, ours)))
    note = sentence(rule.note) if ours.startswith(HABITS) else ""
    return (
        f"{note} {rule.source}".strip()
        if rule.source
        else f"{note} default of {settings}".strip()
        if settings
        else note
    )


def section(fields: list[str]) -> str:
    """A table of these fields, and one of the places in the stacks' sources."""
    titles = [dialect.title for dialect in dialects()]
    what = table(
        ("plan field", "effect", *titles),
        (
            (code(ours), named(EFFECTS.get(ours)), *(cell(dialect, ours) for dialect in dialects()))
            for ours in fields
        ),
    )
    where = table(
        ("plan field", "stack", "where"),
        (
            (code(ours), dialect.title, found)
            for ours in fields
            for dialect in dialects()
            if (found := source(dialect, ours))
        ),
    )
    return f"{what}\n\n{where}"


def pages() -> dict[str, str]:
    """The page, by its path."""
    found = list(rows())
    habits = [ours for ours in found if ours.startswith((HABITS, "adapters.targets"))]
    others = [ours for ours in found if ours not in habits]
    text = (
        f"{MARK}\n\n# What stacks do when nothing is said\n\n{prose(INTRODUCTION)}\n\n"
        f"## Behaviours without a setting\n\n{len(habits)} behaviours. {prose(OWN)}\n\n{section(habits)}\n\n"
        f"## Defaults that differ\n\n{len(others)} behaviours. {prose(DEFAULTS)}\n\n{section(others)}\n"
    )
    return {PAGE: text}
