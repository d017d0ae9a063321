"""Makes a config and its translation small enough for a few local ranks.

Nothing runs here, and torch is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from bridge.engine.interface import Backend
from bridge.errors import BridgeError
from bridge.plan.equality import plain
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config, Written
from bridge.stack.rules import Effect
from bridge.translation.edit import edit_config
from bridge.translation.launch_script import about_models, describe_model
from bridge.translation.lift import lift, lower
from bridge.translation.translate import Result
from bridge.verify.size import ABSENT, OFF, Size, change_plan, changes, changes_like, small_model

Side = Literal["source", "target"]
SCOPE = "optimizer.decay_scope"


@dataclass(frozen=True)
class TranslationPair:
    """A config (the source) and its translation (the target), both made small, with their plans.
    `told` are the findings of `convert` about numbers, each with a field. With `modelled`, the
    written script builds the source's model. If the script's model is only similar to the
    source's model, `nearest` says how the two models differ. `unread` are the settings that nobody
    knows and that no run shows.
    """

    source: Config
    target: Config
    plans: Mapping[Side, Plan]
    changes: Mapping[str, tuple[Any, Any]]
    size: Size
    told: tuple[tuple[str, str], ...] = ()
    modelled: bool = False
    nearest: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    """Settings of numbers whose values differ between source and target. Small runs may not show
    them: sizes become alike, and some features are taken out.
    """
    translated: bool = True
    """True if the target is the translation of the source, false if it is another config of the
    user.
    """

    @property
    def fault(self) -> str:
        """The beginning of a message about a target with other numbers than the source."""
        return (
            "the translation is at fault"
            if self.translated
            else "the second config describes another run"
        )

    @cached_property
    def script(self) -> Written | None:
        """The training script and the model's config.json that `convert --script` writes for the
        target, or None if it cannot write them.
        """
        dialect, plan = self.target.dialect, self.plans["source"]
        if not self.modelled:
            return None
        try:
            model = lower(Plan(model=small_model(plan)), about_models())
            course = {**self.plans["target"].values(), **Plan(model=small_model(plan)).values()}
            return dialect.program(dialect.render(self.target), self.target, course, model).written
        except BridgeError:
            return None

    def findings_text(self, paths: Iterable[str]) -> str:
        """Return a text in parentheses with the findings of `convert` about the plan fields
        `paths`.

        A finding belongs to a plan field if it names the field, or a setting of a stack that stands
        for this field.
        """
        if not self.translated:
            return ""
        plan_fields = set(paths)
        rules = [
            rule
            for config in (self.source, self.target)
            for rule in config.dialect.rules
            if plan_fields & {*rule.ours}
        ]
        entries = (
            field
            for rule in rules
            for field, stands_for in rule.carries.items()
            if plan_fields & {*stands_for}
        )
        fields = {*plan_fields, *entries, *(field for rule in rules for field in rule.theirs)}
        messages = [message for field, message in self.told if field in fields]
        return (
            f" (`convert` reports this: {'; '.join(dict.fromkeys(messages))})"
            if messages
            else " (`convert` does not report this)"
        )

    def config(self, side: Side) -> Config:
        """Return the source or the target."""
        return self.source if side == "source" else self.target


def fit_pair(
    source: Config, result: Result, backends: Mapping[str, Backend], limit: int
) -> TranslationPair:
    """Return source and target, changed so that they run on at most `limit` ranks.

    Raises `BridgeError` if a stack refuses its changed config.
    """
    target = result.config
    first, second = meaning_of(source, backends), meaning_of(target, backends)
    size = Size.of(first, limit)
    edits = changes(first, size)
    smaller = in_small(source, edits, size, backends)
    # A stack may be unable to make one number smaller alone. The target follows what the source
    # became.
    became = meaning_of(smaller, backends).values()
    theirs = changes_like(
        second,
        size.like(first, second),
        first,
        {**edits, **{path: became.get(path) for path in edits}},
    )
    small = smaller, in_small(target, theirs, size, backends)
    # Changes to what watches a run, and to axes of experts that the model does not have, are none
    # to the run.
    idle = ("debug.",) if first.model.experts else ("debug.", "parallel.expert")
    differences = {
        path: (first.values().get(path), value)
        for path, value in edits.items()
        if not path.startswith(idle)
    }
    plans: dict[Side, Plan] = {
        "source": meaning_of(small[0], backends),
        "target": meaning_of(small[1], backends),
    }
    if None in (first.model.hidden, second.model.hidden):
        # One of the configs does not describe its model, which the training script brings. Both
        # train that of the source.
        unsaid = dict.fromkeys(
            path for path in plans["target"].values() if path.startswith("model.")
        )
        own = {
            path: value
            for path, value in plans["source"].values().items()
            if path.startswith("model.")
        }
        plans["target"] = change_plan(plans["target"], {**unsaid, **own})
    model, findings = (
        describe_model(result)
        if first.model.hidden and not second.model.hidden
        else (None, result.findings)
    )
    numbers = [finding for finding in findings if finding.effect.reaches(Effect.NUMBERS)]
    nearest = tuple(f"{it.path}: {it.message}" for it in numbers if it not in result.findings)
    differ = tuple((it.path, it.message) for it in numbers if it in result.findings)
    return TranslationPair(
        *small,
        plans,
        differences,
        size,
        differ,
        model is not None,
        nearest,
        unread(source),
        tuple(_unlike(plain(first.values()), plain(second.values()))),
    )


def _unlike(source: Mapping[str, Any], target: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings of model, formats, optimizer and loss that have other values in `target`."""
    described = "model.hidden" in source and "model.hidden" in target
    for path in dict.fromkeys((*source, *(ABSENT if described else ()))):
        value = source.get(path)
        other = target.get(path, ABSENT.get(path, value) if described else value)
        # Without decay, its scope is nothing.
        idle = path == SCOPE and not source.get("optimizer.weight_decay")
        alike = value == other or (value in OFF and other in OFF) or idle
        if path.startswith(("model.", "precision.", "optimizer.", "loss")) and not alike:
            yield f"{path}: {value} in the source, {other} in the target"


def unread(*configs: Config) -> tuple[str, ...]:
    """Return the settings of the configs that nobody knows, each with its value."""
    findings = (finding for config in configs for finding in config.remarks if finding.unknown)
    return tuple(f"not known: {it.path} {it.change}".rstrip() for it in findings)


def in_small(
    config: Config, edits: Mapping[str, Any], size: Size, backends: Mapping[str, Backend]
) -> Config:
    """Return `config` with the changes `edits` of plan fields. The engine of the config's stack
    makes the changes, if there is one.
    """
    backend = backends.get(config.dialect.name)
    return (
        backend.edit_config(config, edits, size.world)
        if backend
        else edit_config(config, edits, size.world)
    )


def meaning_of(config: Config, backends: Mapping[str, Backend]) -> Plan:
    """Return the plan of a config, including settings that the config's script makes."""
    backend = backends.get(config.dialect.name)
    return backend.meaning(config) if backend else lift(config)
