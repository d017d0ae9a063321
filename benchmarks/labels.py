"""Changes one setting of a config that trains, trains both for five steps on the stack itself, and compares what happened with
the effect that `stagebridge diff` states.

    python benchmarks/labels.py --seed 34 --count 150 --json labels.json

DeepSpeed, Megatron-Core and the Trainer of transformers have to be installed. Runs are on one rank of a CPU; each is a process of
its own, forked after the imports. The settings are drawn in turn from the sections of each stack. A value that the stack refuses
is drawn anew and counted. The exit code is 1 if more than two labels disagree with what happened.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import labels_runs as runs

from bridge.errors import BridgeError
from bridge.plan.section import fields
from bridge.stack.dialect import Config
from bridge.stack.effects import Effect
from bridge.translation.diff import compare

STEPS, PATIENCE = 5, 120
"""Steps of a run, and the seconds after which a run is ended."""
ROUNDED = {"fp64": 1e-8, "fp32": 1e-3, "half": 5e-2}
"""Relative distances of the updates of all weights up to which two runs are the same but for rounding, by the format of the runs.
Adam's first steps have the length of the learning rate however small a gradient is, so that rounding shows more in them.
"""
EFFECTS, TRIES = (Effect.NUMBERS, Effect.ROUNDING, Effect.NUMBERS, Effect.COST, Effect.NONE), 12
"""The labels that are looked for in turn, and the number of draws after which any label will do."""
SAME, ROUNDING, NUMBERS = "same numbers", "same up to rounding", "different numbers"
AGREES = {
    SAME: (Effect.NONE, Effect.COST, Effect.ROUNDING),
    ROUNDING: (Effect.ROUNDING,),
    NUMBERS: (Effect.NUMBERS,),
}
"""The effects that agree with what happened. Where two runs are the same to the last bit, "same up to rounding" is right too: on
a GPU, where the kernels differ, they need not be.
"""


@dataclass(frozen=True)
class Bench:
    """A stack: the configs that are changed, by name, the settings that may be changed with the section of each, and the function
    that trains a config and returns losses and weights.
    """

    stack: str
    bases: Mapping[str, Any]
    sections: Mapping[str, tuple[str, ...]]
    read: Callable[[Any], Config]
    changed: Callable[[Any, str, Any], Any]
    train: Callable[[Any, int], Any]
    format: Callable[[Any], str]
    version: str

    @cached_property
    def configs(self) -> Mapping[str, Config]:
        """The configs that are changed, as our own reader reads them."""
        return {name: self.read(base) for name, base in self.bases.items()}


@dataclass(frozen=True)
class Pair:
    """A base, the same with one setting changed, and the label of the change."""

    bench: Bench
    base: str
    path: str
    before: Any
    after: Any
    source: Any
    label: Effect


def outcome(one: Any, other: Any, digits: str) -> tuple[str, float]:
    """Return what happened between two runs, and the relative distance of the updates."""
    if one["steps"] != other["steps"] or one["shapes"] != other["shapes"]:
        return NUMBERS, float("inf")
    if one["bits"] == other["bits"]:
        return SAME, 0.0
    far = runs.distance(one, other)
    return (ROUNDING if far <= ROUNDED[digits] else NUMBERS), far


def isolated(work: Callable[[], Any], seconds: int = PATIENCE) -> Any:
    """Return the result of `work` from a forked process, or the text of its error."""
    with tempfile.NamedTemporaryFile() as place:
        child = os.fork()
        if child == 0:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            signal.alarm(seconds)
            before = set(sys.modules)
            try:
                found = work()
            except BaseException as error:
                found = f"{type(error).__name__}: {str(error)[:300]}"
            Path(place.name).write_bytes(pickle.dumps((found, sorted(sys.modules.keys() - before))))
            os._exit(0)
        os.waitpid(child, 0)
        text = Path(place.name).read_bytes()
    found, imported = pickle.loads(text) if text else ("ended without a result", [])
    for name in imported:
        _import(name)
    return found


def _import(name: str) -> None:
    """Import a module that a run needed, so that later runs need not import it. A module that cannot be imported alone is left
    to the runs.
    """
    with suppress(Exception):
        import_module(name)


# Values


def altered(annotation: Any, value: Any, chance: random.Random) -> Iterator[Any]:
    """Yield values of a setting's type that differ from `value`, in random order."""
    kinds = list(_kinds(annotation))
    chance.shuffle(kinds)
    for kind in kinds:
        if isinstance(kind, tuple):
            yield from chance.sample(
                [one for one in kind if one != value], len([one for one in kind if one != value])
            )
        elif kind is bool:
            yield not value
        elif kind is int:
            now = value if isinstance(value, int) and not isinstance(value, bool) else 1
            yield from chance.sample([now * 2, now + 1, max(0, now // 2)], 3)
        elif kind is float:
            now = value if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
            yield from chance.sample([now * 2, now / 2, now * 1.5], 3) if now else (0.5, 0.1)


def _kinds(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) is Literal:
        yield typing.get_args(annotation)
    elif annotation in (bool, int, float):
        yield annotation
    elif typing.get_origin(annotation) is not tuple:
        for inner in typing.get_args(annotation):
            yield from _kinds(inner)


def label(one: Config, other: Config) -> Effect:
    """Return the worst effect that `diff` states of two configs."""
    return min(
        (finding.effect for finding in compare(one, other)),
        key=lambda effect: effect.rank,
        default=Effect.NONE,
    )


def drawn(bench: Bench, chance: random.Random) -> Iterator[Pair]:
    """Yield changes, the sections taking turns, for ever. A change that our own reader refuses is passed over."""
    sections = sorted(bench.sections)
    chance.shuffle(sections)
    told = set[tuple[str, str]]()
    while True:
        for section in sections:
            # The effects take turns too: most settings of a stack take no effect in most configs.
            wanted, found = EFFECTS[len(told) % len(EFFECTS)], None
            for _ in range(TRIES):
                path, base = (
                    chance.choice(bench.sections[section]),
                    chance.choice(sorted(bench.bases)),
                )
                pair = None if (path, base) in told else _pair(bench, base, path, chance)
                found = pair or found
                if pair is not None and pair.label is wanted:
                    break
            if found is not None:
                told.add((found.path, found.base))
                yield found


def _pair(bench: Bench, base: str, path: str, chance: random.Random) -> Pair | None:
    one = bench.configs[base]
    now = one.effective.get(path, one.given.get(path))
    own = runs.VALUES.get(bench.stack, {}).get(path)
    kind = fields(one.dialect.schema)[path].annotation
    choices = [value for value in own if value != now] if own else altered(kind, now, chance)
    for value in choices:
        source = bench.changed(bench.bases[base], path, value)
        try:
            other = bench.read(source)
            if other.effective.get(path, other.given.get(path)) == now:
                continue
            return Pair(bench, base, path, now, value, source, label(one, other))
        except BridgeError:
            continue
    return None


def measured(
    bench: Bench, count: int, chance: random.Random, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each change that both runs survive, `count` of them."""
    bases: dict[str, Any] = {}
    done = refused = 0
    for pair in drawn(bench, chance):
        if done == count:
            return
        start = time.monotonic()
        if pair.base not in bases:
            bases[pair.base] = isolated(lambda: bench.train(bench.bases[pair.base], STEPS))  # noqa: B023 - runs at once
        one, other = bases[pair.base], isolated(lambda: bench.train(pair.source, STEPS))  # noqa: B023 - runs at once
        if isinstance(one, str):
            raise SystemExit(f"{bench.stack}, {pair.base}: the base does not train: {one}")
        row = {
            "stack": bench.stack,
            "base": pair.base,
            "path": pair.path,
            "before": pair.before,
            "after": pair.after,
        }
        row["label"] = pair.label.value
        if isinstance(other, str):
            refused += 1
            say(
                f"{bench.stack} {pair.base} {pair.path} {pair.before!r} -> {pair.after!r}: not run: {other[:100]}"
            )
            continue
        # Runs in two formats are held to the wider one: another format is more than rounding.
        digits = min(
            map(bench.format, (bench.bases[pair.base], pair.source)), key=ROUNDED.__getitem__
        )
        happened, far = outcome(one, other, digits)
        agrees = pair.label in AGREES[happened]
        done += 1
        say(
            f"{done:3d}/{count} {bench.stack} {pair.base} {pair.path} {pair.before!r} -> {pair.after!r}: {pair.label.value}; "
            f"{happened} ({far:.1e}), {time.monotonic() - start:.0f} s{'' if agrees else '   <-- DISAGREES'}"
        )
        yield {
            **row,
            "happened": happened,
            "distance": far,
            "agrees": agrees,
            "refused_before": refused,
        }


def main() -> int:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=34)
    parser.add_argument(
        "--count", type=int, default=150, help="changes that are measured, a third for each stack"
    )
    parser.add_argument("--json", type=Path, help="a file for the rows")
    parser.add_argument("--only", default="", help="one stack: deepspeed, megatron or huggingface")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for place, (stack, make) in enumerate(runs.BENCHES.items()):
        if given.only not in ("", stack):
            continue
        bench, chance = make(Bench), random.Random(f"{given.seed} {stack}")
        share = given.count // len(runs.BENCHES) + (place < given.count % len(runs.BENCHES))
        for row in measured(bench, share, chance, lambda line: print(line, flush=True)):
            rows.append(row)
            if given.json:
                given.json.write_text(
                    json.dumps({"seed": given.seed, "rows": rows}, indent=1, default=str) + "\n"
                )
    wrong = [row for row in rows if not row["agrees"]]
    print(
        f"seed {given.seed}: {len(rows)} changes, {len(rows) - len(wrong)} labels agree, {len(wrong)} disagree"
    )
    return len(wrong) > 2


if __name__ == "__main__":
    sys.exit(main())
