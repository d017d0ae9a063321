"""Refusals: every problem of a source in one error, those too that hide behind the first ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from bridge.config import Values
from bridge.errors import ConfigError

ROUNDS = 12
"""How often what is left of a source is judged again; each time with fewer settings."""
PLACE = re.compile(r"^(?:[^\s:]+: )?line \d+: ")
WORD = re.compile(r" \(word \d+\)$")
MEANT = re.compile(r"did you mean ([\w.\-]+)\?")


SHARED = tuple(
    re.compile(rf"(?<![a-z])(?:{words})(?![a-z])|{parts}", re.IGNORECASE)
    for words, parts in (
        ("tp|pp|dp|cp|ep|sp|world|ranks?|gpus?|nodes?|shards?", "batch|parallel|pipeline|accumul"),
        ("pp|stages?|layers?", "pipeline|virtual"),
    )
)
"""Speak of how ranks and samples, and how layers are shared out: what else does so hangs on what a problem leaves out."""
SELECTORS = ("_target_", "type", "model_type", "strategy")
"""Settings that say what all the others of a section are for."""
NO_MORE = re.compile(r"\bunknown (?!.*did you mean)")
"""Says that a name stands for nothing."""
WORLD = "world_size"
"""Ranks that were said beside a source: a setting of it as far as problems go."""


def every(
    first: Iterable[str], given: Values, world: int | None, judge: Callable[[Values, int | None], object]
) -> tuple[str, ...]:
    """Problems of a source: the `first` ones, and what `judge` refuses once the settings that they are about are left out.

    `given` is what could be read, for a `world` of so many ranks. What is wrong only because something was left out is no
    problem of the source: whatever speaks of a setting that was is passed over.
    """
    problems, found, left = list(dict.fromkeys(first)), list(first), {WORLD: world, **given}
    gone = meant = set(_meant(problems))
    if any(name.rpartition(".")[2] in SELECTORS for name in (*gone, *map(_subject, problems))):
        return tuple(problems)
    for _ in range(ROUNDS):
        about = _about(found, left) | _mentioned([one for one in found if not _subject(one)], left) or _mentioned(found, left)
        gone = gone | {*about, *filter(None, map(_subject, found))}
        left = {path: value for path, value in left.items() if path not in about}
        try:
            judge(Values({path: value for path, value in left.items() if path in given}), left.get(WORLD) and world)
        except ConfigError as error:
            known = [one for one in problems if not NO_MORE.search(one)]
            new = (one for one in error.problems if one not in problems and not _speaks(one, gone))
            new = (one for one in new if _subject(one).rpartition(".")[2] not in meant)
            fresh = [one for one in new if not any(hangs(one, other) for other in known)]
            stuck = not about and not fresh
            problems, found = [*problems, *fresh], list(error.problems)
            if stuck:
                break
        else:
            break
    return tuple(problems)


def hangs(one: str, other: str) -> bool:
    """Whether two problems, or names of settings, are about what is shared out together."""
    return any(shared.search(one) and shared.search(other) for shared in SHARED)


def _subject(problem: str) -> str:
    """The setting that a problem begins with; empty where it begins with none."""
    name = WORD.sub("", PLACE.sub("", problem).partition(":")[0])
    return _plain(name) if name and not re.search(r"\s", name) else ""


def _plain(text: str) -> str:
    """The same for a flag and for what it sets."""
    return text.lstrip("-").replace("-", "_")


def _meant(problems: Iterable[str]) -> Iterator[str]:
    """Settings that were not given under their own name."""
    return (_plain(match[1]) for problem in problems for match in MEANT.finditer(problem))


def _about(problems: Sequence[str], given: Iterable[str]) -> set[str]:
    """The settings given that problems begin with, or that lie below what they begin with."""
    subjects = set(filter(None, map(_subject, problems)))
    return {path for path in given if path in subjects or any(path.startswith(f"{name}.") for name in subjects)}


def _mentioned(problems: Sequence[str], given: Iterable[str]) -> set[str]:
    """The settings given that problems speak of at all."""
    return {path for path in given if any(_speaks(problem, (path,)) for problem in problems)}


def _speaks(problem: str, names: Iterable[str]) -> bool:
    """Whether a problem names one of these settings, whole or by the last part of its path standing alone."""
    text = problem.replace("-", "_")
    return any(re.search(rf"(?<![\w.])_*{re.escape(word)}(?![\w]|\.\w)", text) for name in names for word in _words(name))


def _words(name: str) -> Iterator[str]:
    yield name
    if "." in name:
        yield name.rpartition(".")[2]
