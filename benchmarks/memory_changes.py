"""Suggests changes that make generated configs fit into less memory, and starts each changed config
with the stack's own code. None may be refused, and each has to need no more than the limit.

    python benchmarks/memory_changes.py TARGET [--seed N] [--count N]
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from starts import draw, kind

import compat
from bridge.api.layout import ranks_of_plan
from bridge.errors import BridgeError, ConfigError
from bridge.layout.architecture import PRESETS, Architecture
from bridge.layout.memory.estimate import Estimator
from bridge.stack.dialect import Config
from bridge.translation.edit import without
from bridge.translation.lift import lift
from bridge.translation.memory_changes import Change, find_changes
from bridge.translation.translate import translate
from tests.harvesting.machine import MachineError

FRACTIONS = 0.35, 0.95
"""The least and the most part of the memory that a config needs, to which it is limited."""


@dataclass
class Count:
    """Numbers of configs and of changes by outcome, and each fault once, by kind."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)

    def note(self, outcome: str, reason: str = "", where: str = "") -> None:
        """Count an outcome; with a reason it is a fault, and told if it is new."""
        self.outcomes[outcome] += 1
        if reason and kind(reason) not in self.faults:
            self.faults[kind(reason)] = where
            print(f"new: {reason}\n     {where}", file=sys.stderr, flush=True)


def measure(config: Config) -> int:
    """Return the bytes that a device needs for a config, with the sizes of a preset where it has no
    model. Raises `BridgeError` if its sizes do not fit together.
    """
    plan = lift(config)
    shape = PRESETS["llama-7b"]
    if plan.model.layers and plan.model.hidden and plan.model.heads and plan.model.vocab:
        shape = Architecture.of(plan.model)
    ranks = ranks_of_plan(plan, config.world_size)
    rules = config.dialect.memory_rules(config)
    return Estimator.of(plan, shape, ranks, rules).estimate().largest.needed


def starts(config: Config, starting: Any) -> str | None:
    """Return why the stack's own code refuses a config; None if it does not."""
    try:
        with warnings.catch_warnings(action="ignore"):
            starting.start(config)
    except ConfigError as error:
        return str(error)
    return None


def judge(config: Config, starting: Any, found: Count, chance: Random) -> None:
    """Count the changes that are suggested for one config."""
    try:
        needed = measure(config)
    except BridgeError:
        found.note("not estimated")
        return
    try:
        if starts(config, starting):
            found.note("did not start before")
            return
        limit = round(needed * chance.uniform(*FRACTIONS))
        changes = find_changes(config, lift(config), lambda other, _: measure(other), limit)
        found.note("configs with changes" if changes else "configs without a change")
        for change in changes:
            judge_change(config, change, limit, starting, found)
    except MachineError:
        found.note("not asked")


def judge_change(config: Config, change: Change, limit: int, starting: Any, found: Count) -> None:
    """Apply a change as a user does, by its settings, and count what becomes of it."""
    where = f"{dict(change.settings)} in {dict(config.given)}"
    changed = without(config, change.settings)
    reason, needed = starts(changed, starting), measure(changed)
    if reason:
        found.note("changes REFUSED", reason, where)
    elif needed > limit or needed != change.needed:
        found.note("changes TOO LARGE", f"{needed} bytes of {limit}, said {change.needed}", where)
    else:
        found.note("changes right")


def main() -> int:
    """Run the program; the exit code is 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    starting = import_module(f"tests.harvesting.starts.{asked.target}")
    found, chance, began = Count(), Random(asked.seed), time.monotonic()
    target, version = compat.load(asked.target), starting.release_of_package()
    sources = [name for name in compat.names() if name != asked.target]
    for name in sources:

        @draw(name, asked.seed, -(-asked.count // len(sources)))
        def law(config: Config) -> None:
            try:
                converted = translate(config, target, version).config
            except BridgeError:
                found.note("not converted")
                return
            judge(converted, starting, found, chance)

        law()
    counts = ", ".join(f"{name} {count}" for name, count in sorted(found.outcomes.items()))
    print(f"{time.monotonic() - began:.0f} s: {counts}")
    return int(bool(found.faults))


if __name__ == "__main__":
    sys.exit(main())
