"""How fast the command starts, as a ratio to importing pydantic, and what loading the dialects imports."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

BASE = "import pydantic; from pydantic import BaseModel"
STARTS = {
    "python": "pass",
    "pydantic": BASE,
    "stagebridge --help": "import sys; sys.argv[1:] = ['--help']; from bridge.cli import main; main()",
    "stagebridge convert --help": "import sys; sys.argv[1:] = ['convert', '--help']; from bridge.cli import main; main()",
    "load both dialects": "import bridge, compat; compat.load('megatron'); compat.load('deepspeed')",
    "their schemas and tables": "import compat; [(d.schema, d.rules) for d in map(compat.load, compat.names())]",
}
HEAVY = ("torch", "numpy", "deepspeed", "megatron", "rich", "typer", "ruamel", "yaml", "hjson")


def seconds(code: str) -> float:
    """Wall time of a fresh interpreter that runs `code`."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def measure(rounds: int) -> dict[str, float]:
    """Median seconds by name; the candidates take turns, so that a busy machine slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in STARTS}
    for _ in range(rounds):
        for name, code in STARTS.items():
            times[name].append(seconds(code))
    return {name: statistics.median(values) for name, values in times.items()}


def loaded(code: str) -> list[str]:
    """Heavy packages that `code` loads."""
    script = f"{code}\nimport sys, json\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    return list(json.loads(done.stdout))


def main() -> None:
    """Print one line for each start, and what loading the dialects imports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    medians = measure(parser.parse_args().rounds)
    for name, value in medians.items():
        print(f"{name:28} {value * 1000:6.0f} ms  {value / medians['pydantic']:5.2f} x pydantic")
    print(
        f"heavy packages with both dialects loaded: {', '.join(loaded(STARTS['load both dialects'])) or 'none'}"
    )


if __name__ == "__main__":
    main()
