"""Compares a release with our reader on generated configs: rows for the test suite, and a list of differences."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

from bridge.dialect import Config, Dialect
from bridge.errors import BridgeError
from bridge.testing.harvest.process import Process
from bridge.testing.harvest.rows import Row
from bridge.testing.mutations import mutations
from bridge.testing.strategies import configs

Tick = Callable[[int, int], None]
KEPT = 12
"""Number of rows that are recorded for each verdict (accepted, refused) of a release."""


@dataclass
class Tally:
    """Results for the configs: rows by verdict (true: accepted), and the number of times that each difference occurred."""

    rows: dict[bool, list[Row]] = field(default_factory=lambda: {True: [], False: []})
    differences: Counter[str] = field(default_factory=Counter)
    asked: int = 0

    @property
    def sample(self) -> list[Row]:
        """Rows to record: for each verdict the most informative rows, without duplicates."""
        found = []
        for verdict in (True, False):
            unlike = {json.dumps(row, sort_keys=True): row for row in self.rows[verdict]}
            # The longest rows set the most. Among equally long ones the order of their texts
            # decides, the same in each run.
            found += [unlike[text] for text in sorted(sorted(unlike), key=len, reverse=True)[:KEPT]]
        return found


def drawn(strategy: Any, count: int) -> list[Any]:
    """Return the first `count` examples of a strategy, which are equal in each run."""
    found: list[Any] = []

    def keep(example: Any) -> None:
        found.append(example)

    fixed = settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    keeping: Any = given(strategy)
    fixed(keeping(keep))()
    return found


def verdicts(process: Process, dialect: Dialect, version: str, count: int, tick: Tick) -> Tally:
    """Ask the release about `count` configs: half of them are valid, half have an edit that our reader may refuse."""
    tally, real = Tally(), import_module(f"compat.{dialect.name}.runtime.real")
    valid = drawn(configs(dialect, version), count // 2)
    questions: list[tuple[Config, Any, Row | None]] = [
        (config, *_posed(config)) for config in valid
    ]
    questions += _edited(dialect, version, count - count // 2)
    for number, (config, question, expected) in enumerate(questions):
        tick(number, len(questions))
        answer = process.ask(question)
        held, refused = answer.get("held", {}), answer.get("refused", "")
        tally.asked += 1
        tally.differences.update(_differences(expected, held, refused, real.LOOSER))
        # Only verdicts on which we agree become tests. Differences are for a person to decide.
        if (expected is None) == bool(refused):
            outcome: dict[str, Any] = {"reason": refused}
            if not refused:
                # Values that the config sets, and others that differ from the default; a class may
                # be named before the path.
                usual = config.dialect.defaults(config.version)
                names = {path: path if path in usual else path.rpartition(".")[2] for path in held}
                telling = [
                    path
                    for path, name in names.items()
                    if name in config.given or held[path] != usual.get(name)
                ]
                outcome = {"holds": {path: held[path] for path in telling}}
            tally.rows[not refused].append(
                {"release": version, **question, "accepted": not refused, **outcome}
            )
    return tally


def _edited(dialect: Dialect, version: str, count: int) -> Iterator[tuple[Config, Any, Row | None]]:
    """Yield edits of valid configs: the valid config, the question for the release, and our values
    after the edit (None if we refuse it).
    """
    real = import_module(f"compat.{dialect.name}.runtime.real")
    for mutation in drawn(mutations(dialect, version), count):
        try:
            yield mutation.config, *_posed(mutation.read())
        except BridgeError:
            if (question := real.raw(mutation.source, mutation.config)) is not None:
                yield mutation.config, question, None


def _posed(config: Config) -> tuple[Any, Row]:
    question, expected = import_module(f"compat.{config.dialect.name}.runtime.real").posed(config)
    return json.loads(json.dumps(question, default=str)), json.loads(
        json.dumps(expected, default=str)
    )


def _differences(expected: Row | None, held: Row, refused: str, looser: bool) -> Iterator[str]:
    """Yield the differences between our reader and the release.

    With `looser`, the release's parser checks less than its run does.
    """
    if expected is None:
        if not refused and not looser:
            yield "we refuse a config that the release accepts"
        return
    if refused:
        yield f"the release refuses a config that we accept: {refused}"
        return
    for path in expected.keys() & held.keys():
        if expected[path] != held[path]:
            yield f"{path}: we have {expected[path]!r}, the release has {held[path]!r}"
