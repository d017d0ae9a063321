"""Sections that a schema takes as free mappings: splits a section into single settings, and finds
the plan fields that each setting stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from bridge import limits
from bridge.errors import BridgeError
from bridge.plan.section import Values
from bridge.stack.dialect import Config
from bridge.stack.rules import Effect, Group, Rule

Keys = tuple[str, ...]
REST = "*"
"""Path component of the free mapping that holds settings the schema does not list."""


@dataclass(frozen=True)
class SectionSetting:
    """One setting inside a section, at the nested `keys`.

    `alone` are the values of the rule's group if the section had only this setting. `stands` are
    the plan fields that change if the setting is left out. `behind` is true if the setting's value
    is lost when the config is read into a plan.
    """

    path: str
    keys: Keys
    value: Any
    alone: Group
    stands: frozenset[str] = frozenset()
    behind: bool = False


def values_in_section(section: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield the values in a section, each with the keys that lead to it. An empty mapping inside
    the section is a value.
    """
    if isinstance(section, Mapping) and (section or not keys):
        for key, inner in section.items():
            yield from values_in_section(inner, (*keys, str(key)))
    elif keys:
        yield keys, section


def path_at(path: str, keys: Keys) -> str:
    """Return the path of the setting at `keys` in the section at `path`."""
    start = path.removesuffix(REST)
    return start + ("" if start.endswith(".") or not start else ".") + ".".join(keys)


def section_settings(path: str, section: Any, group: Group) -> tuple[SectionSetting, ...]:
    """Return the settings in a section, where `path` is the section's path and `group` the values
    of its rule. Empty if `section` is no mapping.
    """
    parts = []
    for keys, value in values_in_section(section):
        alone = {**group, path: _section([(keys, value)])}
        parts.append(SectionSetting(path_at(path, keys), keys, value, alone))
    return tuple(parts)


def settings(config: Config, rule: Rule, path: str, back: Any = None) -> tuple[SectionSetting, ...]:
    """Return the settings in the user's section at `path` whose values differ in `back`, another
    version of the section.

    Empty if `path` is no section, or if the section has more than `limits.SETTINGS` settings.
    """
    section = config.given.get(path)
    if not isinstance(section, Mapping):
        return ()
    group = rule.values_in_view(rule.theirs, config.effective)
    parts = section_settings(path, section, group)
    if not rule.ours:
        return settings_that_changed(parts, back)
    # Each setting costs one reading of the whole config without it.
    if len(parts) > limits.SETTINGS:
        return ()
    return tuple(_settings_that_matter(config, rule, path, group, parts, back))


def _settings_that_matter(
    config: Config, rule: Rule, path: str, group: Group, parts: Sequence[SectionSetting], back: Any
) -> Iterator[SectionSetting]:
    before, blurs = rule.read(group, config.context), _blurs(rule, group)
    for part in settings_that_changed(parts, back):
        section = _section((other.keys, other.value) for other in parts if other is not part)
        without = _effective_or_none(config, config.given.with_({path: section}))
        if without is None:
            # The stack needs this setting, so nothing tells it apart from the others: it may stand
            # for all of the group.
            yield replace(part, stands=frozenset(rule.paths_of_plan(path)))
            continue
        after = rule.read(rule.values_in_view(rule.theirs, without), config.context)
        stands = frozenset(ours for ours in rule.ours if before.get(ours) != after.get(ours))
        behind = False
        if blurs:
            # Reading loses this setting if nothing is lost without it, or if it stands for no field
            # and is lost on its own.
            others_are_kept = not _blurs(rule, rule.values_in_view(rule.theirs, without))
            behind = others_are_kept or (not stands and _blurs(rule, part.alone))
        yield replace(part, stands=stands, behind=behind)


def _effective_or_none(config: Config, values: Values) -> Values | None:
    """Return the effective values of `config` with the settings `values`, or None if the stack
    refuses them.
    """
    try:
        return replace(config, given=values).effective
    except BridgeError:
        return None


def _blurs(rule: Rule, group: Group) -> bool:
    return rule.blurs is not None and rule.blurs(group)


def _section(pairs: Iterable[tuple[Keys, Any]]) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for (*above, last), value in pairs:
        place = section
        for key in above:
            place = place.setdefault(key, {})
        place[last] = value
    return section


def settings_that_changed(
    parts: Iterable[SectionSetting], section: Any
) -> tuple[SectionSetting, ...]:
    """Return the settings in `parts` that `section` lacks or that have another value in `section`."""
    values = dict(values_in_section(section))
    return tuple(
        part for part in parts if part.keys not in values or values[part.keys] != part.value
    )


def otherwise(path: str, value: Any, other: Any) -> set[str]:
    """Return the paths that a report names if `other` differs from the `value` at `path`. For a
    section these are the settings in it that differ, otherwise `path`.
    """
    parts = section_settings(path, value, {}) if isinstance(value, Mapping) else ()
    return {part.path for part in settings_that_changed(parts, other)} or {path}


def worth(rule: Rule, whole: Effect, part: SectionSetting) -> Effect:
    """Return the effect of losing one setting of a section on the run. This effect is at most as
    bad as `whole`, the effect of losing the whole section.
    """
    return max(whole, rule.effect_of(part.alone), key=lambda effect: effect.rank)


def is_told(config: Config, rule: Rule, ours: str, names: AbstractSet[str]) -> bool:
    """Return whether one of the settings in `names` belongs to a rule and may be about the plan field
    `ours`. Of a section, only the settings that stand for the field count.
    """
    if any(path in names for path in (*rule.theirs, *rule.carriers(ours))):
        return True
    # To look at a section costs a reading of the whole config for each of its settings.
    sections = (
        path
        for path in rule.theirs
        if any(one.startswith(path.removesuffix(REST)) for one in names)
    )
    parts = (part for path in sections for part in settings(config, rule, path))
    return any(part.path in names and ours in part.stands for part in parts)
