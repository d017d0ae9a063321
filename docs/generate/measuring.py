"""Measures how often a field that arrives with limits is lost: generated configs, translated, counted; kept as data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError
from bridge.stack.dialect import Config
from bridge.stack.rules import How
from bridge.translation.reference import DialectPair
from bridge.translation.translate import translate

FILE = Path(__file__).with_name("measured.json")


@dataclass(frozen=True)
class Measured:
    """How often a field was given in generated configs, and how often it was lost."""

    given: int
    lost: int

    def __str__(self) -> str:
        return f"{self.lost} of {self.given}"


@cache
def kept() -> Mapping[str, Any]:
    """What was measured last, by pair."""
    found: dict[str, Any] = json.loads(FILE.read_text("utf-8")) if FILE.is_file() else {}
    return found


def of(pair: DialectPair) -> Mapping[str, Measured]:
    """Counts of a pair by field; empty where its releases or rules are not those that were measured."""
    counts = kept().get(_name(pair), {})
    return (
        {path: Measured(*found) for path, found in counts["fields"].items()}
        if counts.get("of") == _digest(pair)
        else {}
    )


def _name(pair: DialectPair) -> str:
    return f"{pair.source.name} to {pair.target.name}"


def _digest(pair: DialectPair) -> str:
    """A digest of where the fields of a pair arrive, and how, in which releases; their reasons in words do not count."""
    said = [(one.path, one.how, one.arrival.paths) for one in pair.passages_with_meaning]
    text = repr((pair.source.newest, pair.target.newest, said))
    return sha256(text.encode()).hexdigest()[:12]


def measure(pairs: Sequence[DialectPair], examples: int) -> None:
    """Measure pairs that have no counts on `examples` generated configs each, and keep the counts."""
    found = {
        _name(pair): kept()[_name(pair)] if of(pair) else _counts(pair, examples) for pair in pairs
    }
    rows = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(counts)}" for name, counts in found.items()
    )
    FILE.write_text(f"{{\n{rows}\n}}\n", "utf-8")
    kept.cache_clear()


def _counts(pair: DialectPair, examples: int) -> dict[str, Any]:
    print(f"measures: {_name(pair)}", flush=True)
    configs, fields = _measured(pair, examples)
    return {"of": _digest(pair), "configs": configs, "fields": fields}


def _measured(pair: DialectPair, examples: int) -> tuple[int, dict[str, list[int]]]:
    """Configs that were translated, and for each limited field how often it was given and lost."""
    from hypothesis import HealthCheck, Phase, given, settings

    from bridge.testing import configs

    limited = {one.path for one in pair.passages_with_meaning if one.how is How.APPROXIMATE}
    counts: dict[str, list[int]] = {path: [0, 0] for path in sorted(limited)}
    done = [0]

    def look(config: Config) -> None:
        try:
            result = translate(config, pair.target)
        except BridgeError:
            return
        done[0] += 1
        lost = {
            finding.path
            for finding in result.findings
            if finding.given and finding.how in (How.DROPPED, How.APPROXIMATE)
        }
        for path in limited & set(config.given):
            counts[path] = [counts[path][0] + 1, counts[path][1] + (path in lost)]

    free = settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    free(given(configs(pair.source, pair.source.newest))(look))()
    return done[0], counts
