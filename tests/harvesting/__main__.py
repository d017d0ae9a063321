"""The command that reads the facts of a release: `python -m tests.harvesting STACK RELEASE [--from PATH]`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.version import Version

from bridge.errors import BridgeError, VersionError
from bridge.files import write_all
from bridge.report.exit_codes import Exit
from bridge.stack.dialect import Dialect
from bridge.stack.extras import install_command
from bridge.stack.registry import load
from bridge.stack.releases import Releases
from tests.harvesting import JUDGES, STACKS, decide
from tests.harvesting.process import Process, environment
from tests.harvesting.rows import FactChange, Facts, at, changes, text, unite_names, update_rows
from tests.harvesting.source import locate
from tests.harvesting.worker import PLACES

HELP = """\
Facts about a release are read from the release itself. Install it without its dependencies, in an
environment that has this package and what the release imports, or name a source tree:

  pip install --no-deps --target /tmp/new nemo-automodel==0.7.0
  python -m tests.harvesting automodel 0.7.0 --from /tmp/new

A separate process imports the stack. A new release is added to the repository: its date to
known.json, and its differences from the release before it to the files of rows. A row that ends
gets "until", a new one "since", and other rows stay as they are. Then the stack's own parser judges
generated configs: valid ones, ones with a mistake, and ones with settings that need not fit each
other. A sample of the verdicts goes to tests/STACK/releases.jsonl. The output counts who accepts and
who refuses, and what is left out because this machine lacks a package or a file. It lists the
decisions for a person: fields without a rule, changed defaults, changed functions that rules and
checks name, and differences between our reader and the release. Write the rules, and run the command
again with --record.

A known release is compared with the repository. Nothing is written without --record; the exit code
is 2 if they differ. A stack needs a module in harvesting/stacks (PACKAGE, TABLES, facts, path_of), and
one in harvesting/judges (pose_config, raw, answer, LOOSER) if its own code can judge a config.
"""
KNOWN = "known.json"
SCRIPTED = "tests.harvesting"
JUDGING = "tests.harvesting.verdicts"


@dataclass(frozen=True)
class Job:
    """A harvest to do: the stack, the release, the source tree, and the folders to write to."""

    stack: str
    release: str
    root: Path | None
    into: Path
    tests: Path | None
    count: int
    day: str

    @property
    def part(self) -> ModuleType:
        """The stack's module in `harvesting.stacks`."""
        if find_spec(f"{STACKS}.{self.stack}") is None:
            raise BridgeError(
                f"{self.stack}: harvesting/stacks has no module for the stack; see python -m {SCRIPTED} --help"
            )
        return import_module(f"{STACKS}.{self.stack}")

    @property
    def dialect(self) -> Dialect:
        """The stack."""
        return load(self.stack)

    @property
    def releases(self) -> Releases:
        """The known releases of the stack."""
        return Releases(self.stack, tuple(self.table(KNOWN)))

    def table(self, name: str) -> Any:
        """Return the content of one file of facts; an empty list if there is no such file."""
        path = self.into / name
        return json.loads(path.read_text("utf-8")) if path.is_file() else []


def job(options: argparse.Namespace) -> Job:
    """Return the job that the options of the command line describe."""
    dialect = load(options.stack)
    home = Path(str(import_module(dialect.package).__file__)).parent
    tests = options.tests or home.parents[1] / "tests" / "stacks" / options.stack
    into = options.into or home / "releases"
    return Job(
        options.stack,
        options.release,
        options.root,
        into,
        tests if tests.is_dir() else None,
        options.count,
        options.day,
    )


def harvest_release(todo: Job) -> Facts:
    """Return the facts of the release, read by a separate process."""
    tree = locate(todo.part.PACKAGE, todo.release, todo.root)
    say(f"{todo.stack} {todo.release}: reading {tree.folder}")
    with closing(Process(todo.stack, todo.release, tree.root)) as process:
        return Facts(**process.ask("facts"))


def say(line: str) -> None:
    """Print a line of progress to standard error."""
    print(line, file=sys.stderr, flush=True)


def compare_facts(todo: Job, facts: Facts) -> list[FactChange]:
    """Return the changes from the facts in the repository to the facts that the release's code states.

    For a new release, the repository's newest release is compared.
    """
    tables = {**todo.part.TABLES, PLACES: ("place",)}
    return [
        change
        for file, keys in tables.items()
        for change in changes(
            file, at(todo.table(file), todo.release, todo.releases), facts.rows[file], keys
        )
    ]


def add_release(todo: Job, facts: Facts, changes: Sequence[FactChange]) -> dict[Path, str]:
    """Return the content of the files of facts, by path, after the release is added."""
    releases = todo.table(KNOWN)
    newest = todo.releases.known[-1]
    if Version(todo.release) < Version(newest):
        raise VersionError(
            f"{todo.stack}: {todo.release} is older than {newest}, the newest known; add releases "
            "in order of their versions"
        )
    texts = {todo.into / KNOWN: json.dumps({**releases, todo.release: todo.day}, indent=1) + "\n"}
    for file, keys in {**todo.part.TABLES, PLACES: ("place",)}.items():
        mine = [change for change in changes if change.file == file]
        if mine:
            texts[todo.into / file] = text(update_rows(todo.table(file), mine, todo.release, keys))
    for file, names in facts.gathered.items():
        whole = unite_names(todo.table(file), names)
        if whole != todo.table(file):
            texts[todo.into / file] = text(whole)
    return texts


def print_changes(todo: Job, facts: Facts, changes: Sequence[FactChange]) -> None:
    """Print the changes, and the decisions that a person has to make."""
    settings = [change for change in changes if change.file != PLACES]
    begins = sum(change.after is not None for change in settings)
    ends = sum(change.before is not None for change in settings)
    stable = sum(len(rows) for file, rows in facts.rows.items() if file != PLACES) - begins
    print(
        f"{todo.stack} {todo.release}: {stable} facts unchanged, {begins} rows begin, {ends} rows end"
    )
    for heading, lines in (
        (
            "fields and defaults to decide",
            decide.questions(todo.dialect, settings, todo.part.path_of),
        ),
        (
            "changed functions that rules and checks name",
            decide.functions_that_changed([c for c in changes if c.file == PLACES]),
        ),
        ("facts not read from this release", facts.unread),
    ):
        print_list(heading, lines)


def print_list(heading: str, lines: Iterable[str]) -> None:
    """Print lines under a heading, which says so if there are none."""
    print("\n".join(decide.heading_and_lines(heading, list(lines))) or f"{heading}: none")


def judge(todo: Job) -> int:
    """Let the release judge generated configs, in a process that loads Hypothesis. Returns its exit code."""
    if find_spec(f"{JUDGES}.{todo.stack}") is None:
        print(
            f"{todo.stack}: no configs are judged, because harvesting/judges has no module for the stack"
        )
        return Exit.CLEAN
    if find_spec("hypothesis") is None:
        raise BridgeError(
            f"{SCRIPTED}: generated configs need Hypothesis, which is not installed; {install_command('test')}"
        )
    sys.stdout.flush()
    command = [sys.executable, "-m", JUDGING, *again_with(todo)]
    return subprocess.run(command, env=environment(), check=False).returncode


def main(
    arguments: Sequence[str] | None = None, work: Callable[[Job, bool], int] | None = None
) -> int:
    """Harvest one release, or do other `work` for it. Returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        return (work or run)(job(options), options.record)
    except BridgeError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return Exit.ERROR


def run(todo: Job, record: bool) -> int:
    """Add the release, or compare it with the repository if it is known. Returns the exit code."""
    is_known = todo.release in todo.releases.known
    facts = harvest_release(todo)
    # For a known release, a function that only one side names is a matter of our rules and not of
    # the release.
    changes = [
        change
        for change in compare_facts(todo, facts)
        if not is_known or change.file != PLACES or change.both
    ]
    print_changes(todo, facts, changes)
    if not is_known:
        write_all(add_release(todo, facts, changes))
        say(f"{todo.stack} {todo.release}: facts are written; judging {todo.count} configs")
        # In a new process: this one has read the facts without the release and keeps them.
        again = [sys.executable, "-m", SCRIPTED, *again_with(todo), "--record"]
        return (
            subprocess.run(again, env=environment(), check=False).returncode
            if todo.count
            else Exit.CLEAN
        )
    if record and (code := judge(todo)):
        return code
    return Exit.FINDINGS if changes else Exit.CLEAN


def again_with(todo: Job) -> Iterable[str]:
    """Yield the command-line arguments for the same job."""
    yield from (todo.stack, todo.release, "--count", str(todo.count), "--into", str(todo.into))
    yield from ("--from", str(todo.root)) if todo.root else ()
    yield from ("--tests", str(todo.tests)) if todo.tests else ()


def parser() -> argparse.ArgumentParser:
    """The command-line parser."""
    command_line = argparse.ArgumentParser(
        prog=f"python -m {SCRIPTED}",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_line.add_argument("stack", help="name of a folder in compat/")
    command_line.add_argument(
        "release",
        help="the release, such as 0.7.0; 0.20.0.dev20260822 for a main branch of that day",
    )
    command_line.add_argument(
        "--from",
        dest="root",
        type=Path,
        metavar="PATH",
        help="a source tree, or a folder that pip --target made",
    )
    command_line.add_argument(
        "--count",
        type=int,
        default=400,
        help="number of generated configs for the release to judge; 0 for none",
    )
    command_line.add_argument(
        "--day", default="", metavar="YYYY-MM-DD", help="the date of the release"
    )
    command_line.add_argument(
        "--record",
        action="store_true",
        help="for a known release: judge configs again, and write the verdicts",
    )
    command_line.add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="folder for files of facts; default: the stack's own",
    )
    command_line.add_argument(
        "--tests",
        type=Path,
        metavar="FOLDER",
        help="folder for verdicts; default: tests/stacks/STACK",
    )
    return command_line


if __name__ == "__main__":
    sys.exit(main())
