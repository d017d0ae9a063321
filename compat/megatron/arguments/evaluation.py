"""Evaluation of checks and derivations on argument values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bridge.errors import ConfigError
from bridge.stack.checks import Check
from compat.megatron.arguments.namespace import Derivation, Namespace, Predicate, Step
from compat.megatron.releases import RELEASES

OPEN = frozenset(
    (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
        "seq_length",
        "micro_batch_size",
        "world_size",
    )
)
"""Names of values that a partial config may leave open. Checks and derivations that need an open
value are skipped.
"""


def select(table: Iterable[Step], version: str) -> tuple[Step, ...]:
    """Return the checks and derivations of `table` that the release has, in order."""
    return RELEASES.having(version, table)


def run(steps: Iterable[Step], values: Namespace) -> None:
    """Run all checks and derivations in order on `values`. Raises one `ConfigError` with every
    problem found.

    Upstream stops at the first refusal. Here later rows run too, so that a user sees all problems
    at once. A value of `OPEN` that a row with `last` refuses counts as unknown from then on,
    because later rows divide by it. If a row with `last` refuses any other value, no further rows
    run. The only exceptions are rows with `last` that directly follow and have the same `place`.
    """
    problems: list[str] = []
    stop = ""  # the statement at which Megatron stops
    arguments = values.__dict__
    for step in steps:
        if stop and not (isinstance(step, Check) and step.last and step.place == stop):
            break
        # `get`, because a name that the release lacks is as unknown as one that is None.
        if step.needs and None in map(arguments.get, step.needs):
            continue
        if isinstance(step, Derivation):
            step.change(values)
        elif step.when(values):
            problems.append(f"{step.path}: {step.says(arguments)}")
            if step.last and step.path in OPEN:
                setattr(values, step.path, None)
            elif step.last:
                stop = step.place
    ConfigError.raise_if(problems)


def set_argument(
    name: str, value: Callable[[Namespace], Any], condition: Predicate | None, values: Namespace
) -> None:
    """Compute `name` from the other values, if `condition` holds."""
    if condition is None or condition(values):
        setattr(values, name, value(values))


def set_constants(condition: Predicate, constants: Mapping[str, Any], values: Namespace) -> None:
    """Set names to fixed values if `condition` holds."""
    if condition(values):
        values.__dict__.update(constants)


def hold_both(one: Predicate, other: Predicate, values: Namespace) -> bool:
    """Whether both conditions hold."""
    return bool(one(values) and other(values))
