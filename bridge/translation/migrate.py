"""Migration: makes a config for another release of the same stack that means the same as before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from bridge.errors import BridgeError
from bridge.stack.dialect import Config
from bridge.stack.rules import Context, Group
from bridge.stack.setting_renames import Move
from bridge.stack.stack_tables import StackTables
from bridge.translation.lift import lift, rules_for


def migrate(config: Config, version: str) -> Config | None:
    """Return the config for `version` whose meaning is nearest to the meaning of `config`.

    Returns None if the release accepts no part of `config`.
    """
    if version == config.version:
        return config
    base = readable(config, reword_settings(config, version), version)
    if base is None:
        return None
    # First everything that the release still accepts, then what its table writes for the rest, then
    # what comes nearer to the meaning; last, settings that turned out not to be needed are removed
    # again.
    aim, start = Aim(config), grown(base, nearest_words(config, base))
    near = aim.nearer(start, aim.groups(start))
    return replace(as_read(aim.trim_changes(near, start)), opaque=config.opaque)


def nearest_words(config: Config, start: Config) -> list[Group]:
    """Return the settings that can replace the settings of `config` that `start` had to leave out.
    Each group has the settings that one rule of the table writes.
    """
    settings = lower_for_release(config, start.version)
    out = reword_settings(config, start.version).keys() - start.given.keys()
    rules = (rule for rule in config.dialect.rules if not out.isdisjoint(rule.theirs))
    return [
        {
            path: settings[path]
            for path in rule.theirs
            if path in settings and path not in start.given
        }
        for rule in rules
    ]


def as_read(config: Config) -> Config:
    """Return `config` with each value in the form that the parser of the config's release returns."""
    reading = config.dialect.parse(config.text(), config.version, lenient=False)
    read = {path: reading.given.get(path, value) for path, value in config.given.items()}
    return build_config(config, read, config.version) or config


def readable(config: Config, settings: Group, version: str) -> Config | None:
    """Return a config with as many settings of `settings` as the release accepts, or None if it
    accepts none.
    """
    release_settings = settable(config.dialect, settings, version, config.entry)
    if whole := build_config(config, release_settings, version):
        return whole
    # Some stacks refuse an empty config, so the second base is what the table writes for the
    # meaning.
    base = build_config(config, {}, version) or build_config(
        config, lower_for_release(config, version), version
    )
    return base and grown(base, [{path: value} for path, value in release_settings.items()])


def build_config(config: Config, settings: Group, version: str) -> Config | None:
    """Return a config of release `version` with `settings`, or None if the release refuses them."""
    try:
        return config.dialect.config(settings, version, config.world_size, config.entry)
    except BridgeError:
        return None


def grown(config: Config, groups: Sequence[Group]) -> Config:
    """Return `config` with all groups added that the stack accepts. The search for these groups
    halves `groups` again and again.

    The stack accepts most groups, so the search takes about log2(groups) attempts for each refused
    group.
    """
    settings = {
        **config.given,
        **{path: value for group in groups for path, value in group.items()},
    }
    more = build_config(config, settings, config.version) if groups else config
    if more is not None or len(groups) < 2:
        return more or config
    half = len(groups) // 2
    return grown(grown(config, groups[:half]), groups[half:])


def settable(dialect: StackTables, settings: Group, version: str, entry: str) -> dict[str, Any]:
    """Return the settings in `settings` that a release knows."""
    return {
        path: value
        for path, value in settings.items()
        if dialect.knows(path, value, version, entry)
    }


def lower_for_release(config: Config, version: str) -> dict[str, Any]:
    """Return the plan of `config` as settings of a release. Fields for which the release has no
    setting are left out.
    """
    output: dict[str, Any] = {}
    for rule, values in rules_for(lift(config).values(), config.dialect, config.world_size):
        # A rule that cannot write these values for the release leaves its settings out; `differing_fields`
        # then shows the loss.
        with suppress(BridgeError):
            output.update(rule.write(values, Context(version, config.world_size)))
    settings = {path: value for path, value in output.items() if value is not None}
    return settable(config.dialect, settings, version, config.entry)


# Words


def reword_settings(config: Config, version: str) -> dict[str, Any]:
    """The settings given in `config`, under the names that release `version` has for them."""
    settings = dict(config.given)
    for move, forward in moves(config.dialect, config.version, version):
        result = move.apply_to(settings, forward)
        additions = {path: value for path, value in result.items() if path not in settings}
        # A move is made only if the release knows all of its new settings; else the old ones stay
        # and are told as lost.
        if settable(config.dialect, additions, version, config.entry) == additions:
            settings = result
    return settings


def moves(dialect: StackTables, version: str, to_version: str) -> Iterator[tuple[Move, bool]]:
    """Yield the moves from release `version` to release `to_version`, in the order in which to
    apply them. If `to_version` is the newer release, moves before `version` are included. Each move
    comes with True if old settings become new settings, and with False for the other direction.
    """
    order = dialect.versions.index
    start, end = order(version), order(to_version)
    if end > start:
        # Also moves before `start`: stacks take old names for a while, and an upgrade is the time
        # to replace them.
        yield from ((move, True) for move in dialect.moves if order(move.since) <= end)
    else:
        yield from (
            (move, False) for move in reversed(dialect.moves) if end < order(move.since) <= start
        )


# Distance


def has(config: Config, path: str, value: Any) -> bool:
    """Return whether the release of `config` has a setting: the setting was given, has an effective
    value, or is known by name.
    """
    in_schema = config.dialect.knows(path, value, config.version, config.entry)
    return path in config.given or config.effective.get(path) is not None or in_schema


def differing(one: Config, other: Config) -> Mapping[str, tuple[Any, Any]]:
    """Return the settings that both releases have and whose effective values differ, each with the
    two values.
    """
    paths = dict.fromkeys((*one.effective, *other.effective))
    pairs = {path: (one.effective.get(path), other.effective.get(path)) for path in paths}
    unlike = {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}
    return {
        path: pair
        for path, pair in unlike.items()
        if has(one, path, pair[1]) and has(other, path, pair[0])
    }


@dataclass(frozen=True)
class Aim:
    """The meaning of `config`, and the search for a config of another release with nearly this
    meaning.
    """

    config: Config

    @cached_property
    def meaning(self) -> Mapping[str, Any]:
        """The values of the plan that `config` means."""
        return lift(self.config).values()

    def differing_fields(self, other: Config) -> list[str]:
        """Plan fields in which `other` differs from `config`."""
        values = lift(other).values()
        return [
            path
            for path in {**self.meaning, **values}
            if self.meaning.get(path) != values.get(path)
        ]

    def distance(self, other: Config) -> tuple[int, int]:
        """Return the number of plan fields that differ and the number of settings that differ. The
        smaller of two such pairs is nearer to the aim.
        """
        return len(self.differing_fields(other)), len(differing(self.config, other))

    def groups(self, start: Config) -> list[Group]:
        """Return groups of settings that may bring `start` nearer to the aim. First come the
        settings that the table writes for each plan field that differs, then each single setting
        whose effective value differs.
        """
        settings, fields = (
            lower_for_release(self.config, start.version),
            self.differing_fields(start),
        )
        rules = [
            rule for rule in self.config.dialect.rules if not set(fields).isdisjoint(rule.ours)
        ]
        by_rule = [
            {path: settings[path] for path in rule.theirs if path in settings} for rule in rules
        ]
        # Settings that have another name by now would only be refused, or undo the move.
        old = self.config.given.keys() - reword_settings(self.config, start.version).keys()
        unlike = {
            path: before
            for path, (before, _) in differing(self.config, start).items()
            if before is not None
        }
        values = {path: value for path, value in unlike.items() if path not in old}
        singles = settable(start.dialect, values, start.version, start.entry)
        return [
            group
            for group in (*by_rule, *({path: value} for path, value in singles.items()))
            if group
        ]

    def nearer(self, config: Config, groups: Sequence[Group]) -> Config:
        """Return `config` with all groups added that bring it nearer to the aim. The search for
        these groups halves `groups` again and again.
        """
        settings = {
            **config.given,
            **{path: value for group in groups for path, value in group.items()},
        }
        more = build_config(config, settings, config.version) if groups else None
        if more is not None and self.distance(more) < self.distance(config):
            return more
        if len(groups) < 2:
            return config
        half = len(groups) // 2
        return self.nearer(self.nearer(config, groups[:half]), groups[half:])

    def trim_changes(self, config: Config, start: Config) -> Config:
        """Return `config` with settings put back to their values in `start`. A setting is put back
        if this does not move the config away from the aim.
        """
        for path in [path for path in config.given if config.given[path] != start.given.get(path)]:
            old = {path: start.given[path]} if path in start.given else {}
            rest = {name: value for name, value in config.given.items() if name != path}
            less = build_config(config, {**rest, **old}, config.version)
            if less is not None and self.distance(less) <= self.distance(config):
                config = less
        return config
