"""Diff: where the meanings of two configs differ, of one stack or of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from bridge.api.access import open_source, place_source
from bridge.api.read import read_config, text_of
from bridge.api.source import STDIN, Options, Readable, Source, source_of
from bridge.errors import BridgeError
from bridge.files.notes import note
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding
from bridge.translation.diff import compare


@dataclass(frozen=True)
class Difference:
    """Two configs, the findings on where they differ, and the notes that were made on the way."""

    sides: tuple[Config, Config]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()


def diff(one: Readable, other: Readable, /, **options: Unpack[Options]) -> Difference:
    """Compare what two configs mean. The options for reading apply to both.

    If only one of them states a number of ranks, the other is read for that number too. Raises `BridgeError`
    for a config that cannot be read.
    """
    sources = source_of(one, options), source_of(other, options)
    with open_source(sources[0]) as notes:
        sides = _read_sides(sources)
        return Difference(sides, tuple(compare(*sides)), tuple(notes))


def _read_sides(sources: Sequence[Source]) -> tuple[Config, Config]:
    # Standard input can be read only once, and a side may be read twice.
    whole = [replace(one, text=text_of(one)) if one.file == STDIN else one for one in sources]
    sides = [_read_side(one) for one in whole]
    stated = [side.world_size for side in sides]
    if not all(stated) and any(stated):
        open_ = stated.index(None)
        ranks = stated[1 - open_]
        names = [one.file_name or one.title for one in sources]
        note(
            f"{names[open_]} does not state a number of ranks: read for {ranks} ranks, the number in {names[1 - open_]}"
        )
        sides[open_] = _read_side(replace(whole[open_], world_size=ranks))
    return sides[0], sides[1]


def _read_side(source: Source) -> Config:
    try:
        with place_source(source) as here:
            config = read_config(here)
            # What the stack derives may read further files; that is allowed within this block alone.
            _ = config.effective
    except BridgeError as error:
        # There are two files, so a line alone does not tell which one is meant.
        error.reword(
            problem if problem.startswith(source.file) else f"{source.file}: {problem}"
            for problem in error.problems
        )
        raise
    return config
