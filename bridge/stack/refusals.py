"""Refusals: one error with every problem of a source, including problems that the first ones hide."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from bridge.errors import ConfigError
from bridge.plan.section import Values

ROUNDS = 12
"""The most rounds in which the rest of a source is checked again, each with fewer settings."""
# Problems are sentences for people. Their parts are found by the forms that all readers and checks
# use.
PLACE = re.compile(r"^(?:[^\s:]+: )?line \d+: ")
WORD = re.compile(r" \(word \d+\)$")
MEANT = re.compile(r"did you mean ([\w.\-]+)\?")


def _words(words: str, parts: str) -> re.Pattern[str]:
    """Return a pattern that matches each of `words` as a whole word, and `parts` anywhere."""
    return re.compile(rf"(?<![a-z])(?:{words})(?![a-z])|{parts}", re.IGNORECASE)


SIZES = _words("tp|pp|dp|cp|ep|sp|world|ranks?|gpus?|nodes?|shards?", "parallel|pipeline")
BATCH = re.compile("batch|accumul|sample|micro", re.IGNORECASE)
STAGES = _words("layers?|stages?", "virtual")
PIPELINED = _words("pp|layers?|stages?", "virtual|pipeline")
COUNTED = re.compile(r"\A(?! missing).*(?:batch|accumul|sample)", re.IGNORECASE | re.DOTALL)
HANGING = ((SIZES, SIZES), (SIZES, COUNTED), (BATCH, BATCH), (PIPELINED, STAGES))
"""Pairs of patterns: a setting whose name matches the first pattern may cause or prevent a problem
that matches the second pattern. The pairs are about the split of ranks, of samples and of layers.
`COUNTED` does not match the problem that a batch size is missing, because no number of ranks causes
this problem.
"""
SPLITS_NOTHING = re.compile(r"seed|grain|iteration|stage3|\Asequence_parallel\Z")
"""Pattern of names that match a pattern in `HANGING`, although the settings split nothing."""
SELECTORS = ("_target_", "type", "model_type", "strategy")
"""Names of settings that decide what the other settings of their section mean."""
NO_MORE = re.compile(r"\bunknown (?!.*did you mean)")
"""Pattern of a problem with an unknown name that resembles no known one."""
WORLD = "world_size"
"""Name that problems use for the number of ranks given by the user. This name is treated like the
name of a setting.
"""


def every(
    first: Iterable[str],
    settings: Values,
    world: int | None,
    judge: Callable[[Values, int | None], object],
) -> tuple[str, ...]:
    """Return all problems of a source: those in `first`, and further problems that `judge` finds
    after the settings with problems are removed.

    `settings` are the settings that could be read, for `world` ranks. A problem that mentions a
    removed setting is not reported, because the removal may be its only cause.
    """
    problems, latest, remaining = (
        list(dict.fromkeys(first)),
        list(first),
        {WORLD: world, **settings},
    )
    # Settings that a misspelled name stands for are missing from `settings` for the same reason.
    removals = corrections = {
        _plain(match[1]) for problem in problems for match in MEANT.finditer(problem)
    }
    # Without its selector a section is another section, and no problem found in it would be one of
    # this source.
    hidden = set[str]().union(*(_hidden(problem, settings) for problem in problems))
    if "" in hidden:
        return tuple(problems)
    for turn in range(ROUNDS):
        # Settings that problems begin with, with all below them, and those mentioned in problems
        # that begin with none. If there are none of these, any setting that a problem mentions. At
        # the first look, a value too many has not taken its setting away.
        subjects = hidden.union(filter(None, map(_subject, latest)))
        about = {
            path
            for path in remaining
            if path in subjects or any(path.startswith(f"{name}.") for name in subjects)
        }
        nameless = [one for one in latest if not _subject(one) and (turn or not _surplus(one))]
        about |= _mentions(nameless, remaining)
        if turn or not any(map(_surplus, latest)):
            about = about or _mentions(latest, remaining)
        removals = removals | about | subjects
        remaining = {path: value for path, value in remaining.items() if path not in about}
        try:
            values = Values({path: value for path, value in remaining.items() if path in settings})
            judge(values, remaining.get(WORLD) and world)
        except ConfigError as error:
            new = (
                one for one in error.problems if one not in problems and not _speaks(one, removals)
            )
            new = (one for one in new if _subject(one).rpartition(".")[2] not in corrections)
            # An unknown name that resembles no known one takes nothing away.
            causes = removals.difference(_subject(one) for one in problems if NO_MORE.search(one))
            fresh = [one for one in new if not any(hangs(one, name) for name in causes)]
            # Nothing was left out and nothing new was found: the next round would be the same.
            stuck = not about and not fresh
            problems, latest = [*problems, *fresh], list(error.problems)
            if stuck:
                break
        else:
            break
    return tuple(problems)


def _hidden(problem: str, settings: Values) -> set[str]:
    """Return the sections whose meaning is not known, because the problem is about a setting that
    decides what other settings mean, such as `type`. An empty name stands for the whole source. A
    setting such as `lr_scheduler_type` decides the meaning of the section `lr_scheduler_kwargs`.

    A misspelled setting does not count if the setting is also given under the correct name.
    """
    subject = _subject(problem)
    section, _, name = subject.rpartition(".")
    names = (_plain(match[1]).rpartition(".")[2] for match in MEANT.finditer(problem))
    lacking = (one for one in names if f"{section}.{one}".lstrip(".") not in settings)
    selects = name in SELECTORS or any(one in SELECTORS for one in lacking)
    arguments = {re.sub("_type$", "_kwargs", subject)} if subject.endswith("_type") else set[str]()
    return {section} if selects else arguments


def hangs(problem: str, name: str) -> bool:
    """Return whether the setting `name` may cause or prevent a problem, because the problem is about
    the ranks, samples or layers that the setting splits.
    """
    leaf = name.rpartition(".")[2]
    text = PLACE.sub("", problem).partition(":")[2] if _subject(problem) else problem
    return not SPLITS_NOTHING.search(leaf) and any(
        mine.search(leaf) and theirs.search(text) for mine, theirs in HANGING
    )


def _subject(problem: str) -> str:
    """Return the setting that a problem begins with. Return an empty string if the problem begins
    with something else, such as a quoted value.
    """
    name = WORD.sub("", PLACE.sub("", problem).partition(":")[0])
    return _plain(name) if name and not re.search(r"[\s'\"]", name) else ""


def _surplus(problem: str) -> bool:
    """Return whether a problem is about a surplus value. Such a problem begins with this value, in
    quotes.
    """
    return PLACE.sub("", problem).startswith(("'", '"'))


def _plain(text: str) -> str:
    """Return the name of the setting for a flag: `--micro-batch` becomes `micro_batch`."""
    return text.lstrip("-").replace("-", "_")


def _mentions(problems: Sequence[str], paths: Iterable[str]) -> set[str]:
    """Return the given settings that problems mention."""
    return {path for path in paths if any(_speaks(problem, (path,)) for problem in problems)}


def _speaks(problem: str, names: Iterable[str]) -> bool:
    """Return whether a problem mentions one of the settings `names`, by its path or by the last
    part of its path.
    """
    text = problem.replace("-", "_")
    words = {word for name in names for word in (name, name.rpartition(".")[2])}
    # Not inside a longer word or path: `stage` is not mentioned in `zero.stage` or `stages`.
    return any(re.search(rf"(?<![\w.])_*{re.escape(word)}(?![\w]|\.\w)", text) for word in words)
