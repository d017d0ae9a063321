"""Measures how often generated configs set each field of a dialect to another value than its default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import comb
from random import Random
from typing import Any

from hypothesis import given

from bridge.errors import BridgeError
from bridge.plan.section import Values
from bridge.stack.dialect import Config, Dialect
from bridge.testing.strategies import StrategyCase, configs, part_of, paths_of

ROUND = 50
"""Number of configs that are drawn before the wanted fields are selected again."""
CHOICES = 2**14
"""Number of random bytes for one config; no config needs more."""


@dataclass(frozen=True, slots=True)
class Share:
    """The share of configs that set a field to another value than its default: `off` of the
    `having` configs whose release and entry point have the field.
    """

    off: int = 0
    having: int = 0

    @property
    def value(self) -> float:
        """The share `off / having`; 0 if no config was drawn."""
        return self.off / max(1, self.having)

    def plus(self, off: bool) -> Share:
        """Return the share with one more config counted."""
        return Share(self.off + off, self.having + 1)

    def exceeds(self, share: float, doubt: float) -> bool:
        """Return whether the true share certainly exceeds `share`.

        It does if, with a true share of only `share`, the probability of at least as many hits as
        were counted is below `doubt`.
        """
        # The upper tail of the binomial distribution: 1 - P(fewer hits than there were).
        odds = (
            comb(self.having, hits) * share**hits * (1 - share) ** (self.having - hits)
            for hits in range(self.off)
        )
        return 1 - sum(odds) < doubt


def shares(
    dialect: Dialect, examples: int, wanted: Callable[[Share], bool] = lambda share: True
) -> dict[str, Share]:
    """Return the share of every field in `examples` configs.

    Configs are drawn only for releases and entry points that have a field whose share is still
    `wanted`. Fields that nothing can set (`Part.unsettable`) are left out.
    """
    by_path = {path: Share() for case in _cases(dialect) for path in _paths(dialect, case)}
    random, among = Random(0), _cases(dialect)
    for number in range(examples):
        if number % ROUND == 0:
            open_ = {path for path, share in by_path.items() if wanted(share)}
            among = tuple(case for case in among if open_ & _paths(dialect, case))
        if not among:
            break
        config = _draw_config(random.choice(among), dialect, random)
        off = off_default(config)
        for path in _paths(config.dialect, StrategyCase(config.version, None, config.entry)):
            by_path[path] = by_path[path].plus(path in off)
    return by_path


@cache
def _cases(dialect: Dialect) -> tuple[StrategyCase, ...]:
    """Return the cases of releases and entry points; a frequent case is repeated."""
    return tuple(
        StrategyCase(version, None, entry)
        for version in dialect.versions
        for entry in part_of(dialect).entries
    )


@cache
def _paths(dialect: Dialect, case: StrategyCase) -> frozenset[str]:
    part = part_of(dialect)
    return frozenset((*paths_of(dialect, case), *part.opaque(case))) - part.unsettable.keys()


def _draw_config(case: StrategyCase, dialect: Dialect, random: Random) -> Config:
    """Draw a config that is independent of earlier ones.

    An ordinary Hypothesis run would start with small configs, and reuse parts of earlier ones.
    """
    examples: list[Config] = []
    draw: Any = given(configs(dialect, case.version, entry=case.entry))(
        lambda config: examples.append(config)
    )
    while not examples:
        draw.hypothesis.fuzz_one_input(random.randbytes(CHOICES))
    return examples[0]


def off_default(config: Config) -> set[str]:
    """Return the fields whose values differ from the stack's default.

    A value differs if it is not that of an empty config, or if the stack would derive another value
    from the other settings of this config.
    """
    usual = _usual(config.dialect, StrategyCase(config.version, None, config.entry))
    same = {path for path, value in config.given.items() if value == usual.get(path)}
    # A default may depend on other settings: then a value equal to that of an empty config is off
    # the default here.
    rest = _effective(
        config, {path: value for path, value in config.given.items() if path not in same}
    )
    exceptions = {path for path in same if rest and rest.get(path) != config.given[path]}
    return {*config.opaque, *config.given} - same | exceptions


def _effective(config: Config, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the effective values of `config` with the settings `values` in place of its own; empty if the stack refuses them."""
    try:
        return config.dialect.config(
            values, config.version, config.world_size, config.entry
        ).effective
    except BridgeError:
        return {}


@cache
def _usual(dialect: Dialect, case: StrategyCase) -> Values:
    """Return the effective values of an empty config."""
    least = part_of(dialect).least
    values = dialect.config(least, case.version, case.world_size, case.entry).effective
    return Values({path: value for path, value in values.items() if path not in least})
