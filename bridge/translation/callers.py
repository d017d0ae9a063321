"""Runs of a stack under a program that takes the flags of another: both say parts of one run, and some parts twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bridge.files import Document
from bridge.stack import registry
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from bridge.stack.sources import Claim, Said, Settled
from bridge.translation.lift import claims, meaning_of, plan_claims, world_of

UNREAD = "optimizer.type"
"""The path of the finding on a file alone that its program's flags are not read."""
ADVICE = "the run takes that one; make both equal, or drop this one"


def add_caller(config: Config, document: Document) -> Config:
    """Return a config with what the program says that calls its stack, if `document` is a launch of one.

    Its flags are read as those of the oldest release known, from which such programs were forked.
    """
    called = config.dialect.find_called(document)
    for name in config.dialect.callers if called else ():
        if called and registry.score(name, called.data):
            dialect = registry.load(name)
            world = config.world_size or world_of(meaning_of(config))
            return _join(config, dialect.read(called, dialect.versions[0], world, lenient=True))
    return config


def _join(config: Config, caller: Config) -> Config:
    run = replace(config, caller=caller)
    rows = dict[str, Settled]()
    for path, value in caller.given.items():
        if not is_decided(run, path):
            rows[path] = Settled(path, value, _said(caller, path))
    for path, claim in _contradictions(run, config, caller):
        row = rows.get(path, Settled(path, caller.effective[path], _said(caller, path)))
        rows[path] = replace(row, overruled=(*row.overruled, claim))
    lost = [replace(claim, path=path) for path, claim in _contradictions(run, caller, config)]
    sources = replace(
        config.sources,
        own=(*config.sources.own, *rows.values()),
        claims=(*config.sources.claims, *lost),
    )
    # What the reader of the file says of words that it leaves to the program, the program's reader tells.
    own = [
        one
        for one in config.remarks
        if not (one.unknown and one.effect is Effect.NONE) and one.path != UNREAD
    ]
    return replace(run, sources=sources, remarks=(*own, *find_caller_remarks(run)))


def find_caller_remarks(run: Config) -> Iterator[Finding]:
    """Yield what the reader and the checks of a run's caller say of settings that it decides."""
    caller = run.caller
    if caller is not None:
        findings = (*caller.remarks, *caller.dialect.inspect(caller))
        for one in findings:
            # What stops the other stack's own program need not stop one that was forked from it.
            if not is_decided(run, one.path) and one.effect is not Effect.STOPS:
                yield one


def is_decided(run: Config, path: str) -> bool:
    """Return whether the run takes a setting of its caller from its own file alone."""
    assert run.caller is not None
    path = path.partition("=")[0]
    rule = claims(run.caller.dialect).get(path)
    fields = rule.paths_of_plan(path) if rule else ()
    if path in run.dialect.launched:
        return True
    return bool(fields) and all(ours.startswith(run.dialect.decides) for ours in fields)


def _contradictions(run: Config, loser: Config, winner: Config) -> Iterator[tuple[str, Claim]]:
    """Yield what `loser` says of plan fields that `winner` decides, where the two differ, each with the setting of
    `winner` that counts.
    """
    meant, own = meaning_of(run).plain, meaning_of(loser).plain
    for path, value in loser.given.items():
        rule = claims(loser.dialect).get(path)
        ours = next(iter(rule.paths_of_plan(path)), "") if rule else ""
        by_file = ours.startswith(run.dialect.decides)
        if (
            rule is None
            or by_file is not (loser is run.caller)
            or own.get(ours) in (None, meant.get(ours))
        ):
            continue
        settings = plan_claims(winner.dialect)[ours].carriers(ours)
        counts = [one for one in settings if winner.effective.get(one) is not None]
        effect = rule.effect_of_losing((ours,), loser.effective)
        if counts and effect is not Effect.NONE:
            counts.sort(key=lambda one: one not in winner.given)
            yield counts[0], Claim(path, value, _said(loser, path), ADVICE, effect)


def _said(config: Config, path: str) -> Said:
    origin = config.origins.get(path)
    if path not in config.given:
        return Said(path, config.effective.get(path), config.default_source)
    value: Any = config.given[path]
    return Said(
        (origin and origin.spelling) or path,
        value,
        (origin and origin.file) or "",
        (origin and origin.line) or None,  # a line of 0 is of what nobody wrote
    )
