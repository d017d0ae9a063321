"""First light on a GPU: whether the engine's numbers there are plain torch's, and how fast it is. At most four minutes.

    python3 benchmarks/gpu/run.py [--only PART,...] [--to PATH] [--dry]

Each part runs in a process of its own, with a time limit: a part that fails, crashes or hangs does not end the others, and rows
that it wrote before stay. Prints one table, and writes all rows with whole tracebacks to PATH as JSON; also where it is
interrupted. An earlier file at PATH is renamed (gpu.1.json, gpu.2.json, ...). With --dry, every branch that needs no device
runs on the CPU, on small sizes.

The exit code is 0 if all parts ran and no row is wrong, 1 if a row is wrong, 2 if nothing ran, and 130 if it was interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import closing
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
LAST_ROW = {"what": "the last check ended"}
"""Without this row, a process ended before its checks did."""
_interrupted = threading.Event()
"""Set by a signal. An exception there would lose a process that is just being started."""
QUESTION = 30.0
"""Seconds in which torch has to say whether there is an accelerator."""
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

            threading.Thread(target=_follow, args=[os.getppid()], daemon=True).start()
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
        write(LAST_ROW)


def _follow(parent: int) -> None:
    """End this process and its ranks once the parent is gone: nobody else would end what hangs on a device."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


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
        code = wait_for(self.process, self.until)
        why = f"ended with code {code}" if code else ""
        if code is None:
            why = "stopped at its time limit"
        self.stop(traced=code is None)
        return self.read(why)

    def read(self, why: str) -> list[dict[str, Any]]:
        """The rows that the part wrote, and one more where it did not reach its end: for the reason `why`, if that is known."""
        text = self.rows.read_text() if self.rows.exists() else ""
        found, ended = list[dict[str, Any]](), False
        for line in text.splitlines():
            row = read_row(line)
            if not row:
                why = why or f"wrote a row that is none: {line[:100]}"
                continue
            ended = ended or row["what"] == LAST_ROW["what"]
            found.append(row)
        if not ended:
            why = why or "ended before its last check"
        elif not any("value" in row for row in found):
            why = why or "ended without a result"
        if why:
            said = self.printed.read_text(errors="replace")
            found.append(_without_result(self.part, why) | {"error": said[-20_000:]})
        return found

    def stop(self, traced: bool = False) -> None:
        """End the process and the ranks that it started. With `traced`, it prints first where it is."""
        for sign in (signal.SIGABRT, signal.SIGKILL) if traced else (signal.SIGKILL,):
            try:
                os.killpg(self.process.pid, sign)
                time.sleep(0.5)
            except ProcessLookupError:
                break
        self.process.wait()


def wait_for(process: subprocess.Popen[Any], until: float) -> int | None:
    """The code with which a process ends, or None if it does not within its time. Raises KeyboardInterrupt after a signal."""
    while (code := process.poll()) is None and time.monotonic() < until:
        if _interrupted.wait(0.1):
            raise KeyboardInterrupt
    return code


def read_row(line: str) -> dict[str, Any]:
    """A row of a part, or {} if the line is none. A value that is no number is wrong, whatever the part says of it."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return {}
    texts = ("part", "what", "unit", "goal", "error")
    if not isinstance(row, dict) or not isinstance(row.get("what"), str):
        return {}
    if row.get("good") not in (True, False, None) or any(
        not isinstance(row.get(name) or "", str) for name in texts
    ):
        return {}
    value = row.get("value")
    if isinstance(value, float) and not math.isfinite(value):
        row |= {"value": str(value), "good": False}
    return row


def _without_result(part: str, why: str) -> dict[str, Any]:
    return {"part": part, "what": WHOLLY, "value": why, "good": False}


def run_all(
    parts: Sequence[str], folder: Path, dry: bool, limit: float, whole: float
) -> Generator[list[dict[str, Any]]]:
    """Run parts, first those that may run at once. Yield the rows of each."""
    end = time.monotonic() + whole
    together = [part for part in TOGETHER if part in parts]
    # A CPU has no room for several.
    groups = [[part] for part in together] if dry else [together]
    for group in [*groups, *([part] for part in ALONE if part in parts)]:
        until = min(end, time.monotonic() + limit)
        if until - time.monotonic() < LEAST:
            yield [_without_result(part, "not run: no time left") for part in group]
            continue
        running = list[Started]()
        try:
            for part in group:
                running.append(Started(part, folder, until, dry))
            while running:
                yield running[0].answer()
                del running[0]
        except KeyboardInterrupt:
            for started in running:
                started.stop()
            yield [row for started in running for row in started.read("interrupted")]
            raise
        finally:
            for started in running:
                started.stop()


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


def find_obstacle() -> str:
    """Why there is no accelerator, or "". Asked in another process, so that this one takes none of its memory."""
    code = (
        "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 'torch finds no device')"
    )
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            answer = wait_for(process, time.monotonic() + QUESTION)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or [f"code {answer}"])[-1]
    if answer is None:
        return f"torch did not say within {QUESTION:g} s whether there is a device"
    return last if answer else ""


def _names_of_parts(text: str) -> list[str]:
    known = (*TOGETHER, *ALONE)
    parts = list(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [repr(name) for name in parts if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"found {', '.join(unknown)}, expected some of {', '.join(known)}"
        )
    return parts


def main() -> int:
    """Run the parts, print the table, and write the file. Return the exit code."""
    for stream in (sys.stdout, sys.stderr):  # what the terminal's encoding lacks
        stream.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        type=_names_of_parts,
        metavar="PART,...",
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
    given.to = given.to.resolve()
    folder, plain = given.to.parent, given.to.is_file() or not given.to.exists()
    if not folder.is_dir() or not plain or not os.access(folder, os.W_OK):
        parser.error(f"--to: found {given.to}, expected a file in a folder that can be written")
    sys.path[:0] = PATHS
    if given.part:
        run_part(given.part, given.to, given.dry)
        return 0
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(sign, lambda *_: _interrupted.set())
    start, rows = time.monotonic(), list[dict[str, Any]]()
    state = "failed"
    try:
        _run_and_show(given, rows)
        state = "complete"
    except KeyboardInterrupt:
        state = "interrupted"
    finally:
        # Whatever ended the run: its rows may be the only ones of their device.
        seconds = time.monotonic() - start
        write_report(given.to, {"dry": given.dry, "state": state, "seconds": seconds, "rows": rows})
    results = [row for row in rows if "value" in row]
    wrong = [row for row in results if row.get("good") is False]
    print(
        f"\n{'' if state == 'complete' else state + ': '}{len(results)} rows, {len(wrong)} wrong; {seconds:.0f} s;"
        f" all of it in {given.to}"
    )
    if state == "interrupted":
        return 130
    if all(row["what"] == WHOLLY and row["value"].startswith("not run") for row in results):
        return 2
    return int(bool(wrong))


def _run_and_show(given: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Run the parts, print the table, and add all rows to `rows`."""
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    obstacle = "" if given.dry else find_obstacle()
    if obstacle:
        rows += [
            _without_result(part, f"not run: {obstacle}") | {"good": None} for part in given.only
        ]
        show(rows)
        return
    slower = 10 if given.dry else 1
    limits = given.limit * slower, given.whole * slower
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(run_all(given.only, Path(folder), given.dry, *limits)) as results,
    ):
        for of_part in results:
            rows += of_part
            show(of_part)


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON, whole or not at all. An earlier one is renamed: its device may be gone."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(report, indent=1, allow_nan=False))
    if path.exists():
        numbers = itertools.count(1)
        names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in numbers)
        path.rename(next(name for name in names if not name.exists()))
    unfinished.replace(path)


if __name__ == "__main__":
    sys.exit(main())
