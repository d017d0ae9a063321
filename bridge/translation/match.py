"""A launch against the model whose weights it loads: what does not fit, what computes another function, and the settings
with which it fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bridge.errors import BridgeError, ConfigError
from bridge.plan.equality import plain
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect, How
from bridge.translation.edit import edit_config, without
from bridge.translation.lift import lift, plan_claims
from bridge.translation.translate import full_text

MATCH = "match"
WEIGHTS = "the weights do not fit"
FUNCTION = "the weights load, but the run computes another function"
UNTIED = "both copies of the embedding load, and training moves them apart"
UNSEEN = "the sequences have positions that the model was never trained on"
TRAINING = "the run trains differently from the model's own config"


def _fields(names: str) -> tuple[str, ...]:
    return tuple(f"model.{name}" for name in names.split())


SHAPES = _fields(
    "layers hidden heads kv_heads ffn experts vocab predicted tied "
    "attention.head_size attention.qkv_bias attention.output_bias attention.norm attention.sinks "
    "attention.latent.query_rank attention.latent.kv_rank attention.latent.plain_size "
    "attention.latent.rotary_size attention.latent.value_size "
    "mlp.gated mlp.bias norm.kind norm.bias norm.place norm.shared "
    "embedding.positions embedding.max_positions embedding.width embedding.norm embedding.output_bias "
    "moe.ffn moe.shared_ffn moe.shared_gate moe.layers moe.router_bias moe.balance_bias"
)
"""Plan fields that decide which weights a model has, and their shapes."""
TRAINED = _fields(
    "dropout attention.dropout embedding.dropout moe.balance moe.aux_loss moe.z_loss moe.capacity"
)
"""Plan fields that have a part in training alone."""
NO_NEWS = _fields(
    "family sequence init. embedding.padding embedding.begin embedding.ends moe.aux_trained moe.balance_rate"
)
"""Beginnings of plan fields that say nothing of weights which are loaded: initial values, lengths of the run's own, and how
a model that is only asked for its output balances its experts.
"""
SEQUENCE, POSITIONS, MAX_POSITIONS = (
    "model.sequence",
    "model.embedding.positions",
    "model.embedding.max_positions",
)
VOCAB, PADDED_VOCAB = "model.vocab", "model.embedding.padded_vocab"
WINDOW, TIED, EXPERTS = "model.attention.window", "model.tied", "model.experts"
FOLLOWS = {
    "model.rotary.": POSITIONS,
    "model.embedding.offset": POSITIONS,
    MAX_POSITIONS: POSITIONS,
    "model.rotary.scaling.": "model.rotary.scaling.kind",
    "model.attention.latent.": "model.attention.latent.kv_rank",
    "model.moe.aux_loss": "model.moe.balance",
}
"""By the beginning of plan fields: the field with which they come and go. Where it differs, they are no further difference."""


@dataclass(frozen=True)
class Match:
    """What differs between a launch and the model that it loads, and `fixed`: the launch with settings of the
    model; None if it fits, or if its stack has no such run. `causes` say what a difference does, by the
    finding's id.
    """

    findings: tuple[Finding, ...]
    fixed: Config | None
    causes: Mapping[str, str]

    @property
    def contradictions(self) -> tuple[Finding, ...]:
        """The findings with which the launch does not fit; the others are remarks."""
        return tuple(one for one in self.findings if one.effect.reaches(Effect.NUMBERS))

    @property
    def changes(self) -> Mapping[str, Any]:
        """The settings with which the launch fits; None removes one."""
        return {
            path: None if self.fixed is None else self.fixed.given.get(path)
            for finding in self.contradictions
            for path in finding.about
        }


def match(launch: Config, model: Config) -> Match:
    """Compare the model of a launch with the config of the model, or with the launch that wrote it.

    Raises `BridgeError` if a stack refuses its config, or if one of them states no model.
    """
    stated, known = lift(launch).values(), lift(model).values()
    for config, values in ((launch, stated), (model, known)):
        if values.get("model.hidden") is None:
            raise ConfigError(
                f"{config.dialect.title}: found no size of a model, expected a config that states one; there is nothing "
                "to hold against the other"
            )
    ours, theirs = plain(stated), plain(known)
    causes = dict(_causes(launch, model, ours, theirs, {*stated, *known}))
    fixed, problem = _fix(launch, causes, known, theirs)
    mended = plain(lift(fixed).values()) if fixed else {}
    rows = [
        _row(path, cause, (launch, model), (ours, theirs, mended), fixed, problem)
        for path, cause in causes.items()
    ]
    by_id = {f"{MATCH}/{path}": cause for path, cause in causes.items()}
    return Match(tuple(_joined(rows)), fixed, by_id)


def _fix(
    launch: Config, causes: Mapping[str, str], known: Mapping[str, Any], theirs: Mapping[str, Any]
) -> tuple[Config | None, str]:
    """Return the launch with the model's values where they differ, or None and why its stack refuses that."""
    own = (SEQUENCE, VOCAB, PADDED_VOCAB)
    wanted = {path: known.get(path) for path in causes if path not in own}
    try:
        fixed = launch
        if VOCAB in causes or PADDED_VOCAB in causes:
            fixed = _with_vocab(launch, theirs[VOCAB])
        if wanted:
            fixed = edit_config(fixed, wanted, launch.world_size)
    except BridgeError as error:
        return None, str(error)
    return (None if fixed is launch else fixed), ""


def _with_vocab(launch: Config, size: int) -> Config:
    """Return the launch with a vocabulary of this size, which it pads by its own rule."""
    rule = plan_claims(launch.dialect).get(VOCAB)
    return without(launch, dict.fromkeys(rule.carriers(VOCAB) if rule else (), size))


def _causes(
    launch: Config,
    model: Config,
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    said: set[str],
) -> Iterator[tuple[str, str]]:
    """Yield each plan field in which the two differ, with what the difference does."""
    # What follows from another field alone is no difference of its own.
    fields = [path for path in {**ours, **theirs} if path.startswith("model.") and path in said]
    for path in fields:
        here, there = ours.get(path), theirs.get(path)
        if here == there or path.startswith(NO_NEWS) or _follows(path, ours, theirs):
            continue
        if path == MAX_POSITIONS and theirs.get(POSITIONS) != "learned":
            continue
        if path in (VOCAB, PADDED_VOCAB):
            if not _is_padding(launch, ours, theirs):
                yield path, WEIGHTS
        elif path == WINDOW and _covers(here, ours) and _covers(there, ours):
            continue
        elif path == TIED and here is False:
            yield path, UNTIED
        elif path == "model.predicted" and not here:
            yield path, TRAINING  # the weights of these heads are left out
        else:
            yield path, (WEIGHTS if path in SHAPES else TRAINING if path in TRAINED else FUNCTION)
    length, trained = ours.get(SEQUENCE), _trained_positions(model)
    if length and trained and length > trained and theirs.get(POSITIONS) == "rotary":
        yield SEQUENCE, UNSEEN


def _trained_positions(model: Config) -> int | None:
    """Return the number of positions that the model was trained on, by its config. Rotary positions have no such limit, so a
    plan has none.
    """
    rule = plan_claims(model.dialect).get(MAX_POSITIONS)
    known = model.effective.flat()
    sizes = (known.get(path) for path in (rule.carriers(MAX_POSITIONS) if rule else ()))
    return max((size for size in sizes if isinstance(size, int)), default=None)


def _follows(path: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether a field differs because another one does, with which it comes and goes."""
    if path.startswith("model.moe.") and not (ours.get(EXPERTS) and theirs.get(EXPERTS)):
        return True
    return any(
        path.startswith(start) and path != first and ours.get(first) != theirs.get(first)
        for start, first in FOLLOWS.items()
    )


def _covers(window: int | None, values: Mapping[str, Any]) -> bool:
    """Whether a token sees all earlier tokens of a sequence through this window."""
    length = values.get(SEQUENCE)
    return window is None or (length is not None and window >= length)


def _is_padding(launch: Config, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether the launch pads the model's vocabulary to the size that it has."""
    here, there = ours.get(PADDED_VOCAB), theirs.get(VOCAB)
    if here is None or there is None or here == there:
        return True  # a tokenizer decides
    try:
        own = _with_vocab(launch, there)
    except BridgeError:
        return False
    return bool(plain(lift(own).values()).get(PADDED_VOCAB) == here)


def _row(
    path: str,
    cause: str,
    sides: tuple[Config, Config],
    values: tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]],
    fixed: Config | None,
    problem: str,
) -> Finding:
    launch, model = sides
    rule, known = plan_claims(launch.dialect).get(path), plan_claims(model.dialect).get(path)
    carriers = [*rule.carriers(path)] if rule else []
    given = [it for it in carriers if it in launch.given]
    changed = [it for it in carriers if fixed and fixed.given.get(it) != launch.given.get(it)]
    setting = next(
        iter([*(it for it in changed if it in given), *changed, *given, *carriers]), path
    )
    before, after = values[0].get(path), values[1].get(path)
    if path == SEQUENCE:
        after, known = _trained_positions(model), plan_claims(model.dialect).get(MAX_POSITIONS)
    reached = fixed is not None and values[2].get(path) == after
    if reached and fixed and setting in changed:
        # As the stack says it: the plan may have the opposite.
        before, after = (side.effective.flat().get(setting) for side in (launch, fixed))
    spelled = [it for it in (known.carriers(path) if known else ()) if it in model.given]
    where = f" ({', '.join(spelled)})" if spelled else ""
    if path not in (SEQUENCE, PADDED_VOCAB) and not reached:
        where += f"; {problem}" if problem else f"; no setting of {launch.dialect.title} says so"
    return Finding(
        setting,
        f"{cause}{where}",
        {WEIGHTS: Effect.STOPS, TRAINING: Effect.NONE}.get(cause, Effect.NUMBERS),
        setting in launch.given,
        How.APPROXIMATE,
        before,
        after,
        next((model.origins[it] for it in spelled if it in model.origins), None),
        f"{MATCH}/{path}",
        f"{full_text(before)} -> {full_text(after)}",
        about=tuple(changed) if reached else (),
    )


def _joined(rows: list[Finding]) -> Iterator[Finding]:
    """Yield the rows, worst first, one for each setting."""
    rows.sort(key=lambda row: row.effect.rank)
    by_setting: dict[str, Finding] = {}
    for row in rows:
        first = by_setting.get(row.path)
        if first is None:
            by_setting[row.path] = row
        else:
            by_setting[row.path] = replace(
                first, about=tuple(dict.fromkeys((*first.about, *row.about)))
            )
    yield from by_setting.values()
