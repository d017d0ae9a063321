"""The `fuzz` command: try generated configs, show progress, and print the smallest one that fails."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from bridge.cli.progress import Pace
from bridge.cli.terminal import print_json
from bridge.errors import BridgeError
from bridge.plan.section import fields
from bridge.report import json_types
from bridge.report.exit_codes import Exit
from bridge.stack import registry
from bridge.stack.dialect import code_beside
from bridge.stack.extras import install_command

if TYPE_CHECKING:
    from bridge.testing.fuzz import Covered, Failure, Task

STEPS = 10
"""Number of progress lines that are printed while the examples are tried."""


def fuzz(
    dialect: str,
    to: str | None,
    versions: tuple[str | None, str | None],
    examples: int,
    seed: int,
    as_json: bool,
) -> int:
    """Fuzz one dialect. Returns the exit code."""
    if find_spec("hypothesis") is None:
        raise BridgeError(
            f"fuzz: needs Hypothesis, which is not installed; {install_command('test')}"
        )
    from bridge.testing import fuzz as fuzzing

    source, target = registry.load(dialect), registry.load(to) if to else None
    version = source.release(versions[0]) if versions[0] else None
    task = fuzzing.Task(
        source, target, version, target.release(versions[1]) if target else None, examples, seed
    )
    coverage, failure = fuzzing.fuzz(task, _progress_printer(task))
    file = f"fuzz.{fuzzing.suffix(source, source.formats[0])}"
    if as_json:
        print_json(_report_object(task, coverage, failure, file))
    else:
        print("\n".join(_report_lines(task, coverage, failure, file)))
    return Exit.FINDINGS if failure else Exit.CLEAN


def _progress_printer(task: Task) -> Callable[[Covered], None]:
    """Return a function that prints progress on stderr.

    It prints a line for each tenth of the examples. While Hypothesis shrinks a failure, it prints a
    line for each hundred configs.
    """
    every, pace = max(1, task.examples // STEPS), Pace()

    def tick(coverage: Covered) -> None:
        count = coverage.examples
        rest = pace.rest(count, task.examples) if count < task.examples else ""
        if count <= task.examples and count % every == 0:
            line = f"{count} of {task.examples} configs{rest and f', {rest}'}"
            print(line, file=sys.stderr, flush=True)
        # Hypothesis tries further configs while it makes a failure smaller; how many is not known ahead.
        elif count > task.examples and count % 100 == 0:
            print(
                f"{count} configs, looking for the smallest that fails", file=sys.stderr, flush=True
            )

    return tick


def _report_lines(task: Task, coverage: Covered, failure: Failure | None, file: str) -> list[str]:
    from bridge.testing.fuzz import command

    releases = len(coverage.releases)
    title = f"{task.dialect.title}{f' -> {task.to.title} {task.to_version}' if task.to else ''}"
    total = len(fields(task.dialect.schema))
    lines = [
        f"{title}: {coverage.examples} configs of {releases} of {len(task.dialect.versions)} releases,"
        f" {len(coverage.fields)} of {total} settings",
        *(
            f"  {stage}: {count} configs passed{f', {coverage.refused[stage]} refused' if coverage.refused[stage] else ''}"
            for stage, count in coverage.accepted.items()
        ),
    ]
    if failure is None:
        return [*lines, "no failure"]
    ranks = failure.config.world_size or "any number of"
    return [
        *lines,
        f"\nFAILED {failure.stage}: {failure.message}",
        f"\nThe smallest config found, for {task.dialect.title} {failure.config.version} on {ranks} ranks. Save as {file}:",
        "",
        failure.text.rstrip(),
        *(
            [f"\nSave as {_path_beside(file)} in the same folder:\n\n{_failure_code(failure)}"]
            if _failure_code(failure)
            else []
        ),
        f"\nTo see the failure:\n  {command(task, failure, file)}\nTo find it again by fuzzing:\n  {_repeat_command(task)}",
    ]


def _path_beside(file: str) -> str:
    from pathlib import Path

    return str(code_beside(Path(file)))


def _failure_code(failure: Failure) -> str:
    import json

    return (
        json.dumps(dict(failure.as_file.code), indent=2)
        if failure.as_file and failure.as_file.code
        else ""
    )


def _repeat_command(task: Task) -> str:
    to = ["--to", task.to.name, "--to-version", str(task.to_version)] if task.to else []
    release = ["--from-version", task.version] if task.version else []
    numbers = ["--examples", str(task.examples), "--seed", str(task.seed)]
    return shlex.join(["stagebridge", "fuzz", task.dialect.name, *to, *release, *numbers])


def _report_object(
    task: Task, coverage: Covered, failure: Failure | None, file: str
) -> json_types.Fuzzed:
    from bridge.testing.fuzz import command

    failure_object: json_types.Failed | None = (
        None
        if failure is None
        else {
            "stage": failure.stage,
            "message": failure.message,
            "version": failure.config.version,
            "world_size": failure.config.world_size,
            "text": failure.text,
            "code": _failure_code(failure),
            "command": command(task, failure, file),
        }
    )
    return {
        "examples": coverage.examples,
        "releases": dict(coverage.releases),
        "held": dict(coverage.accepted),
        "refused": dict(coverage.refused),
        "settings": sorted(coverage.fields),
        "failure": failure_object,
        "again": _repeat_command(task),
        "exit_code": Exit.FINDINGS if failure else Exit.CLEAN,
    }
