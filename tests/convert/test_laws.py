"""Laws of translation as properties over generated configs of every dialect, and of every ordered pair of dialects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import bridge
import compat
from bridge.errors import BridgeError
from bridge.plan.equality import plain
from bridge.plan.free_sections import otherwise
from bridge.plan.plan import Plan, paths
from bridge.plan.section import Values, fields
from bridge.stack.dialect import Config, Dialect
from bridge.testing import configs, entries
from bridge.testing.fuzz import starts, without_settled
from bridge.translation.translate import Result, translate
from tests.common.amounts import MORE
from tests.convert.verdicts import judge

pytestmark = pytest.mark.once

DIALECTS = tuple(compat.load(name) for name in compat.names())
SUFFIXES = ("json", "yaml", "txt", "sh")
DRAWN = 10 * MORE
"""How many configs each law is tried on."""
LAW = settings(
    max_examples=DRAWN,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)

each = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)

PAIR = settings(LAW, max_examples=DRAWN // 2)
"""Pairs grow with the square of the dialects, so each gets fewer examples."""


def holds(law: Callable[..., None], *drawn: st.SearchStrategy[Any], at: settings = LAW) -> None:
    """Check `law` for what is drawn."""
    at(given(*drawn)(law))()


def again(plan: Plan, config: Config) -> Config:
    """`plan` in the dialect, release and world size of `config`."""
    return bridge.lower(plan, config.dialect, config.version, config.world_size)


def files(dialect: Dialect) -> st.SearchStrategy[Config]:
    """Configs as they come from files."""
    return configs(dialect, entry=entries(dialect)[0])


# 1. Written, then read


@each
def test_a_file_reads_back_as_it_was_given(dialect: Dialect, tmp_path: Path) -> None:
    """`read(write(c)).given == c.given` for every format, with the code part beside the file."""

    def law(config: Config) -> None:
        for format in dialect.formats:
            with TemporaryDirectory(dir=tmp_path) as folder:
                path = Path(folder, f"config.{suffix_of(dialect, format)}")
                dialect.write(config, path)
                assert dialect.read(path, config.version, config.world_size).given == config.given

    holds(law, files(dialect))


def suffix_of(dialect: Dialect, format: str) -> str:
    return next(suffix for suffix in SUFFIXES if dialect.format_of(f"x.{suffix}") == format)


@each
def test_text_reads_back_as_it_was_given(dialect: Dialect) -> None:
    """The same without a file; text alone lacks what is kept outside of it."""

    def law(config: Config) -> None:
        code = dialect.render(config).code
        for format in dialect.formats:
            text = config.text(format)
            try:
                read = dialect.read(text, config.version, config.world_size).given
            except BridgeError:
                assert code
                continue
            assert read == config.given or (code and {*read} < {*config.given})
            assert all(config.given[path] == value for path, value in read.items())

    holds(law, files(dialect))


# 2. Lifted, lowered, lifted


@each
def test_a_plan_survives_its_own_dialect(dialect: Dialect) -> None:
    """`lift(lower(lift(c))) == lift(c)` at the same release and world size."""

    def law(config: Config) -> None:
        plan = bridge.lift(config)
        back = bridge.lift(again(plan, config)).values()
        before, after = without_settled(config, plan.values(), back)
        assert before == after

    holds(law, files(dialect).filter(has_one_mesh).filter(starts))


def has_one_mesh(config: Config) -> bool:
    """Whether all ranks lie on the mesh of a Plan; those of a separate encoder, or of weight shards, do not."""
    parallel = bridge.lift(config).parallel
    product = prod(
        size or 1 for size in (parallel.data, parallel.tensor, parallel.pipeline, parallel.context)
    )
    return config.world_size in (None, product)


# 3. Rules keep to their groups


@each
def test_every_path_is_in_one_rule(dialect: Dialect) -> None:
    theirs, ours = fields(dialect.schema), paths()
    file = f"compat/{dialect.name}/rules/table.py"
    assert not wrong_claims([path for rule in dialect.rules for path in rule.theirs], theirs, file)
    assert not wrong_claims([path for rule in dialect.rules for path in rule.ours], ours, file)
    assert not {path for rule in dialect.rules for path in rule.sees} - {*theirs, *ours}


def wrong_claims(claimed: list[str], known: Mapping[str, Any], file: str) -> list[str]:
    """What to do about each path that is not claimed by exactly one rule, or that is claimed and unknown."""
    counts = Counter(claimed)
    return [
        *(f"{path}: no rule has it; add one to {file}" for path in known if not counts[path]),
        *(
            f"{path}: {counts[path]} rules have it; keep one in {file}"
            for path in known
            if counts[path] > 1
        ),
        *(f"{path}: no such field; correct it in {file}" for path in counts if path not in known),
    ]


def test_wrong_claims_say_what_to_do() -> None:
    assert wrong_claims(["a", "b", "b", "x"], {"a": 1, "b": 1, "c": 1}, "rules.py") == [
        "c: no rule has it; add one to rules.py",
        "b: 2 rules have it; keep one in rules.py",
        "x: no such field; correct it in rules.py",
    ]


class Watched(Mapping[str, Any]):
    """A mapping that remembers what it was asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values_, self.asked = values, set[str]()

    def __getitem__(self, path: str) -> Any:
        self.asked.add(path)
        return self.values_[path]

    def __iter__(self) -> Iterator[str]:
        self.asked.update(self.values_)
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


@each
def test_rules_keep_to_their_groups(dialect: Dialect) -> None:
    """Each reads only what it claims or sees, and writes only what it claims."""

    def law(config: Config) -> None:
        plan = bridge.lift(config).values()
        for rule in dialect.rules:
            effective, meant = Watched(config.effective.flat()), Watched(plan)
            read, written = rule.read(effective, config.context), rule.write(meant, config.context)
            assert effective.asked <= {*rule.theirs, *rule.sees}, rule.theirs
            assert meant.asked <= {*rule.ours, *rule.sees}, rule.ours
            assert {*read} <= {*rule.ours} and {*written} <= {*rule.theirs}, rule.theirs

    holds(law, configs(dialect))


# 4. Losses are what is lost


@each
def test_findings_list_what_a_translation_changes(dialect: Dialect) -> None:
    """A set field is in the findings if lowering and lifting changes what its stack makes of it, unless the target has its whole
    meaning in other words. One that leaves a part open, for which the target has a default, may be."""

    def law(config: Config) -> None:
        for result in translations(config):
            back = there_and_back(config, result)
            kept, meant = (
                plain(bridge.lift(result.config).values()),
                plain(bridge.lift(config).values()),
            )
            changed = [path for path in config.given if changes(config, result, path, back)]
            may, must = (
                {
                    setting
                    for path in changed
                    if not arrives(config, meant, kept, path, opened)
                    for setting in otherwise(path, config.given[path], back.get(path))
                }
                for opened in (True, False)
            )
            assert must <= losses(result) <= may, result.config.dialect.name

    holds(law, configs(dialect), at=PAIR)


def changes(config: Config, result: Result, path: str, back: Mapping[str, Any]) -> bool:
    """Whether a set field comes back as something else; one that its stack turns into others, if these do."""
    if config.effective.get(path) is not None or config.given[path] is None:
        return bool(config.effective.get(path) != back.get(path))
    rule = next(rule for rule in config.dialect.rules if path in rule.theirs)
    before, after = bridge.lift(config).values(), bridge.lift(result.config).values()
    return not rule.ours or any(before.get(meant) != after.get(meant) for meant in rule.ours)


def arrives(
    config: Config, meant: Mapping[str, Any], held: Mapping[str, Any], path: str, opened: bool
) -> bool:
    """Whether every plan field that a setting stands for is the same in the target, and one of them takes effect: with those that
    the setting leaves open, or without."""
    rule = next(rule for rule in config.dialect.rules if path in rule.theirs)
    if rule.blurs and rule.blurs(rule.values_in_view(rule.theirs, config.effective)):
        return False
    # Another rule may see the setting and say what it stands for.
    rules = [rule] if rule.ours else [one for one in config.dialect.rules if path in one.carries]
    carried = [ours for one in rules for ours in one.paths_of_plan(path)]
    said = [ours for ours in carried if ours in meant]
    return bool(said) and all(
        held.get(ours) == meant.get(ours) for ours in (carried if opened else said)
    )


def translations(config: Config) -> Iterator[Result]:
    """Yield what `config` becomes for every other stack that can run it at all. To draw it once for all of them takes a fifth of
    the time."""
    for theirs in DIALECTS:
        if theirs is not config.dialect:
            with suppress(BridgeError):
                yield translate(config, theirs)


def losses(result: Result) -> set[str]:
    return {
        finding.path for finding in result.findings if finding.given and finding.how is not None
    } - {*result.source.opaque}


def there_and_back(config: Config, result: Result) -> Mapping[str, Any]:
    """Effective values after the way there and back; none if the stack refuses what comes back."""
    try:
        return again(bridge.lift(result.config), config).effective
    except BridgeError:
        return Values()


# 7. What is written is accepted


@each
def test_the_other_stack_reads_what_is_written(dialect: Dialect, tmp_path: Path) -> None:
    """Its own reader takes every format that a translation is written in, and makes the same of it."""

    def law(config: Config) -> None:
        for result in translations(config):
            for format in result.config.dialect.formats:
                assert_is_read_back(result, format)

    def assert_is_read_back(result: Result, format: str) -> None:
        theirs = result.config.dialect
        with TemporaryDirectory(dir=tmp_path) as folder:
            path = Path(folder, f"config.{suffix_of(theirs, format)}")
            theirs.write(result.config, path)
            try:
                read = theirs.read(path, result.config.version, result.config.world_size)
            except BridgeError as error:
                assert dialect.about and said_to_lack(result, error), error
                return
        assert read.given == result.config.given
        assert read.effective == result.config.effective

    holds(law, files(dialect), at=PAIR)


def said_to_lack(result: Result, error: BridgeError) -> bool:
    """Whether all that the reader stops at was named: a source about one thing alone leaves the others open."""
    named = {finding.path for finding in result.config.findings}
    return all(
        problem.partition(":")[0] in named and "missing" in problem for problem in error.problems
    )


# 8. One verdict for one pair


@each
def test_diff_is_never_milder_than_convert(dialect: Dialect) -> None:
    """`diff` names each cause of `convert`, and says the same both ways; tests/convert/verdicts.py tries more."""

    def law(config: Config) -> None:
        assert not {
            theirs.name: broken for theirs in DIALECTS if (broken := judge(config, theirs)[1])
        }

    holds(law, configs(dialect), at=settings(LAW, max_examples=2 * MORE))
