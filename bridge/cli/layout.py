"""The command `layout`: print where a plan places its model, and draw it."""

from __future__ import annotations

import sys

from bridge.api.access import limit_access
from bridge.api.layout import Sizes, place_model
from bridge.cli.budget import stay_within_limits
from bridge.cli.job import Job, Picture, answer
from bridge.cli.terminal import print_json, say
from bridge.report import as_json as report
from bridge.report.console import console
from bridge.report.layouts import as_json, draw_layout, print_layout
from bridge.report.pictures.page import refuse_other_file
from bridge.translation.write_outputs import not_over_input


def check_picture(picture: Picture, job: Job) -> None:
    """Raise `BridgeError` if a picture would replace a file that is no such picture."""
    if picture.path:
        not_over_input(job.file, [picture.path])
        refuse_other_file(picture.path)


def layout(job: Job, sizes: Sizes, picture: Picture) -> int:
    """Show the layout of one file, and draw it. Returns the exit code."""
    with answer(job), limit_access(job), stay_within_limits():
        result = place_model(job, sizes, picture.bytes)
        check_picture(picture, job)
        if job.json:
            shown = as_json(result.outline, result.findings, job.threshold)
            print_json({**shown, **({"memory": picture.bytes} if picture.memory else {})})
        else:
            print_layout(result.outline, result.findings, console(sys.stdout))
        if picture.path:
            draw_layout(result.outline, picture.path, picture.bytes)
            if not job.json:
                say(f"wrote {picture.path}")
        return report.exit_of(result.findings, job.threshold)
