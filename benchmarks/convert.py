"""How many real Megatron launches a second convert to DeepSpeed and back, in one process."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import bridge
import compat
from bridge.stack.rules import Effect

HOME = Path(__file__).resolve().parents[1]
SHARED = os.environ.get("STAGEBRIDGE_SHARED")
SAMPLE = HOME / "tests" / "megatron" / "sample.jsonl"
LAUNCHES = Path(SHARED) / "truth" / "megatron_cli.jsonl" if SHARED else SAMPLE

T = TypeVar("T")
Row = dict[str, Any]


def rows(path: Path) -> list[Row]:
    """Launches as flags, with release, ranks and verdict."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read(row: Row) -> Any:
    """The launch as its own release reads it."""
    flags = [str(flag) for flag in row["flags"]]
    return compat.load("megatron").read(
        flags, version=row["version"], world_size=row["world_size"], lenient=True
    )


def done(work: Callable[[T], Any], items: Iterable[T]) -> Iterator[Any]:
    """Results of `work`; refused items give their error."""
    for item in items:
        try:
            yield work(item)
        except bridge.BridgeError as error:
            yield error


@dataclass
class Stopwatch:
    """Wall and processor seconds since its start; the latter do not count what else the machine does."""

    wall: float = field(default_factory=time.perf_counter)
    processor: float = field(default_factory=time.process_time)

    def rate(self, count: int) -> str:
        """`count` a second, by both clocks."""
        wall, processor = time.perf_counter() - self.wall, time.process_time() - self.processor
        return f"{count:5} in {wall:6.2f} s = {count / wall:6.0f} a second ({count / processor:6.0f} of processor time)"


def timed(name: str, work: Callable[[T], Any], items: list[T]) -> list[Any]:
    """Run `work` on all items, print how many a second, give what was accepted."""
    watch = Stopwatch()
    found = list(done(work, items))
    accepted = [item for item in found if not isinstance(item, bridge.BridgeError)]
    print(f"{name:22} {watch.rate(len(items))}, {len(accepted)} accepted")
    return accepted


def main() -> None:
    """Read all rows, convert what is accepted to DeepSpeed, write it, and convert it back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "file", nargs="?", type=Path, default=LAUNCHES, help="launches, one JSON object a line"
    )
    options = parser.parse_args()
    launches = rows(options.file)
    watch = Stopwatch()
    configs = timed("read as Megatron", read, launches)
    there = timed("Megatron -> DeepSpeed", to_deepspeed, configs)
    timed("written as JSON", lambda result: result.written, there)
    back = timed("DeepSpeed -> Megatron", to_megatron, there)
    timed("written as flags", lambda result: result.written, back)
    print(f"{'all of it':22} {watch.rate(len(launches))}")
    effects = Counter(str(finding.effect) for result in there for finding in result.findings)
    print(
        "findings by effect:",
        ", ".join(f"{count} {effect}" for effect, count in effects.most_common()),
    )
    same = sum(
        not any(finding.effect is Effect.NUMBERS for finding in result.findings) for result in there
    )
    print(f"launches without a finding of effect '{Effect.NUMBERS}': {same} of {len(there)}")


def to_deepspeed(config: Any) -> bridge.Result:
    """One way."""
    return bridge.translate(config, compat.load("deepspeed"))


def to_megatron(result: bridge.Result) -> bridge.Result:
    """The other way, for the release that the launch came from."""
    return bridge.translate(result.config, compat.load("megatron"), version=result.source.version)


if __name__ == "__main__":
    main()
