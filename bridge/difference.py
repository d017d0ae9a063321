"""What two configs, of one stack or of two, mean otherwise: each difference with its effect on the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bridge.config import shown
from bridge.dialect import Config, Dialect
from bridge.findings import Finding
from bridge.lifting import Meaning, claims, differing, meaning_of, plan_claims, unlike
from bridge.rules import Effect, How
from bridge.translation import unheld

RULE = "difference"
"""Beginning of the id of every difference; the field follows."""
SCRIPTED = ("model.", "run.")
"""What a stack without a model in its config leaves to the training script."""
LONG = 40


@dataclass(frozen=True)
class Pair:
    """Two configs with what they mean, and the fields of a plan in which they differ."""

    one: Config
    other: Config
    meant: Meaning
    kept: Meaning
    strayed: frozenset[str]

    @classmethod
    def of(cls, one: Config, other: Config) -> Pair:
        """Two configs; raises `BridgeError` if the stack of one refuses it."""
        meant, kept = meaning_of(one), meaning_of(other)
        return cls(one, other, meant, kept, frozenset(unlike(meant, kept)))


def compare(one: Config, other: Config) -> tuple[Finding, ...]:
    """Every difference from `one` to `other`: `before` and `after` are their values, lines those of `other`.

    Raises `BridgeError`.
    """
    pair = Pair.of(one, other)
    found = _settings(pair) if one.dialect.name == other.dialect.name else _apart(pair)
    return (*found, *_sized(pair))


def _sized(pair: Pair) -> Iterator[Finding]:
    """Ranks that only the two configs themselves know of."""
    one, other = pair.one.world_size, pair.other.world_size
    if one and other and one != other and "parallel.data" not in pair.strayed:
        message = "another number of ranks; the batch of a step is the same"
        yield Finding("world_size", message, Effect.ROUNDING, False, How.APPROXIMATE, one, other, rule=f"{RULE}/world_size")


def _settings(pair: Pair) -> Iterator[Finding]:
    """Settings of one stack: what is written first, then what follows from nothing written in either."""
    one, other = pair.one, pair.other
    table, before, after = claims(one.dialect), one.effective.flat(), other.effective.flat()
    written = one.given.keys() | other.given.keys()
    changed, told = differing(before, after), set[str]()
    for path in sorted(changed, key=lambda path: (path not in written, path)):
        rule = table.get(path)
        if rule is None:
            continue
        lost = tuple(ours for ours in rule.carried(path) if ours in pair.strayed)
        if path not in written and (not lost or told.issuperset(lost)):
            continue
        told.update(lost)
        yield _finding(path, _weight(pair, rule.ours, lost, path), _why(rule.ours, lost), before.get(path), after.get(path), pair)
    yield from _untold(pair, told)


def _why(ours: tuple[str, ...], lost: tuple[str, ...]) -> str:
    return "" if lost or not ours else "the same meaning in other words, or without effect in this run"


def _weight(pair: Pair, ours: tuple[str, ...], lost: tuple[str, ...], path: str) -> Effect:
    """What the difference of a setting does to the run: the worse of what losing it does on either side."""
    if ours and not lost:
        return Effect.NONE
    rule = claims(pair.one.dialect)[path]
    effects = (rule.effect_of_losing(lost, config.effective) for config in (pair.one, pair.other))
    return min(effects, key=lambda effect: effect.rank)


def _finding(path: str, effect: Effect, why: str, before: Any, after: Any, pair: Pair) -> Finding:
    given = path in pair.one.given or path in pair.other.given
    change = f"{_said(before)} -> {_said(after)}"
    origin, rule = pair.other.origins.get(path), f"{RULE}/{path}"
    return Finding(path, why, effect, given, How.APPROXIMATE, before, after, origin, rule, change)


def _said(value: Any) -> str:
    return "nothing" if value is None else shown(value, LONG)


def _untold(pair: Pair, told: Iterable[str]) -> Iterator[Finding]:
    """Fields of a plan that differ and that no setting tells."""
    for ours in sorted(pair.strayed.difference(told)):
        rule = plan_claims(pair.one.dialect)[ours]
        effects = (rule.effect_of_losing((ours,), config.effective) for config in (pair.one, pair.other))
        effect = min(effects, key=lambda effect: effect.rank)
        yield _finding(ours, effect, "follows from the others", pair.meant.plain.get(ours), pair.kept.plain.get(ours), pair)


# Two stacks


def _apart(pair: Pair) -> Iterator[Finding]:
    """Fields of a plan, each in the words of both stacks; then what no plan holds of either."""
    rows: dict[tuple[str, str], list[str]] = {}
    for ours in sorted(pair.strayed):
        rows.setdefault((_named(pair.one, ours), _named(pair.other, ours)), []).append(ours)
    for (mine, theirs), fields in rows.items():
        row = _row(pair, mine, theirs, fields)
        if row.given or theirs in pair.other.given or row.effect.reaches(Effect.NUMBERS):
            yield row
    for config in (pair.one, pair.other):
        for finding in unheld(config):
            change = f"{_said(finding.before)}, in {config.dialect.title} alone"
            origin = finding.origin if config is pair.other else None
            yield replace(finding, how=None, origin=origin, rule=f"{RULE}/{finding.path}", change=change)


def _named(config: Config, ours: str) -> str:
    """The setting that says a field of a plan, as its stack calls it; the field itself where none does."""
    rule = plan_claims(config.dialect).get(ours)
    paths = rule.carriers(ours) if rule else ()
    return next((path for path in paths if path in config.given), next(iter(paths), ours))


def _row(pair: Pair, mine: str, theirs: str, fields: list[str]) -> Finding:
    weights = {ours: _worth(pair, ours) for ours in fields}
    worst = min(weights, key=lambda ours: weights[ours][0].rank)
    effect, why = weights[worst]
    before, after = pair.meant.plain.get(worst), pair.kept.plain.get(worst)
    change = f"{_said(before)} -> {theirs + ' ' if theirs != mine else ''}{_said(after)}"
    origin, given = pair.other.origins.get(theirs), mine in pair.one.given
    return Finding(mine, why, effect, given, How.APPROXIMATE, before, after, origin, f"{RULE}/{worst}", change)


def _worth(pair: Pair, ours: str) -> tuple[Effect, str]:
    """What a difference in a field of a plan does to the run, and why it is one."""
    sides: tuple[tuple[Config, Mapping[str, Any]], ...] = ((pair.one, pair.meant.plain), (pair.other, pair.kept.plain))
    for config, values in sides:
        if values.get(ours) is None and _leaves(config.dialect, ours):
            return Effect.NONE, f"{config.dialect.title} leaves it to the training script"
    effects = [rule.effect_of_losing((ours,), config.effective) for config, _ in sides if (rule := _rule(config, ours))]
    effect = min(effects, key=lambda effect: effect.rank, default=Effect.NUMBERS)
    why = next((rule.why(ours) for config, values in sides if values.get(ours) is None and (rule := _rule(config, ours))), "")
    return effect, why


def _rule(config: Config, ours: str) -> Any:
    return plan_claims(config.dialect).get(ours)


def _leaves(dialect: Dialect, ours: str) -> bool:
    return not ours.startswith(dialect.about) or (not dialect.model and ours.startswith(SCRIPTED))
