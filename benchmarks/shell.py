"""Generated scripts against bash: for each production how many scripts hold it, and what the reader says of them.

    python benchmarks/shell.py FIRST COUNT [--cases] [--keep FILE]
    python benchmarks/shell.py --table FILE ...

Script number N is made with the seed N, so that a number names a script. `--keep` adds what each script came to to a file;
`--table` adds such files up. A script is *equal* where bash passes the words that the reader says, *stopped* where both say that
the shell ends or drops a command with an error on the same line after the same runs, *refused* where the reader says that it
does not know, *different* else. Each script that differs is printed, cut down to the lines that make it differ.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bridge.testing.bash import Bash, outcome
from bridge.testing.cases import case
from bridge.testing.scripts import PRODUCTIONS, Script, write_script

KINDS = ("equal", "stopped", "refused", "different")
Chooser = Callable[[Sequence[str]], str]
Row = tuple[int, str, str, list[str]]
"""Number, outcome, why, productions."""


def compared(
    bash: Bash, numbers: Iterable[int], write: Callable[[Chooser], Script]
) -> Iterable[Row]:
    """What each script came to."""
    for number in numbers:
        text, used = write(random.Random(number).choice)
        kind, why = outcome(bash, text)
        if kind == "different":
            print(f"script {number} differs:\n{shrunk(bash, text)}", flush=True)
        yield number, kind, why, sorted(set(used))


def shrunk(bash: Bash, text: str) -> str:
    """The fewest lines of a script that still differ, each cut at its blanks as far as that goes."""
    for mark in ("\n", "; ", " "):
        parts = text.split(mark)
        place = len(parts) - 1
        while place >= 0:
            fewer = [*parts[:place], *parts[place + 1 :]]
            if bash.reads(mark.join(fewer)) and outcome(bash, mark.join(fewer))[0] == "different":
                parts = fewer
            place -= 1
        text = mark.join(parts)
    return text


def table(rows: Iterable[Row]) -> str:
    """The counts, over all scripts and for each production."""
    total: Counter[str] = Counter()
    found: dict[str, Counter[str]] = {
        name: Counter() for choices in PRODUCTIONS.values() for name in choices
    }
    for _, kind, _, used in rows:
        total[kind] += 1
        for name in used:
            found[name][kind] += 1
    lines = [
        f"| production | generated | {' | '.join(KINDS)} | share refused |",
        f"|---|---{'|---' * len(KINDS)}|---|",
    ]
    for name, counts in (("*all scripts*", total), *found.items()):
        said = name if name.startswith("*") else f"`` {name} ``".replace("|", "\\|")
        numbers = " | ".join(f"{counts[kind]:,}" for kind in KINDS)
        share = counts["refused"] / max(counts.total(), 1)
        lines.append(f"| {said} | {counts.total():,} | {numbers} | {share:.1%} |")
    return "\n".join(lines)


def kept(path: str) -> Iterable[Row]:
    """The rows of a file."""
    with open(path, encoding="utf-8") as stream:
        for line in stream:
            number, kind, why, used = json.loads(line)
            yield number, kind, why, used


def main() -> None:
    """Compare scripts, or add up what was kept of earlier runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=int, nargs="?", default=0, help="number of the first script")
    parser.add_argument("count", type=int, nargs="?", default=500, help="how many scripts")
    parser.add_argument("--keep", help="file to which each outcome is added")
    parser.add_argument(
        "--cases", action="store_true", help="small scripts, of one condition or construct each"
    )
    parser.add_argument("--table", nargs="+", help="files to add up; nothing is run")
    options = parser.parse_args()
    if options.table:
        print(table(row for path in options.table for row in kept(path)))
        return
    write = case if options.cases else write_script
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for row in compared(
            Bash(Path(folder)), range(options.first, options.first + options.count), write
        ):
            rows.append(row)
            if options.keep:
                with open(options.keep, "a", encoding="utf-8") as stream:
                    stream.write(json.dumps(row) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
