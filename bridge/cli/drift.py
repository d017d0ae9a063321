"""The `drift` command: read one file in two releases, report, and write the migrated file."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from bridge.cli.budget import stay_within_limits
from bridge.cli.convert import (
    answer_job,
    dialect_of,
    document_of,
    file_of,
    format_for,
    not_over_input,
    place_files,
    read_as,
    release_of,
)
from bridge.cli.file_search import STDIN
from bridge.cli.job import Job
from bridge.cli.terminal import console, content, print_json
from bridge.errors import TranslationError
from bridge.report import as_json, drift_as_text
from bridge.translation.drift import Drift
from bridge.translation.drift import drift as compare


def drift(job: Job, to_version: str | None, output: Path | None, force: bool = False) -> int:
    """Compare the meaning of one file in two releases. Returns the exit code."""
    output = file_of(output, "")

    @stay_within_limits()
    def work() -> int:
        document = document_of(job)
        dialect = dialect_of(job, document)
        (old, said), (new, also) = (
            release_of(job, dialect, job.version),
            release_of(job, dialect, to_version),
        )
        found = compare(
            partial(read_as, job, dialect, document), dialect.release(old), dialect.release(new)
        )
        found = replace(found, remarks=(*said, *also, *found.remarks))
        if output:
            _write_drift(job, found, output, force)
        _print_drift(job, found, output)
        return as_json.exit_of((*found.changes, *found.remarks), job.threshold)

    return answer_job(job, work)


def _write_drift(job: Job, found: Drift, output: Path, force: bool) -> None:
    if found.migrated is None:
        raise TranslationError(
            f"{output}: nothing to write; {found.version} accepts no part of {job.file}"
        )
    dialect = found.before.dialect
    texts = dialect.files(dialect.render(found.migrated, format_for(dialect, output)), output)
    not_over_input(job, texts)
    place_files(texts, output, force, "without -o the new file is printed and nothing is written")


def _print_drift(job: Job, found: Drift, output: Path | None) -> None:
    format = found.before.dialect.format_of(output or (None if job.file == STDIN else job.file))
    if job.json:
        print_json(as_json.drift_json(found, format, job.threshold))
    elif output or found.migrated is None:
        drift_as_text.drift_text(found, console(sys.stdout))
    else:
        # Without -o the file has stdout to itself, so that it can be piped.
        content(found.migrated.text(format))
        drift_as_text.drift_text(found, console(sys.stderr))
