"""The law of one verdict for one pair, over generated configs of every pair of stacks.

By hand: `python -m tests.convert.verdicts --count 500 [SOURCE>TARGET ...]` prints the counts of each pair.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic

from hypothesis import HealthCheck, Phase, given, seed, settings

import compat
from bridge.errors import BridgeError
from bridge.report.as_json import remarks_of
from bridge.report.as_text import kind
from bridge.stack.dialect import Config, Dialect
from bridge.stack.findings import DIFFERENCE, Finding
from bridge.stack.rules import Effect, How
from bridge.testing import configs
from bridge.translation.diff import compare
from bridge.translation.translate import Result, remarks_alike, translate

REFUSED = "refused"
"""What a pair is counted as if a stack refuses the source or what it becomes."""


def judge(source: Config, target: Dialect) -> tuple[str, list[str]]:
    """Return the effect that `convert` finds, or `REFUSED`, and what breaks the law in the
    translation of `source` to the stack `target`.
    """
    try:
        result = translate(source, target)
        there = compare(source, result.config)
        back = compare(result.config, source)
    except BridgeError:
        return REFUSED, []
    causes = [*causes_of(result)]
    broken = [*unnamed(causes, there)]
    if worst(there).rank > worst(causes).rank:
        broken.append(f"diff is milder: {worst(there)}, but convert: {worst(causes)}")
    if kind(there) != kind(back) or felt(there) != felt(back):
        broken.append(
            f"diff disagrees with itself the other way round: {kind(there)}, {kind(back)}"
        )
    # What is about the model alone says nothing of a run, and `diff` still weighs what its translation adds.
    if (
        not source.dialect.about
        and worst(there).reaches(Effect.NUMBERS)
        and not worst(causes).reaches(Effect.NUMBERS)
    ):
        harsher = next(row for row in there if row.effect.reaches(Effect.NUMBERS))
        broken.append(
            f"diff finds what convert does not: {harsher.path} {harsher.change}: {harsher.message}"
        )
    broken += contradictions((*result.findings, *there))
    broken += repetitions(result.findings)
    broken += (f"diff of a config with itself: {one.path}" for one in compare(source, source))
    return worst(causes).name, broken


def contradictions(rows: Iterable[Finding]) -> Iterator[str]:
    """Yield each row that says nothing: one value before and after, or no reason."""
    for row in rows:
        if row.effect is Effect.NONE or row.how in (None, How.MISSING):
            continue
        before, arrow, after = row.change.partition(" -> ")
        valued = row.before is not None or row.after is not None
        # One sample and one step are two things.
        other_unit = (
            bool(before.split()[1:]) and before.split()[1:2] != after.replace(",", "").split()[1:2]
        )
        if (valued and row.before == row.after and not other_unit) or (
            arrow and before == after.rpartition(" ")[2]
        ):
            yield f"one value before and after: {row.path} {row.before} {row.change}: {row.message}"
        if not row.message and not row.rule:
            yield f"no reason: {row.path} {row.before} {row.after}"


def repetitions(rows: Iterable[Finding]) -> Iterator[str]:
    """Yield each loss that two rows tell: two of one setting, or a row on a plan field of which the
    source says nothing and another one that names the field.
    """
    lost = [
        row for row in rows if row.how not in (None, How.MISSING) and row.effect is not Effect.NONE
    ]
    for number, row in enumerate(lost):
        for other in lost[:number]:
            opened = (row.how is How.DEFAULTED) != (other.how is How.DEFAULTED)
            if opened and not set(row.about).isdisjoint(other.about):
                yield f"one cause in two rows: {row.path}, {other.path}"
            elif row.path == other.path and not opened:
                yield f"one setting in two rows: {row.path}"


def causes_of(result: Result) -> Iterator[Finding]:
    """Yield what `convert` says of a translation, without settings that are still to be added, and
    without remarks that hold for the source and the target alike.
    """
    both = remarks_alike(result)
    for one in remarks_of(result):
        if one.how is not How.MISSING and one.effect is not Effect.NONE and one.id not in both:
            yield one


def unnamed(causes: Iterable[Finding], told: Sequence[Finding]) -> Iterator[str]:
    """Yield each cause that no row of `told` names, by its setting or by a plan field that the
    setting stands for, with an effect that is at least as bad.
    """
    for cause in causes:
        wanted = {cause.path, *cause.about}
        rows = [row for row in told if not wanted.isdisjoint(names(row))]
        if not any(row.effect.reaches(cause.effect) for row in rows):
            yield f"{cause.path} ({cause.effect}): {cause.message}"


def names(row: Finding) -> set[str]:
    """The settings and plan fields that a row names; of a remark, its id too."""
    return {row.path, row.id.removeprefix(f"{DIFFERENCE}/"), *row.about}


def worst(findings: Iterable[Finding]) -> Effect:
    return min(
        (one.effect for one in findings), key=lambda effect: effect.rank, default=Effect.NONE
    )


def felt(rows: Iterable[Finding]) -> dict[str, Effect]:
    """The worst effect that is told of each plan field and setting."""
    found: dict[str, Effect] = {}
    for row in rows:
        for name in row.about:
            found[name] = min(row.effect, found.get(name, Effect.NONE), key=lambda one: one.rank)
    return found


def tried(
    source: Dialect, target: Dialect, count: int, tell: Callable[[Config, str, list[str]], None]
) -> None:
    """Draw `count` configs of `source`, and tell what the law says of each."""

    @seed(34)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(configs(source))
    def law(config: Config) -> None:
        tell(config, *judge(config, target))

    law()


def main(words: Sequence[str]) -> int:
    """Try all pairs, or those that are named, and print the counts of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="*")
    parser.add_argument("--count", type=int, default=500)
    asked = parser.parse_args(words)
    dialects = [compat.load(name) for name in compat.names()]
    total, failed = Counter[str](), 0
    for source, target in ((one, other) for one in dialects for other in dialects):
        name, began = f"{source.name}>{target.name}", monotonic()
        if asked.pairs and name not in asked.pairs:
            continue
        counts, broken = Counter[str](), Counter[str]()

        def tell(
            config: Config,
            effect: str,
            problems: list[str],
            counts: Counter[str] = counts,
            broken: Counter[str] = broken,
        ) -> None:
            counts[effect] += 1
            counts["broken"] += bool(problems)
            broken.update(problems)

        tried(source, target, asked.count, tell)
        total += counts
        failed += counts["broken"]
        told = ", ".join(f"{key} {count}" for key, count in sorted(counts.items()))
        print(f"{name}: {told} ({monotonic() - began:.0f} s)", flush=True)
        for problem, count in broken.most_common(10):
            print(f"  {count} x {problem}", flush=True)
    print("all:", ", ".join(f"{key} {count}" for key, count in sorted(total.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
