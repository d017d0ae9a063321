"""Sections that are kept as they stand, setting by setting: what each that was written stands for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge import limits
from bridge.config import Values
from bridge.dialect import Config
from bridge.errors import BridgeError
from bridge.rules import Effect, Group, Rule

Keys = tuple[str, ...]
REST = "*"
"""Name of a section that holds what stands beside the settings of its schema."""


@dataclass(frozen=True)
class Setting:
    """One setting inside of a section.

    `alone` is its group with nothing else in the section, `stands` the fields of a plan that are otherwise without it;
    `behind` tells whether reading loses what it says.
    """

    path: str
    keys: Keys
    value: Any
    alone: Group
    stands: frozenset[str] = frozenset()
    behind: bool = False


def leaves(section: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """What stands in a section, by the keys that lead there; an empty section in it is a value."""
    if isinstance(section, Mapping) and (section or not keys):
        for key, inner in section.items():
            yield from leaves(inner, (*keys, str(key)))
    elif keys:
        yield keys, section


def named(path: str, keys: Keys) -> str:
    """The path of what stands in the section at `path`."""
    start = path.removesuffix(REST)
    return start + ("" if start.endswith(".") or not start else ".") + ".".join(keys)


def written(path: str, section: Any, group: Group) -> tuple[Setting, ...]:
    """What stands in the section at `path` of a group; nothing where it is none."""
    found = [*leaves(section)]
    return tuple(Setting(named(path, keys), keys, value, {**group, path: _section([(keys, value)])}) for keys, value in found)


def settings(config: Config, rule: Rule, path: str, back: Any = None) -> tuple[Setting, ...]:
    """What the user wrote into the section at `path` and `back` holds otherwise; nothing where `path` is none to be taken apart.

    One too large is not: each of its settings is looked at by leaving it out.
    """
    section = config.given.get(path)
    if not isinstance(section, Mapping):
        return ()
    group = rule.seen(rule.theirs, config.effective)
    parts = written(path, section, group)
    if not rule.ours:
        return moved(parts, back)
    return tuple(_looked_at(config, rule, path, group, parts, back)) if len(parts) <= limits.SETTINGS else ()


def _looked_at(config: Config, rule: Rule, path: str, group: Group, parts: Sequence[Setting], back: Any) -> Iterator[Setting]:
    meant, blurred = rule.read(group, config.context), _blurs(rule, group)
    for part in moved(parts, back):
        section = _section((other.keys, other.value) for other in parts if other is not part)
        without = _accepted(config, config.given.with_({path: section}))
        if without is None:
            yield replace(part, stands=frozenset(rule.carried(path)))
            continue
        left = rule.read(rule.seen(rule.theirs, without), config.context)
        stands = frozenset(ours for ours in rule.ours if meant.get(ours) != left.get(ours))
        behind = blurred and (not _blurs(rule, rule.seen(rule.theirs, without)) or (not stands and _blurs(rule, part.alone)))
        yield replace(part, stands=stands, behind=behind)


def _accepted(config: Config, given: Values) -> Values | None:
    """What the stack makes of other settings; None where it refuses them."""
    try:
        return replace(config, given=given).effective
    except BridgeError:
        return None


def _blurs(rule: Rule, group: Group) -> bool:
    return rule.blurs is not None and rule.blurs(group)


def _section(found: Iterable[tuple[Keys, Any]]) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for (*above, last), value in found:
        place = section
        for key in above:
            place = place.setdefault(key, {})
        place[last] = value
    return section


def moved(parts: Iterable[Setting], section: Any) -> tuple[Setting, ...]:
    """Those of `parts` that `section` does not hold as they are."""
    held = dict(leaves(section))
    return tuple(part for part in parts if part.keys not in held or held[part.keys] != part.value)


def otherwise(path: str, value: Any, held: Any) -> set[str]:
    """What is named where `held` is not the `value` at `path`: it, or of a section each setting that is not as it was."""
    parts = written(path, value, {}) if isinstance(value, Mapping) else ()
    return {part.path for part in moved(parts, held)} or {path}


def worth(rule: Rule, whole: Effect, part: Setting) -> Effect:
    """What losing one setting of a section does to the run: no more than losing all of it."""
    return max(whole, rule.effect_of(part.alone), key=lambda effect: effect.rank)


def tellers(config: Config, rule: Rule, ours: str) -> set[str]:
    """The settings of a group that may tell of a field of a plan; in a section, those that stand for it."""
    paths = {*rule.theirs, *rule.carriers(ours)}
    parts = [part for path in rule.theirs for part in settings(config, rule, path)]
    return paths | {part.path for part in parts if ours in part.stands}
