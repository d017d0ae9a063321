"""How long launch scripts take to be read, in this checkout beside another one, the two taking turns.

    python benchmarks/reading.py FOLDER --list FILE --beside CHECKOUT [--turns N]

Processor time of reading every script of the list that both find the same number of runs in; the others are read as well, and are
not counted. A ratio above 1 says that this checkout is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
READ = """
import json, sys, time
from bridge.errors import BridgeError
from bridge.shell import Script
found = {}
for path in json.load(sys.stdin):
    text = open(path, encoding="utf-8", errors="replace").read()
    best = None
    for _ in range(3):
        begun = time.process_time()
        try:
            runs = len(Script(text, "launch.sh").launches)
        except BridgeError:
            runs = -1
        best = min(best or 1e9, time.process_time() - begun)
    found[path] = runs, best
json.dump(found, sys.stdout)
"""


def read(checkout: Path, paths: list[str]) -> dict[str, tuple[int, float]]:
    """Runs and seconds of each script, the best of three."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", READ],
        cwd=checkout,
        env=environment,
        input=json.dumps(paths),
        text=True,
        capture_output=True,
        check=True,
    )
    return {path: (runs, seconds) for path, (runs, seconds) in json.loads(done.stdout).items()}


def main() -> None:
    """Read in turns, print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="scripts, in folders OWNER+NAME with their paths")
    parser.add_argument("--list", type=Path, required=True, help="a JSON list with repo and path")
    parser.add_argument("--beside", type=Path, required=True, help="the other checkout")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    rows = json.loads(options.list.read_text("utf-8"))
    listed = (options.folder / row["repo"].replace("/", "+") / row["path"] for row in rows)
    paths = [str(path.resolve()) for path in listed if path.suffix != ".json" and path.is_file()]
    ratios = []
    for _ in range(options.turns):
        other, ours = read(options.beside.resolve(), paths), read(HERE, paths)
        both = [path for path in paths if other[path][0] == ours[path][0] > 0]
        theirs, own = (sum(found[path][1] for path in both) for found in (other, ours))
        ratios.append(own / theirs)
        print(
            f"{len(both)} scripts: here {own:.2f} s, there {theirs:.2f} s, ratio {own / theirs:.2f}",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
