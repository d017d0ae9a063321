"""Fuzzing of a dialect: generated configs are read, written, lifted and converted, and failures are
shrunk.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from warnings import catch_warnings, simplefilter

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky, HypothesisWarning

from bridge.errors import BridgeError
from bridge.files.shown import show_value
from bridge.plan.free_sections import otherwise
from bridge.plan.section import Values
from bridge.stack.dialect import Config, Dialect, Writer, Written
from bridge.stack.rules import HABITS, Effect
from bridge.testing.strategies import configs, entries
from bridge.translation.lift import claims, lift, lower
from bridge.translation.translate import Result, translate

SUFFIXES = ("json", "yaml", "txt", "sh")
"""Suffixes of config files, one for each format."""


@dataclass(frozen=True)
class Task:
    """A fuzzing task: a dialect, the dialect to convert to, their releases (None: all), and the number of examples."""

    dialect: Dialect
    to: Dialect | None = None
    version: str | None = None
    to_version: str | None = None
    examples: int = 200
    seed: int = 0


@dataclass
class Covered:
    """Numbers of tried configs. `releases` counts them by release.

    `accepted` and `refused` count them by part of the test, such as "converting": those accepted in
    this part, and those rightly refused.
    """

    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    releases: Counter[str] = field(default_factory=Counter)
    fields: set[str] = field(default_factory=set)

    @property
    def examples(self) -> int:
        """Number of configs that were tried."""
        return sum(self.releases.values())


class Broken(AssertionError):
    """Raised for a config that breaks a promise, such as "a written config is read back with the same values".

    The arguments are the part of the test, such as "converting", and the message.
    """


@dataclass(frozen=True)
class Failure:
    """The smallest config found that breaks a promise, with the details."""

    config: Config
    stage: str
    message: str

    @property
    def promise(self) -> tuple[str, str]:
        """The broken promise: the part of the test, and the message up to the colon before the details."""
        return self.stage, self.message.partition(":")[0]

    @cached_property
    def as_file(self) -> Written | None:
        """The config as a file; None if it cannot be written."""
        try:
            return self.config.dialect.render(self.config)
        except Exception:
            return None

    @property
    def text(self) -> str:
        """The text of the file. If no file can be written, the values by path."""
        return self.as_file.text if self.as_file else f"{dict(self.config.given)!r}\n"


def fuzz(
    task: Task, tick: Callable[[Covered], None] = lambda coverage: None
) -> tuple[Covered, Failure | None]:
    """Try `task.examples` configs. Returns the counts, and the smallest failing config if one fails.

    `tick` is called after each config.
    """
    coverage, last = Covered(), list[Failure]()

    def law(config: Config) -> None:
        coverage.releases[config.version] += 1
        coverage.fields.update(config.given)
        try:
            _check(task, config, coverage)
        except Broken as error:
            last.append(Failure(config, *error.args))
            raise
        finally:
            tick(coverage)

    # Nothing is kept between runs and no example is timed: the same seed gives the same configs on
    # every machine.
    limits = settings(
        max_examples=task.examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
    strategy = configs(task.dialect, version=task.version, entry=entries(task.dialect)[0])
    with suppress(Broken, Flaky), catch_warnings():
        simplefilter("ignore", HypothesisWarning)
        seed(task.seed)(limits(given(strategy)(law)))()
    # The failure that Hypothesis ends with is the one that it shrank to.
    return coverage, _smallest(task, last[-1]) if last else None


def _smallest(task: Task, failure: Failure) -> Failure:
    """Return the failure without the settings that do not contribute to it."""
    # Hypothesis shrinks its own choices; a setting that the core of a config always draws goes only
    # here.
    for path in failure.config.given:
        rest = {name: value for name, value in failure.config.given.items() if name != path}
        failure = _still(task, failure, rest) or failure
    return failure


def _still(task: Task, failure: Failure, values: Mapping[str, Any]) -> Failure | None:
    """Return the failure of a config with only the settings `values`, if it breaks the same promise; else None."""
    config = failure.config
    try:
        fewer = config.dialect.config(values, config.version, config.world_size, config.entry)
        _check(task, replace(fewer, opaque=config.opaque), Covered())
    except Broken as error:
        result = Failure(fewer, *error.args)
        return result if result.promise == failure.promise else None
    except BridgeError:
        return None
    return None


def _check(task: Task, config: Config, coverage: Covered) -> None:
    for stage, check in _stages(task):
        try:
            check(config)
        except BridgeError as error:
            coverage.refused[stage] += 1
            # A config that its own stack accepts must be written, read and lifted; another stack
            # may refuse it.
            if stage != CONVERTING:
                raise Broken(stage, f"refused: {error}") from None
        except Broken:
            raise
        except Exception as error:
            raise Broken(stage, f"{type(error).__name__}: {error}") from error
        else:
            coverage.accepted[stage] += 1


READING, LIFTING, CONVERTING = "writing and reading", "lifting and lowering", "converting"


def _stages(task: Task) -> Iterator[tuple[str, Callable[[Config], None]]]:
    yield READING, _reads_back
    yield LIFTING, _survives
    if task.to is not None:
        to = task.to
        yield CONVERTING, lambda config: _converts(config, to, task.to_version)


def _reads_back(config: Config) -> None:
    """Check that a config, written in each format and read back, has the same given and effective values."""
    for format in config.dialect.formats:
        read = _read_again(config, format)
        case = f"a config is written as {format} and read back"
        _same(READING, f"the given values change if {case}", config.given, read.given)
        _same(READING, f"the effective values change if {case}", config.effective, read.effective)


def _read_again(config: Config, format: str) -> Config:
    """Return a config after it was written to files and read back.

    Files are written without fsync, which only users' files need.
    """
    dialect = config.dialect
    with TemporaryDirectory() as folder:
        path = Path(folder, f"config.{suffix(dialect, format)}")
        for place, text in dialect.files(dialect.render(config, format), path).items():
            place.write_text(text, encoding="utf-8")
        return dialect.read(path, config.version, config.world_size)


def starts(config: Config) -> bool:
    """Return whether the stack starts with the config.

    A config at which the stack stops is not written.
    """
    return not any(finding.effect is Effect.STOPS for finding in config.dialect.inspect(config))


def suffix(dialect: Writer, format: str) -> str:
    """Return the suffix of files of a format."""
    return next(suffix for suffix in SUFFIXES if dialect.format_of(f"x.{suffix}") == format)


def _survives(config: Config) -> None:
    """Check that lifting, lowering into the same dialect, and lifting again yield an equal plan.

    Configs whose world size is not that of the plan's mesh are skipped.
    """
    plan = lift(config)
    mesh = plan.parallel
    if not starts(config):
        return
    # With spare ranks the batch of the whole run is another one after lowering.
    if config.world_size not in (
        None,
        prod(size or 1 for size in (mesh.data, mesh.tensor, mesh.pipeline, mesh.context)),
    ):
        return
    again = lift(lower(plan, config.dialect, config.version, config.world_size)).values()
    before, after = without_settled(config, plan.values(), again)
    _same(LIFTING, "the plan changes if it is lowered and lifted again", before, after)


SETTLED = ("model.embedding.max_positions", "precision.")
"""Fields that a config may leave open, and that what is written from its plan settles: a launch has
to have a number of positions, even where nothing limits them, and formats that are left to the model
have defaults.
"""


def without_settled(config: Config, plan: Values, again: Values) -> tuple[Values, Values]:
    """Return the values of a config's plan, and of what is lifted after this plan was lowered into the
    same stack, without those that lowering settles: fields that were open; habits that given settings
    change which no plan has; intervals of zero, never, where the stack says so by no setting; and what
    is the script's in what is written: a scheduler that does not lag, and the mean of the loss.
    """
    rules = config.dialect.rules
    unmapped = {name for rule in rules if not rule.ours for name in rule.theirs} & {*config.given}
    names = {path for rule in rules if unmapped.intersection(rule.sees) for path in rule.ours}
    names = {path for path in names if path.startswith(HABITS)}
    formats = () if "precision.compute" in plan else ("precision.",)
    names |= {path for path in again if path not in plan and path.startswith(SETTLED)}
    names |= {path for path in plan if path.startswith(formats)}
    names |= {path for path in {*plan} - {*again} if path.startswith("run.") and not plan[path]}
    if plan.get("habits.first_lr_step") == -1:
        names.add("habits.first_lr_step")
    if "code.loss" in config.given:
        names.add("loss")
    before, after = (
        Values({path: value for path, value in values.items() if path not in names})
        for values in (plan, again)
    )
    return before, after


def _converts(config: Config, to: Dialect, version: str | None) -> None:
    """Check a conversion: the other stack reads the converted config, exactly the losses are
    reported, and the conversion back with the carry-over restores the config.
    """
    result = translate(config, to, version)
    for format in to.formats:
        _check_written(result, format)
    _tells(result)
    back = translate(result.config, config.dialect, config.version, config.world_size, result.carry)
    problem = "the given values change in a conversion there and back with the carry-over"
    _same(CONVERTING, problem, config.given, back.config.given)


def _check_written(result: Result, format: str) -> None:
    """Check that the written config is read with equal effective values, or that findings announced
    the problems of reading it.
    """
    target, to = result.config, result.config.dialect
    try:
        read = _read_again(target, format)
    except BridgeError as error:
        foretold = {finding.path for finding in result.findings}
        if all(problem.partition(":")[0] in foretold for problem in error.problems):
            return
        raise Broken(CONVERTING, f"{to.name} refuses the config written for it: {error}") from None
    _same(
        CONVERTING,
        f"the effective values of {to.name} change if a config is written as {format} and read back",
        target.effective,
        read.effective,
    )


def _tells(result: Result) -> None:
    """Check that a set field has a finding exactly if a conversion there and back changes its
    effective value, and the target does not have its meaning in other words.
    """
    config, source_plan, target_plan = (
        result.source,
        lift(result.source).values(),
        lift(result.config).values(),
    )
    back = _back(result)
    finding_paths = {
        finding.path for finding in result.findings if finding.given and finding.how is not None
    }
    for path, value in config.given.items():
        ours = claims(config.dialect)[path].ours
        # Such a setting has no effective value to compare, because the stack moves it to another
        # one; its fields are compared.
        moves = config.effective.get(path) is None and value is not None
        meaning_differs = not ours or any(
            source_plan.get(name) != target_plan.get(name) for name in ours
        )
        differs = meaning_differs if moves else config.effective.get(path) != back.get(path)
        is_loss = differs and not result.has_arrived(path)
        mentions = finding_paths & ({path} | otherwise(path, value, back.get(path)))
        if (mentions and not differs) or (is_loss and not mentions):
            change = (
                f"{path} changes from {show_value(config.effective.get(path))} to "
                f"{show_value(back.get(path))}"
            )
            raise Broken(
                CONVERTING,
                f"a loss without a finding: {change}"
                if is_loss
                else f"a finding without a loss: {path}",
            )


def _back(result: Result) -> Values:
    """Return the effective values after a conversion there and back; empty if the stack refuses the result."""
    config = result.source
    try:
        return lower(
            lift(result.config), config.dialect, config.version, config.world_size
        ).effective
    except BridgeError:
        return Values()


def _same(stage: str, what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    unlike = [
        path
        for path in {**one, **other}
        if one.get(path) != other.get(path) or (path in one) != (path in other)
    ]
    if unlike:
        lines = (
            f"{path}: {show_value(one.get(path))} -> {show_value(other.get(path))}"
            for path in unlike
        )
        raise Broken(stage, f"{what}: " + "; ".join(lines))


def command(task: Task, failure: Failure, file: str) -> str:
    """Return the command line that shows the failure, for a config saved as `file`."""
    config = failure.config
    words = ["--from", config.dialect.name, "--from-version", config.version]
    words += ["--world-size", str(config.world_size)] if config.world_size else []
    if failure.stage == READING:
        return shlex.join(["stagebridge", "check", file, *words])
    target, release = (
        (task.to, task.to_version)
        if failure.stage == CONVERTING and task.to
        else (config.dialect, config.version)
    )
    return shlex.join(
        [
            "stagebridge",
            "convert",
            file,
            *words,
            "--to",
            target.name,
            "--to-version",
            target.release(release),
        ]
    )
