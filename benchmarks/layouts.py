"""`layout` and `schedule` on launches that Megatron accepts: how many are refused and why, and the time of the slowest."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bridge
import compat
from bridge.api.layout import Sizes, outline_of
from bridge.errors import BridgeError
from bridge.layout.pipeline import time_schedule
from bridge.plan.plan import Plan
from bridge.report.layouts import as_json


@dataclass
class Tally:
    """What came of the launches."""

    launches: int = 0
    unknown: int = 0
    slowest: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)

    def tried(self, what: str, work: Callable[[], Any]) -> Any:
        """What `work` finds; None if it was refused, which is counted."""
        begun = time.process_time()
        try:
            return work()
        except BridgeError as error:
            self.refused[f"{what}: {error}"] += 1
            return None
        finally:
            self.slowest = max(self.slowest, time.process_time() - begun)


def main() -> int:
    """Lay out every accepted launch and time its schedule; the exit code says whether any was refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "launches",
        type=Path,
        help="JSON lines with flags, version and world_size, and maybe rejected",
    )
    tally = Tally()
    for row in accepted(parser.parse_args().launches):
        show(row, tally)
    print(
        f"{tally.launches} launches, {tally.unknown} without a number of words, {sum(tally.refused.values())} refused"
    )
    print(f"slowest: {tally.slowest:.2f} s of processor time")
    for reason, number in tally.refused.most_common():
        print(f"  {number:4} {reason}")
    return bool(tally.refused)


def accepted(path: Path) -> Iterator[Mapping[str, Any]]:
    """Launches that Megatron's own parser and checks take."""
    rows = map(json.loads, path.read_text("utf-8").splitlines())
    return (row for row in rows if not row.get("rejected") and not row.get("config_rejected"))


def show(row: Mapping[str, Any], tally: Tally) -> None:
    """One launch through both commands."""
    tally.launches += 1
    config = compat.load("megatron").read(
        row["flags"], row["version"], row["world_size"], lenient=True
    )
    plan: Plan = bridge.lift(config)
    outline = tally.tried(
        "layout", lambda: outline_of(plan, Sizes("file", {}, None), row["world_size"])
    )
    if outline is not None:
        tally.unknown += bool(as_json(outline, ())["model"]["unknown"])
    tally.tried("schedule", lambda: time_schedule(plan, None))


if __name__ == "__main__":
    sys.exit(main())
