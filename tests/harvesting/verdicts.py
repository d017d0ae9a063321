"""Compares a release with our reader on generated configs: rows for the test suite, and a list of differences.

`python -m tests.harvesting.verdicts` takes the options of `python -m tests.harvesting`, which starts it.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

from bridge.errors import BridgeError
from bridge.files import write_all
from bridge.plan.section import Values
from bridge.report.exit_codes import Exit
from bridge.stack.dialect import Config, Dialect
from bridge.testing.mutations import mutations
from bridge.testing.strategies import configs, entries, part_of
from tests.harvesting import JUDGES, decide
from tests.harvesting.__main__ import Job, main, print_list, say
from tests.harvesting.process import Process
from tests.harvesting.rows import Row
from tests.harvesting.source import locate

Tick = Callable[[int, int], None]
VERDICTS = "releases.jsonl"
KEPT = {True: 3, False: 30}
"""Largest number of rows that are recorded for each verdict (true: accepted) of a release."""
VALUES = re.compile(r"--\w[\w-]*|'[^']*'|\"[^\"]*\"|-?\d[\w.+-]*|\[[^\]]*\]")
"""Matches the values and flags in a message, so that messages of one kind are alike without them."""


class VerdictSide(StrEnum):
    """Who accepts or refuses a config."""

    ACCEPTED = "accepted by both"
    REFUSED = "refused by both"
    OURS = "refused only by our reader"
    THEIRS = "refused only by the release"
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Asked:
    """A config to ask about: the question for the release, our values by path (None if we refuse the
    config), and our reason.
    """

    question: Any
    expected: Row | None
    reason: str = ""


@dataclass
class Tally:
    """Results for the configs: rows by verdict (true: accepted), and the number of configs for each
    side. The other counters have texts, and the number of configs for each text. `differences`: how
    our reader differs from the release. `stricter`: why only our reader refuses a config with which
    no run trains. `lacking`: why a config was left out.
    """

    rows: dict[bool, list[Row]] = field(default_factory=lambda: {True: [], False: []})
    sides: Counter[VerdictSide] = field(default_factory=Counter)
    differences: Counter[str] = field(default_factory=Counter)
    stricter: Counter[str] = field(default_factory=Counter)
    lacking: Counter[str] = field(default_factory=Counter)

    def leave_out(self, reason: str) -> None:
        """Count a config that the release says nothing about."""
        self.sides[VerdictSide.LEFT_OUT] += 1
        self.lacking[reason] += 1

    @property
    def sample(self) -> list[Row]:
        """Rows to record: the accepted configs that set the most, and the shortest refused one for
        each kind of reason.
        """
        # Among equally long rows the order of their texts decides, the same in each run.
        unlike = {json.dumps(row, sort_keys=True): row for row in self.rows[True]}
        longest = sorted(sorted(unlike), key=len, reverse=True)[: KEPT[True]]
        refusals = sorted(self.rows[False], key=lambda row: (len(json.dumps(row)), json.dumps(row)))
        kinds: dict[str, Row] = {}
        for row in refusals:
            kinds.setdefault(kind(row["reason"]), row)
        return [*(unlike[text] for text in longest), *[*kinds.values()][: KEPT[False]]]


def kind(reason: str) -> str:
    """Return a message in which … stands for each value and each flag."""
    return VALUES.sub("…", reason)


def draw_examples(strategy: Any, count: int) -> list[Any]:
    """Return the first `count` examples of a strategy, which are equal in each run."""
    examples: list[Any] = []

    def keep(example: Any) -> None:
        examples.append(example)

    profile = settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    keeping: Any = given(strategy)
    profile(keeping(keep))()
    return examples


def verdicts(process: Process, dialect: Dialect, version: str, count: int, tick: Tick) -> Tally:
    """Ask the release about `count` configs.

    A third is valid, a sixth has one mistake, and half have settings that need not fit each other.
    """
    tally = Tally()
    for number, one in enumerate(_questions(dialect, version, count)):
        tick(number, count)
        if one is None:
            tally.leave_out("the release cannot be asked about the config")
            continue
        answer = process.ask(one.question)
        if "lacks" in answer:
            tally.leave_out(f"this machine lacks what the config needs: {kind(answer['lacks'])}")
            continue
        _count(tally, one, answer, dialect, version)
    return tally


def _count(tally: Tally, one: Asked, answer: Row, dialect: Dialect, version: str) -> None:
    """Add an answer to the tally."""
    values, refusal = answer.get("held", {}), answer.get("refused", "")
    side, looser = _side(one, refusal), _real(dialect).LOOSER
    tally.sides[side] += 1
    if side is VerdictSide.OURS and all(
        re.search(looser, line) for line in one.reason.splitlines()
    ):
        tally.stricter[kind(one.reason)] += 1
    else:
        tally.differences.update(_differences(one, values, refusal, side))
    # Only verdicts on which we agree become tests. Differences are for a person to decide.
    if side is VerdictSide.ACCEPTED:
        holds = _telling(dialect, version, one, values)
        tally.rows[True].append(_row(version, one, True, holds=holds))
    elif side is VerdictSide.REFUSED:
        tally.rows[False].append(_row(version, one, False, reason=refusal))


def _row(version: str, one: Asked, verdict: bool, **outcome: Any) -> Row:
    return {"release": version, **one.question, "accepted": verdict, **outcome}


def _side(one: Asked, refusal: str) -> VerdictSide:
    ours, theirs = one.expected is None, bool(refusal)
    return {
        (False, False): VerdictSide.ACCEPTED,
        (True, True): VerdictSide.REFUSED,
        (True, False): VerdictSide.OURS,
        (False, True): VerdictSide.THEIRS,
    }[ours, theirs]


def _telling(dialect: Dialect, version: str, one: Asked, values: Row) -> Row:
    """Return the release's values that differ from their defaults, for paths that our reader has, too.

    A path may begin with the name of a class, which the paths of the defaults do not have.
    """
    usual = dialect.defaults(version)
    names = {path: path if path in usual else path.rpartition(".")[2] for path in values}
    return {
        path: values[path]
        for path, name in names.items()
        if path in (one.expected or {}) and values[path] != usual.get(name)
    }


def _questions(dialect: Dialect, version: str, count: int) -> Iterator[Asked | None]:
    """Yield the configs to ask about; None for one that the release cannot be asked about."""
    wrong, crossings = count // 6, count // 2
    valid = draw_examples(configs(dialect, version), count - wrong - crossings)
    yield from map(_pose_config, valid)
    mistaken = [
        (edit.config, edit.source) for edit in draw_examples(mutations(dialect, version), wrong)
    ]
    for config, source in (*mistaken, *_crossings(valid, crossings)):
        try:
            yield _pose_config(dialect.read(source, version, config.world_size))
        except BridgeError as error:
            question = _real(dialect).raw(source, config)
            yield None if question is None else Asked(question, None, str(error))


def _crossings(valid: Sequence[Config], count: int) -> Iterator[tuple[Config, Mapping[str, Any]]]:
    """Yield pairs of a valid config and a changed copy of its source. Some settings of the copy are
    dropped, and some are taken from another config, so the settings need not fit each other.
    """
    files = [config for config in valid if config.entry == entries(config.dialect)[0]]
    for number in range(count if len(files) > 1 else 0):
        seed = Random(number)
        config, other = seed.sample(files, 2)
        removals, additions = (
            _some(seed, config.given, (0, 1, 2)),
            _some(seed, other.given, (1, 2, 4)),
        )
        rest = {path: value for path, value in config.given.items() if path not in removals}
        values = Values({**rest, **{path: other.given[path] for path in additions}})
        yield config, part_of(config.dialect).source(replace(config, given=values))


def _some(seed: Random, values: Mapping[str, Any], counts: Sequence[int]) -> list[str]:
    return seed.sample(sorted(values), min(len(values), seed.choice(counts)))


def _real(dialect: Dialect) -> ModuleType:
    return import_module(f"{JUDGES}.{dialect.name}")


def _pose_config(config: Config) -> Asked:
    real = _real(config.dialect)
    # A source tree is asked about more than a package that is installed, where the stack has both.
    question, answer = getattr(real, "launch_words", real.pose_config)(config)
    question, answer = json.loads(json.dumps([question, answer], default=str))
    return Asked(question, answer)


def _differences(one: Asked, values: Row, refusal: str, side: VerdictSide) -> Iterator[str]:
    """Yield the differences between our reader and the release."""
    if side is VerdictSide.OURS:
        yield f"{side}: {kind(one.reason)}"
    elif side is VerdictSide.THEIRS:
        yield f"{side}: {kind(refusal)}"
    elif side is VerdictSide.ACCEPTED:
        ours = one.expected or {}
        for path in sorted(ours.keys() & values.keys()):
            if ours[path] != values[path]:
                yield f"{path}: we have {ours[path]!r}, the release has {values[path]!r}"


def record(todo: Job, _again: bool) -> int:
    """Record the release's results for generated configs, and print how our reader differs from it."""
    tree = locate(todo.part.PACKAGE, todo.release, todo.root)
    with closing(Process(todo.stack, todo.release, tree.root)) as process:
        tally = verdicts(process, todo.dialect, todo.release, todo.count, progress(todo))
    counts = ", ".join(f"{tally.sides[side]} {side.value}" for side in VerdictSide)
    print(f"{tally.sides.total()} generated configs: {counts}")
    print_list("left out", decide.disagreements(tally.lacking))
    print_list(
        "refused only by our reader, because no run trains with such a config",
        decide.disagreements(tally.stricter),
    )
    print_list("differences to decide", decide.disagreements(tally.differences))
    if todo.tests is not None:
        write_all(
            {
                todo.tests / VERDICTS: merge_verdicts(
                    todo.tests / VERDICTS, todo.release, tally.sample
                )
            }
        )
    return Exit.CLEAN


def progress(todo: Job) -> Tick:
    """Return a function that prints a line of progress for each fifth of the configs."""

    def tick(number: int, count: int) -> None:
        if number % max(1, count // 5) == 0:
            say(f"{todo.stack} {todo.release}: {number} of {count} configs")

    return tick


def merge_verdicts(path: Path, release: str, sample: Iterable[Row]) -> str:
    """Return the content of the file of verdicts, in which new verdicts replace the old verdicts on this release."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    rest = [line for line in lines if json.loads(line)["release"] != release]
    return "".join(f"{line}\n" for line in (*rest, *(json.dumps(row) for row in sample)))


if __name__ == "__main__":
    sys.exit(main(work=record))
