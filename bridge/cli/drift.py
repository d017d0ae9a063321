"""The `drift` command: read one file in two releases, report, and write the migrated file."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from bridge.api.access import limit_access
from bridge.api.convert import format_for
from bridge.api.read import dialect_of, document_of, read_as, release_of
from bridge.api.source import STDIN
from bridge.cli.budget import stay_within_limits
from bridge.cli.convert import file_of
from bridge.cli.job import Job, answer
from bridge.cli.terminal import content, print_json
from bridge.errors import TranslationError
from bridge.report import as_json, drift_as_text
from bridge.report.console import console
from bridge.translation.drift import Drift, drift as compare
from bridge.translation.write_outputs import not_over_input, place_files


def drift(job: Job, to_version: str | None, output: Path | None, force: bool = False) -> int:
    """Compare the meaning of one file in two releases. Returns the exit code."""
    output = file_of(output, "")

    @stay_within_limits()
    def work() -> int:
        document = document_of(job)
        dialect = dialect_of(job, document)
        (old, remarks), (new, also) = (
            release_of(job, dialect, job.version),
            release_of(job, dialect, to_version),
        )
        comparison = compare(
            partial(read_as, job, dialect, document), dialect.release(old), dialect.release(new)
        )
        comparison = replace(comparison, remarks=(*remarks, *also, *comparison.remarks))
        if output:
            _write_drift(job, comparison, output, force)
        _print_drift(job, comparison, output)
        return as_json.exit_of((*comparison.changes, *comparison.remarks), job.threshold)

    with answer(job), limit_access(job):
        return work()


def _write_drift(job: Job, drift: Drift, output: Path, force: bool) -> None:
    if drift.migrated is None:
        raise TranslationError(
            f"{output}: nothing to write; {drift.version} accepts no part of {job.file}"
        )
    dialect = drift.before.dialect
    texts = dialect.files(dialect.render(drift.migrated, format_for(dialect, output)), output)
    not_over_input(job.file, texts)
    place_files(texts, output, force, "without -o the new file is printed and nothing is written")


def _print_drift(job: Job, drift: Drift, output: Path | None) -> None:
    format = drift.before.dialect.format_of(output or (None if job.file == STDIN else job.file))
    if job.json:
        print_json(as_json.drift_json(drift, format, job.threshold))
    elif output or drift.migrated is None:
        drift_as_text.drift_text(drift, console(sys.stdout))
    else:
        # Without -o the file has stdout to itself, so that it can be piped.
        content(drift.migrated.text(format))
        drift_as_text.drift_text(drift, console(sys.stderr))
