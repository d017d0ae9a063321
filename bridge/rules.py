"""Rules: each row of a dialect's table maps a group of its fields to a group of Plan fields, and
tells what is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar

from packaging.version import Version

from bridge.plan import paths

Group = Mapping[str, Any]
T = TypeVar("T")


class How(StrEnum):
    """The way in which a value of the target came about."""

    EXACT = "exact"
    DERIVED = "derived"
    APPROXIMATE = "approximate"
    DEFAULTED = "defaulted"
    DROPPED = "dropped"
    MISSING = "missing"


class Effect(StrEnum):
    """The effect of a field, or of its loss, on the run; the worst first."""

    STOPS = "the run stops"
    NUMBERS = "different numbers"
    ROUNDING = "same up to rounding"
    COST = "memory or speed"
    NONE = "same numbers"

    @property
    def rank(self) -> int:
        """Its position in the order of effects, 0 for the worst."""
        return _RANKS[self]

    def reaches(self, threshold: Effect) -> bool:
        """Whether it is as bad as `threshold`, or worse."""
        return self.rank <= threshold.rank


_RANKS: Mapping[Effect, int] = {effect: rank for rank, effect in enumerate(Effect)}


# Parsing a version is slow, and a table asks for the same few in every row.
@cache
def _since(release: str, version: str) -> bool:
    return Version(release) >= Version(version)


@dataclass(frozen=True)
class Context:
    """Facts that a rule may see besides its own values: the release and the world size (in ranks,
    None if unknown).

    `had` names the settings of the file that is written anew. If a value has two spellings, a rule
    keeps the one of that file.
    """

    version: str
    world_size: int | None = None
    had: frozenset[str] = frozenset()

    @cached_property
    def release(self) -> Version:
        """The release as a comparable value."""
        return Version(self.version)

    def since(self, version: str) -> bool:
        """Whether this release is `version` or a later one."""
        return _since(self.version, version)


_LOSSES: Mapping[Effect, str] = {
    Effect.NUMBERS: (
        "model adapters run.steps run.epochs run.seed run.weights_only run.load_optimizer run.load_random run.resumed_schedule "
        "run.host_init optimizer.nesterov optimizer.update_scale "
        "optimizer.amsgrad optimizer.bias_correction optimizer.decay_scope optimizer.decay_ramp "
        "optimizer.embedding_lr optimizer.output_lr precision.fp8_recipe precision.autocast"
    ),
    Effect.ROUNDING: (
        "zero.prescale zero.predivide zero.average_in_collective precision.fp8_weights precision.residual precision.router "
        "precision.moments precision.communicate"
    ),
    Effect.COST: (
        "zero.gather_bucket zero.double_buffer zero.registered zero.fp8_transposes zero.meta_init zero.offload.pinned "
        "parallel.tensor_overlap parallel.vocabulary parallel.context_method parallel.dispatcher recompute "
        "run.collect_interval run.loaders run.backend run.timers run.async_save"
    ),
    Effect.NONE: (
        "model.family run.log_interval run.save_interval run.save_optimizer run.save_random run.eval_interval run.timeout "
        "run.exit_interval run.keep_checkpoints run.eval_steps run.project run.entity"
    ),
}


# Sorted, a longer name comes after its beginning and overwrites it: `model.family` wins over
# `model`.
EFFECTS: Mapping[str, Effect] = {
    path: effect
    for start, effect in sorted(
        (start, effect) for effect, starts in _LOSSES.items() for start in starts.split()
    )
    for path in paths()
    if path == start or path.startswith(start + ".")
}
"""The effect of losing each plan field whose effect is the same in every stack."""

Side = Callable[[Group, Context], Group]


def _nothing(values: Group, context: Context) -> Group:
    return {}


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A group of `theirs` paths <-> a group of `ours` paths.

    `read` turns effective values of theirs into values of ours; `write` turns ours into values to
    write. Each sees its own group and the paths in `sees` (of either side, claimed by other rules).
    It leaves out fields that it knows nothing about, and may raise `BridgeError`.

    - `effect`: the effect of losing the group on the run, or a function of their values.
    - `lossy`: the loss that is possible between the two sides, in words.
    - `blurs`: whether reading these values of theirs already loses something.
    - `tells`: the loss by reading, in words.
    - `reasons`: why single fields of ours (or all with that beginning) are lost, if `lossy` is not
      about them.
    - `note`: a remark for people. `source`: the place in the stack's source on which the row is
      based.
    - `carries`: the fields of ours that a path of theirs stands for, if it is not the whole group.
    - `model`: true for facts about the model itself.
    - `mixed`: true if each field of ours has an effect of its own, the one in `EFFECTS`.
    - `becomes`: the change of a path's value in words, if units or rounding need them; else empty.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    read: Side
    write: Side
    effect: Effect | Callable[[Group], Effect] = Effect.NUMBERS
    lossy: str = ""
    note: str = ""
    source: str = ""
    sees: tuple[str, ...] = ()
    blurs: Callable[[Group], bool] | None = None
    carries: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    model: bool = False
    mixed: bool = False
    tells: Callable[[Group], str] | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    becomes: Callable[[str, Group], str] | None = None

    @property
    def about_model(self) -> bool:
        """Whether the rule is about the model alone."""
        return self.model or (
            bool(self.ours) and all(path.startswith("model.") for path in self.ours)
        )

    def carried(self, theirs: str) -> tuple[str, ...]:
        """Plan paths that a path of theirs stands for."""
        return self.carries.get(theirs, self.ours)

    @cache  # noqa: B019 - tables live as long as the program
    def carriers(self, ours: str) -> tuple[str, ...]:
        """Their paths that stand for a Plan path: those of this group, and seen ones that `carries`
        names.
        """
        seen = (path for path in self.sees if path in self.carries)
        return tuple(path for path in (*self.theirs, *seen) if ours in self.carried(path))

    def why(self, ours: str) -> str:
        """The reason why a Plan path may be lost: the one under the longest prefix of the path in
        `reasons`, else `lossy` or `note`.
        """
        starts = [start for start in self.reasons if ours == start or ours.startswith(start + ".")]
        return self.reasons[max(starts, key=len)] if starts else self.lossy or self.note

    def effect_of(self, values: Group) -> Effect:
        """The effect of losing the group on a run with these values of theirs; `values` may hold
        values of other settings too.
        """
        return (
            self.effect
            if isinstance(self.effect, Effect)
            else self.effect(self.seen(self.theirs, values))
        )

    def effect_of_losing(self, ours: tuple[str, ...], values: Group) -> Effect:
        """The effect of losing these fields of ours on a run with these values of theirs; the
        effect of losing the whole group if `ours` is empty.
        """
        if not self.mixed or not ours:
            return self.effect_of(values)
        return min(
            (EFFECTS.get(path, Effect.NUMBERS) for path in ours), key=lambda effect: effect.rank
        )

    def seen(self, claimed: tuple[str, ...], values: Group) -> dict[str, Any]:
        """The part of `values` that one side of this rule sees: the `claimed` paths and those in
        `sees`.
        """
        return {path: values[path] for path in (*claimed, *self.sees) if path in values}


def _paths(paths: str | tuple[str, ...]) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else paths


def rename(
    theirs: str, ours: str, *, effect: Effect | None = None, note: str = "", source: str = ""
) -> Rule:
    """A rule for one value under two names. By default the effect is that of the plan field."""

    def read(values: Group, context: Context) -> Group:
        return {ours: values[theirs]} if values.get(theirs) is not None else {}

    def write(values: Group, context: Context) -> Group:
        return {theirs: values[ours]} if values.get(ours) is not None else {}

    return Rule(
        (theirs,),
        (ours,),
        read,
        write,
        effect or EFFECTS.get(ours, Effect.NUMBERS),
        note=note,
        source=source,
    )


def spared(decay: str, scope: str, note: str, *, lossy: str = "", source: str = "") -> Rule:
    """A rule for parameters that a stack never decays. It has an effect only if the setting `decay`
    is given.
    """
    return Rule(
        (),
        ("optimizer.decay_scope",),
        lambda values, context: {"optimizer.decay_scope": scope},
        lambda values, context: {},
        lambda values: Effect.NUMBERS if values.get(decay) else Effect.NONE,
        lossy=lossy,
        note=note,
        source=source,
        sees=(decay,),
        carries={decay: ("optimizer.decay_scope",)},
    )


def counted(
    theirs: str, ours: str, *, never: int | None = 0, note: str = "", source: str = ""
) -> Rule:
    """A rule for one number of steps or parts; `never` is the stack's value for our 0, which means
    never.
    """

    def read(values: Group, context: Context) -> Group:
        return {ours: max(0, values[theirs])} if values.get(theirs) is not None else {}

    return convert(
        theirs,
        ours,
        read,
        # None leaves the setting open, which is not the same as their word for never.
        lambda values, context: {theirs: values.get(ours) or never if ours in values else None},
        effect=EFFECTS[ours],
        blurs=lambda values: (values.get(theirs) or 0) < 0,
        note=note,
        source=source,
    )


def switched_off(theirs: str, ours: str, *, note: str = "", source: str = "") -> Rule:
    """A rule for a switch of theirs that turns off what a plan field turns on."""
    return convert(
        theirs,
        ours,
        lambda values, context: {ours: not values[theirs]} if theirs in values else {},
        lambda values, context: {theirs: True} if values.get(ours) is False else {},
        effect=EFFECTS[ours],
        note=note,
        source=source,
    )


def scaled(theirs: str, ours: str, factor: float, *, note: str = "", source: str = "") -> Rule:
    """A rule for one quantity in two units: ours is `factor` times theirs."""
    return convert(
        theirs,
        ours,
        lambda values, context: {ours: values[theirs] * factor} if values.get(theirs) else {},
        lambda values, context: {theirs: values[ours] / factor} if values.get(ours) else {},
        effect=EFFECTS[ours],
        note=note,
        source=source,
    )


def convert(
    theirs: str | tuple[str, ...],
    ours: str | tuple[str, ...],
    read: Side,
    write: Side,
    *,
    lossy: str = "",
    effect: Effect | Callable[[Group], Effect] = Effect.NUMBERS,
    note: str = "",
    source: str = "",
    sees: tuple[str, ...] = (),
    blurs: Callable[[Group], bool] | None = None,
    carries: Mapping[str, str | tuple[str, ...]] | None = None,
    model: bool = False,
    mixed: bool = False,
    tells: Callable[[Group], str] | None = None,
    reasons: Mapping[str, str] | None = None,
    becomes: Callable[[str, Group], str] | None = None,
) -> Rule:
    """A rule for two groups and the functions between them. The parameters are the fields of
    `Rule`.
    """
    carried = {path: _paths(stands_for) for path, stands_for in (carries or {}).items()}
    group = (_paths(theirs), _paths(ours), read, write)
    return Rule(
        *group,
        effect,
        lossy,
        note,
        source,
        sees,
        blurs,
        carried,
        model,
        mixed,
        tells,
        reasons or {},
        becomes,
    )


def always(ours: str, value: Any, note: str, effect: Effect = Effect.NUMBERS) -> Rule:
    """A rule for a Plan field in which the stack has no choice: it always uses `value`."""
    return Rule((), (ours,), lambda values, context: {ours: value}, _nothing, effect, note=note)


ADAM = {"optimizer.nesterov": False, "optimizer.amsgrad": False, "optimizer.bias_correction": True}


def plain_adam(*ours: str, note: str) -> tuple[Rule, ...]:
    """A rule for each of these fields in `ADAM`, for which the stack's Adam has no switch."""
    return tuple(always(path, ADAM[path], note, EFFECTS[path]) for path in ours)


def only_theirs(
    *theirs: str,
    note: str,
    effect: Effect | Callable[[Group], Effect] = Effect.NONE,
    source: str = "",
    model: bool = False,
) -> Rule:
    """A rule for fields of the stack that no Plan field stands for, with the reason."""
    return Rule(theirs, (), _nothing, _nothing, effect, note=note, source=source, model=model)


class Why(NamedTuple):
    """Why no Plan field stands for a field of the stack, and the effect of losing it."""

    note: str
    effect: Effect | Callable[[Group], Effect]
    model: bool = False


def longest(path: str, reasons: Mapping[str, T], other: T) -> T:
    """The reason under the longest prefix of `path` in `reasons`; `other` if there is no prefix."""
    starts = [start for start in reasons if path == start or path.startswith(start + ".")]
    return reasons[max(starts, key=len)] if starts else other


def _lost(path: str) -> Effect:
    if path not in EFFECTS:
        raise KeyError(
            f"{path}: has no effect yet; list it in _LOSSES under the effect of losing it"
        )
    return EFFECTS[path]


def completed(
    mapped: Iterable[Rule],
    lacks: Mapping[str, str],
    theirs: Iterable[str],
    why: Callable[[str], Why],
) -> tuple[Rule, ...]:
    """`mapped` and the rules that complete it: a rule for each Plan field that no row claims, with
    the reason under its longest prefix in `lacks`; and a rule for each reason that `why` gives for
    the fields in `theirs` that no row claims.
    """
    mapped = tuple(mapped)
    said = {path for rule in mapped for path in rule.ours}
    left = {path: longest(path, lacks, "") for path in paths() if path not in said}
    claimed = {path for rule in mapped for path in rule.theirs}
    rows: dict[Why, list[str]] = {}
    for path in theirs:
        if path not in claimed:
            rows.setdefault(why(path), []).append(path)
    return (
        *mapped,
        *(only_ours(path, note=note, effect=_lost(path)) for path, note in left.items() if note),
        *(
            only_theirs(*found, note=reason.note, effect=reason.effect, model=reason.model)
            for reason, found in rows.items()
        ),
    )


def each_only_ours(*ours: str, note: str) -> tuple[Rule, ...]:
    """A rule for each of these Plan fields, which the stack cannot express, each with its own
    effect.
    """
    return tuple(only_ours(path, note=note, effect=EFFECTS[path]) for path in ours)


def only_ours(*ours: str, note: str, effect: Effect = Effect.NUMBERS) -> Rule:
    """A rule for Plan fields that the stack cannot express, with the reason."""
    return Rule((), ours, _nothing, _nothing, effect, note=note)


def lacks(section: str, note: str, effect: Effect = Effect.NUMBERS) -> Rule:
    """A rule for a whole section of Plan that the stack does not have, with the reason."""
    inside = tuple(path for path in paths() if path == section or path.startswith(section + "."))
    return Rule((), inside, _nothing, _nothing, effect, note=note)
