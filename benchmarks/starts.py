"""Converts generated configs to one stack, and starts each with the stack's own code. What the
conversion calls a stop has to stop, and nothing else may.

    python benchmarks/starts.py TARGET [--source STACK ...] [--seed N] [--count N] [--stop N] [--show]
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from hypothesis import HealthCheck, Phase, given, seed, settings

import compat
from bridge.errors import BridgeError, ConfigError
from bridge.stack.dialect import Config, Dialect
from bridge.stack.rules import Effect
from bridge.testing import configs
from bridge.translation.translate import Result, translate
from tests.harvesting.machine import MachineError

EVERY = 25
"""Number of configs after which a line tells the progress."""


@dataclass
class Count:
    """What became of the configs: numbers by outcome, and each disagreement once, by kind."""

    outcomes: Counter[str] = field(default_factory=Counter)
    unsaid: dict[str, str] = field(default_factory=dict)
    starts: dict[str, str] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether the conversion and the stack agree on every config."""
        return not self.unsaid and not self.starts

    def lines(self) -> Iterator[str]:
        """Yield a line for each outcome, and for each kind of disagreement."""
        yield ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items()))
        yield from (f"UNSAID {reason}\n       {where}" for reason, where in self.unsaid.items())
        yield from (f"STARTS {reason}\n       {where}" for reason, where in self.starts.items())


def stops(result: Result) -> Sequence[str]:
    """Return what the conversion says about the stops of its target. Settings that are still to be
    added are no such statement.
    """
    return [
        f"{finding.path}: {finding.message}"
        for finding in result.findings
        if finding.effect is Effect.STOPS
    ]


def judge(config: Config, target: Dialect, starting: Any, version: str, found: Count) -> None:
    """Convert one config, start the result, and count whether both agree."""
    try:
        result = translate(config, target, version)
    except BridgeError:
        found.outcomes["not converted"] += 1
        return
    if result.config.missing and not getattr(starting, "FILLS", False):
        found.outcomes["incomplete"] += 1
        return
    said, where = list(stops(result)), f"{config.dialect.name} {dict(config.given)}"
    try:
        with warnings.catch_warnings(action="ignore"):
            starting.start(result.config)
    except MachineError:
        found.outcomes["not asked"] += 1
        return
    except ConfigError as error:
        found.outcomes["stops, said" if said else "stops, UNSAID"] += 1
        if not said:
            note(found.unsaid, str(error), where)
        return
    later = tuple(f"{path}:" for path in getattr(starting, "UNASKED", ()))
    asked = [reason for reason in said if not reason.startswith(later)] if later else said
    unasked = "not asked" if said else "starts"
    found.outcomes["said to stop, STARTS" if asked else unasked] += 1
    for reason in asked:
        note(found.starts, reason, where)


def note(kinds: dict[str, str], reason: str, where: str) -> None:
    """Note a disagreement, and tell it, if it is the first of its kind."""
    if kind(reason) not in kinds:
        kinds[kind(reason)] = where
        print(f"new: {reason}\n     {where}", file=sys.stderr, flush=True)


def kind(reason: str) -> str:
    """Return a reason without its numbers, by which reasons of one kind are counted once."""
    return "".join("0" if sign.isdigit() else sign for sign in reason)[:240]


def draw(name: str, number: int, count: int) -> Callable[[Callable[[Config], None]], Any]:
    """Return what calls a function with `count` configs of a stack, drawn from the seed `number`."""
    limits = settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    return lambda law: seed(number)(limits(given(configs(compat.load(name)))(law)))


def run(target: str, sources: Sequence[str], number: int, count: int, stop: int = 10**9) -> Count:
    """Judge `count` configs, drawn evenly from the sources, and tell the progress on standard error."""
    starting = import_module(f"tests.harvesting.starts.{target}")
    version = starting.release_of_package()
    found, began = Count(), time.monotonic()
    for name in sources:

        @draw(name, number, -(-count // len(sources)))
        def law(config: Config) -> None:
            if len(found.unsaid) + len(found.starts) >= stop:
                return
            judge(config, compat.load(target), starting, version, found)
            if sum(found.outcomes.values()) % EVERY == 0:
                spent = time.monotonic() - began
                print(f"{spent:.0f} s: {next(found.lines())}", file=sys.stderr, flush=True)

        law()
    return found


def main() -> int:
    """Run the program; the exit code is 1 if there is a disagreement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--source", nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--stop", type=int, default=10**9)
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    others = [name for name in compat.names() if name != asked.target]
    found = run(asked.target, asked.source or others, asked.seed, asked.count, asked.stop)
    print("\n".join(found.lines()))
    return int(not found.agrees)


if __name__ == "__main__":
    sys.exit(main())
