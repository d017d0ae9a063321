"""The `match` command: hold a launch against the model that it loads."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bridge.api.access import limit_access
from bridge.api.read import CONFIG, document_of, read_config
from bridge.api.source import Source
from bridge.cli.budget import stay_within_limits
from bridge.cli.job import Job, answer
from bridge.cli.many_files import Gate
from bridge.cli.terminal import print_json, say
from bridge.files.shown import show_value
from bridge.report import as_json, as_text
from bridge.report.console import console
from bridge.report.row_choice import View
from bridge.stack import registry
from bridge.stack.dialect import Config
from bridge.translation.match import Match, match as compare


def match(job: Job, model: str, view: View, gate: Gate) -> int:
    """Hold one launch against a model. Returns the exit code."""
    job = gate.job(job)
    place = str(Path(model) / CONFIG) if Path(model).is_dir() else model

    @stay_within_limits()
    def work() -> int:
        launch, other = read_config(job), _read_model(place)
        found = compare(launch, other)
        findings = gate.choice.of(found.findings, job.file)
        code = as_json.exit_of(findings, job.threshold)
        names, sides = (job.file, place), (launch, other)
        if job.json:
            settings = {path: found.changes[path] for path in found.changes}
            print_json(
                {**as_json.difference_json(names, sides, findings, code), "settings": settings}
            )
        else:
            verdict = _verdict(found)
            as_text.print_differences(names, sides, findings, console(sys.stdout), view, verdict)
            if found.changes and not view.quiet:
                what = "it" if all(row.about for row in found.contradictions) else "the rest"
                say("")
                say(f"With these settings {what} fits:")
                say(f"  {' '.join(_words(found, launch))}")
        return code

    with answer(job), limit_access(job):
        return work()


def _read_model(place: str) -> Config:
    """Return the config of the model; of a model with several parts, that of its text decoder."""
    model = Source(place)
    inner = registry.find_text_decoder(document_of(model).data)
    if inner is None:
        return read_config(model)
    # The lines of a part by itself are not those of the file.
    return replace(read_config(replace(model, text=json.dumps(inner))), origins={})


def _verdict(found: Match) -> str:
    counts = Counter(found.causes[row.id] for row in found.contradictions)
    reasons = "; ".join(f"{words} ({count})" for words, count in counts.items())
    return f"does not fit: {reasons}" if counts else "fits"


def _words(found: Match, launch: Config) -> Iterator[str]:
    """Yield the words to paste into a launch of flags, or the settings of a file; then what to remove."""
    assert found.fixed is not None
    changed = {path: value for path, value in found.changes.items() if value is not None}
    written = launch.dialect.render(replace(found.fixed, given=type(launch.given)(changed)))
    if written.arguments:
        yield from (shlex.join(shlex.split(line)) for line in written.text.splitlines())
    else:
        yield from (f"{path}: {show_value(value)}" for path, value in changed.items())
    for path, value in found.changes.items():
        if value is None and path in launch.given:
            origin = launch.origins.get(path)
            yield f"and without {(origin and origin.spelling) or path}"
