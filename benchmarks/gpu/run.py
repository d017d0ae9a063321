"""First light on a GPU: whether the engine's numbers there are plain torch's, and how fast it is. At most four minutes.

    python3 benchmarks/gpu/run.py [--only PART,...] [--to PATH] [--dry]

Each part runs in a process of its own, with a time limit: a part that fails, crashes or hangs does not end the others, and rows
that it wrote before stay. Prints one table, and writes all rows with whole tracebacks to PATH as JSON. With --dry, every branch
that needs no device runs on the CPU, on small sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[2]
PATHS = (str(HOME), str(HOME / "bridge" / "cli" / "front"))
LIMIT, WHOLE = 60.0, 240.0
"""Seconds for a part, and for all of them."""
LEAST = 10.0
"""A part that would have less time is not started."""
TOGETHER = ("environment", "numbers", "random", "ranks", "dropin", "tests")
"""Parts that measure no time, and so run at once."""
ALONE = ("speed", "attach", "dropin-speed", "short-steps")
COLUMNS = ("part", "what", "found", "goal", "verdict")
WHOLLY = "the part as a whole"
LAST = 12
"""Lines of a traceback that are printed; the file has all."""


def checks_of(part: str) -> Sequence[Any]:
    """The checks of a part, each of which yields rows."""
    import checks
    import speed

    return {
        "environment": [checks.environment],
        "numbers": [checks.numbers],
        "random": [
            checks.dropout,
            checks.streams,
            checks.devices,
            checks.memory,
            checks.collectives,
        ],
        "ranks": [checks.ranks],
        "dropin": [checks.dropin_numbers],
        "tests": [checks.marked],
        "speed": [speed.speed],
        "short-steps": [speed.short_steps],
        "attach": [speed.attached],
        "dropin-speed": [speed.dropin_speed],
    }[part]


def run_part(part: str, path: Path, dry: bool) -> None:
    """Run the checks of a part in this process. Each row is written at once, as a line of JSON."""
    with path.open("a") as file:

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps({"part": part, **row}) + "\n")
            file.flush()

        try:
            from tasks import Here

            here, found = Here.of(dry), checks_of(part)
        except Exception as error:
            write(_failure("start", error))
            return
        for check in found:
            start = time.perf_counter()
            try:
                for row in check(here):
                    write(vars(row))
            except Exception as error:
                write(_failure(check.__name__, error))
            write({"what": check.__name__, "seconds": time.perf_counter() - start})


def _failure(what: str, error: Exception) -> dict[str, Any]:
    return {
        "what": what,
        "value": f"failed: {type(error).__name__}",
        "good": False,
        "error": traceback.format_exc(),
    }


@dataclass
class Started:
    """A part under way: its process, the file of its rows, what it prints, and the time at which it has to end."""

    part: str
    folder: Path
    until: float
    dry: bool
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        places = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {
            **os.environ,
            "PYTHONPATH": places,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONFAULTHANDLER": "1",
        }
        variables |= {"CUDA_VISIBLE_DEVICES": ""} if self.dry else {}
        line = [
            sys.executable,
            __file__,
            "--part",
            self.part,
            "--to",
            str(self.rows),
            *(["--dry"] if self.dry else []),
        ]
        with self.printed.open("wb") as out:
            self.process = subprocess.Popen(
                line, stdout=out, stderr=out, env=variables, cwd=HOME, start_new_session=True
            )

    @property
    def rows(self) -> Path:
        """The file of its rows."""
        return self.folder / f"{self.part}.jsonl"

    @property
    def printed(self) -> Path:
        """The file of what it prints."""
        return self.folder / f"{self.part}.txt"

    def answer(self) -> list[dict[str, Any]]:
        """Wait for the end of the part, at most until its time is over. Return its rows."""
        why = ""
        try:
            code = self.process.wait(max(0.1, self.until - time.monotonic()))
            why = f"ended with code {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = "stopped at its time limit"
        # Ranks that it started, too.
        for sign in (signal.SIGABRT, signal.SIGKILL) if "limit" in why else (signal.SIGKILL,):
            try:
                os.killpg(self.process.pid, sign)
                time.sleep(0.5)
            except ProcessLookupError:
                break
        self.process.wait()
        text = self.rows.read_text() if self.rows.exists() else ""
        found = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        if why:
            said = self.printed.read_text(errors="replace")
            found.append(
                {
                    "part": self.part,
                    "what": WHOLLY,
                    "value": why,
                    "good": False,
                    "error": said[-20_000:],
                }
            )
        return found


def run_all(
    parts: Sequence[str], folder: Path, dry: bool, limit: float, whole: float
) -> list[dict[str, Any]]:
    """Run parts, first those that may run at once. Return all rows."""
    end, found = time.monotonic() + whole, list[dict[str, Any]]()
    together = [part for part in TOGETHER if part in parts]
    # A CPU has no room for several.
    groups = [[part] for part in together] if dry else [together]
    for group in [*groups, *([part] for part in ALONE if part in parts)]:
        until = min(end, time.monotonic() + limit)
        if until - time.monotonic() < LEAST:
            rows = [
                {"part": part, "what": WHOLLY, "value": "not run: no time left", "good": False}
                for part in group
            ]
            found += rows
            show(rows)
            continue
        for started in [Started(part, folder, until, dry) for part in group]:
            rows = started.answer()
            found += rows
            show(rows)
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as lines of the table, and below them the last lines of tracebacks."""
    for row in rows:
        if "value" not in row:
            continue
        value = row["value"]
        said = f"{value:.4g}" if isinstance(value, float) else str(value)
        verdict = {True: "ok", False: "**WRONG**", None: ""}[row.get("good")]
        cells = (
            row["part"],
            row["what"],
            f"{said} {row.get('unit') or ''}".strip(),
            row.get("goal") or "",
            verdict,
        )
        print(f"| {' | '.join(cells)} |", flush=True)
    for row in rows:
        if row.get("error"):
            last = row["error"].strip().splitlines()[-LAST:]
            print(
                "",
                f"{row['part']}, {row['what']}:",
                *(f"    {line[:300]}" for line in last),
                "",
                sep="\n",
                flush=True,
            )


def has_device() -> bool:
    """Whether there is an accelerator. Asked in another process, so that this one takes none of its memory."""
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def main() -> int:
    """Run the parts, print the table, and write the file. The exit code is 1 if a row is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        default=",".join((*TOGETHER, *ALONE)),
        help="parts, separated by commas (default: all)",
    )
    parser.add_argument(
        "--to", type=Path, default=Path("gpu.json"), help="file for all rows (default: %(default)s)"
    )
    parser.add_argument(
        "--dry", action="store_true", help="on the CPU, without what needs a device"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT,
        help="seconds for a part (default: %(default)s; --dry: ten times)",
    )
    parser.add_argument(
        "--whole",
        type=float,
        default=WHOLE,
        help="seconds for all (default: %(default)s; --dry: ten times)",
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not (0 < given.limit < float("inf") and 0 < given.whole < float("inf")):
        parser.error("--limit, --whole: expected numbers of seconds above 0")
    # Before the minutes on a device: afterwards it would be too late.
    if not given.to.parent.is_dir() or given.to.is_dir() or not os.access(given.to.parent, os.W_OK):
        parser.error(f"--to: found {given.to}, expected a file in a folder that can be written")
    sys.path[:0] = PATHS
    if given.part:
        run_part(given.part, given.to, given.dry)
        return 0
    parts = given.only.split(",")
    unknown = sorted({*parts} - {*TOGETHER, *ALONE})
    if unknown:
        parser.error(
            f"--only: found {', '.join(unknown)}, expected some of {', '.join((*TOGETHER, *ALONE))}"
        )
    start = time.monotonic()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    if not given.dry and not has_device():
        rows: list[dict[str, Any]] = [
            {"part": part, "what": WHOLLY, "value": "not run: no device"} for part in parts
        ]
        show(rows)
    else:
        with tempfile.TemporaryDirectory() as folder:
            slower = 10 if given.dry else 1
            rows = run_all(
                parts, Path(folder), given.dry, given.limit * slower, given.whole * slower
            )
    wrong = [row for row in rows if row.get("good") is False]
    seconds = time.monotonic() - start
    given.to.write_text(json.dumps({"dry": given.dry, "seconds": seconds, "rows": rows}, indent=1))
    print(
        f"\n{sum('value' in row for row in rows)} rows, {len(wrong)} wrong; {seconds:.0f} s; all of it in {given.to}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
