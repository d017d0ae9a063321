"""How many real Megatron launches a second convert to DeepSpeed and back, in one process."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import bridge
import compat

HOME = Path(__file__).resolve().parents[1]
TRUTH = HOME.parent / "shared" / "truth" / "megatron_cli.jsonl"
SAMPLE = HOME / "tests" / "megatron" / "sample.jsonl"

T = TypeVar("T")
Row = dict[str, Any]


def rows(path: Path) -> list[Row]:
    """Launches as flags, with release, ranks and verdict."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read(row: Row) -> bridge.Result | Any:
    """The launch as its own release reads it."""
    flags = [str(flag) for flag in row["flags"]]
    return compat.load("megatron").read(flags, version=row["version"], world_size=row["world_size"], lenient=True)


def done(work: Callable[[T], Any], items: Iterable[T]) -> Iterator[Any]:
    """Results of `work`; refused items give their error."""
    for item in items:
        try:
            yield work(item)
        except bridge.BridgeError as error:
            yield error


def timed(name: str, work: Callable[[T], Any], items: list[T]) -> list[Any]:
    """Run `work` on all items, print how many a second, give what was accepted."""
    begin = time.perf_counter()
    found = list(done(work, items))
    seconds = time.perf_counter() - begin
    accepted = [item for item in found if not isinstance(item, bridge.BridgeError)]
    print(f"{name:32} {len(items):5} in {seconds:6.2f} s = {len(items) / seconds:6.0f} a second, {len(accepted)} accepted")
    return accepted


def main() -> None:
    """Read all rows, convert what is accepted to DeepSpeed, write it, and convert it back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=TRUTH if TRUTH.exists() else SAMPLE)
    options = parser.parse_args()
    launches = rows(options.file)
    begin = time.perf_counter()
    configs = timed("read as Megatron", read, launches)
    there = timed("Megatron -> DeepSpeed", to_deepspeed, configs)
    timed("written as JSON", lambda result: result.written, there)
    back = timed("DeepSpeed -> Megatron", to_megatron, there)
    timed("written as flags", lambda result: result.written, back)
    seconds = time.perf_counter() - begin
    print(f"{'all of it':32} {len(launches):5} in {seconds:6.2f} s = {len(launches) / seconds:6.0f} a second")
    print("findings by effect:", dict(Counter(str(finding.effect) for result in there for finding in result.findings)))


def to_deepspeed(config: Any) -> bridge.Result:
    """One way."""
    return bridge.translate(config, compat.load("deepspeed"))


def to_megatron(result: bridge.Result) -> bridge.Result:
    """The other way, for the release that the launch came from."""
    return bridge.translate(result.config, compat.load("megatron"), version=result.source.version)


if __name__ == "__main__":
    main()
