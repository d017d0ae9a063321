"""Rounds by hand: `python -m tests.fuzz.rounds [READER ...] --count N` tries inputs of one reader after the other and counts."""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
import traceback
from pathlib import Path
from random import Random

from tests.fuzz.every import EVERY
from tests.fuzz.exercise import Slow, Tally
from tests.fuzz.folders import within
from tests.fuzz.fuzzing import COUNT, FIRST

HANG = 60
"""Seconds after which an input hangs, whatever it waits for."""
PROGRESS = 60.0
"""Seconds between lines of progress."""


class Round:
    """Inputs of one reader: what came of them, each kind of failure shown once."""

    def __init__(self, name: str, tally: Tally) -> None:
        self.name, self.tally, self.shown = name, tally, set[str]()
        self.failed = {"tracebacks": 0, "hangs": 0}
        self.slowest, self.number, self.begun = 0, 0, time.monotonic()
        self.spent = -time.process_time()

    def run(self, first: int, count: int, seconds: float) -> None:
        """Inputs `first` to `first + count`, as long as `seconds` are left."""
        with tempfile.TemporaryDirectory() as scratch:
            os.chdir(scratch)
            one, said = EVERY[self.name](Path(scratch)), time.monotonic()
            for self.number in range(first, first + count):
                if time.monotonic() - self.begun > seconds:
                    break
                before = self.tally.slowest
                try:
                    with within(HANG):
                        one(Random(f"{self.name} {self.number}"), self.tally)
                except (Slow, TimeoutError) as error:
                    self._failed("hangs", error)
                except Exception as error:
                    self._failed("tracebacks", error)
                self.slowest = self.number if self.tally.slowest > before else self.slowest
                if time.monotonic() - said > PROGRESS:
                    said = time.monotonic()
                    print(f"  {self.name} {self.number:,}: {self.failed}", flush=True)
            os.chdir("/")
        self.spent += time.process_time()

    def _failed(self, kind: str, error: Exception) -> None:
        self.failed[kind] += 1
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{type(error).__name__} {frames[-1].filename}:{frames[-1].lineno}"
        if where not in self.shown:
            self.shown.add(where)
            print(f"{self.name} {self.number}: {where}: {str(error)[:300]}", flush=True)

    def __str__(self) -> str:
        inputs = self.tally["inputs"] + sum(self.failed.values())
        counts = ", ".join(
            f"{value:,} {key}" for key, value in sorted(self.tally.items()) if key != "inputs"
        )
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        return (
            f"{self.name}: {inputs:,} inputs, {self.failed['tracebacks']} tracebacks, {self.failed['hangs']} hangs; {counts}; "
            f"slowest {self.tally.slowest:.2f} s (input {self.slowest}); {1e3 * self.spent / max(1, inputs):.1f} ms each, "
            f"{self.spent:.0f} s in all, at most {memory:.0f} MiB"
        )


def main() -> int:
    """One round for each reader; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "reader", nargs="*", help=f"one of {', '.join(EVERY)}; all of them if none is given"
    )
    parser.add_argument("--first", type=int, default=FIRST, help="number of the first input")
    parser.add_argument("--count", type=int, default=COUNT, help="inputs of each reader")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="elapsed time for each reader"
    )
    parser.add_argument(
        "--further",
        type=float,
        default=0.2,
        help="share of the accepted that are told as findings, text, plan",
    )
    parser.add_argument(
        "--stacks",
        type=float,
        default=0.01,
        help="share of the accepted that go to another stack and back",
    )
    parser.add_argument(
        "--terminal", type=float, default=0.001, help="share of inputs that are given to a command"
    )
    chosen = parser.parse_args()
    unknown = set(chosen.reader) - EVERY.keys()
    if unknown:
        parser.error(f"no reader {', '.join(sorted(unknown))}")
    failed = 0
    for name in chosen.reader or EVERY:
        round = Round(name, Tally(chosen.further, chosen.stacks, chosen.terminal))
        round.run(chosen.first, chosen.count, chosen.seconds)
        failed += sum(round.failed.values())
        print(round, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
