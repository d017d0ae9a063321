"""The command `move`: prints what was run, and what the proof says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bridge.api.access import limit_access
from bridge.api.move import Moved, prove_run, write_run
from bridge.api.move_target import CHECKPOINT, MoveOptions, lost_settings_line
from bridge.cli.budget import read_within_limits
from bridge.cli.job import Job, answer
from bridge.cli.progress import Progress, ProgressPrinter, end_orderly
from bridge.cli.terminal import content, print_json
from bridge.report import as_json, json_types
from bridge.report.exit_codes import Exit
from bridge.stack.extras import need_engine

VERDICTS = {
    "same": "Proved: the same run",
    "differs": "Not the same run",
    "in part": "Proved in part",
    "not run": "Nothing proved",
}


def move(job: Job, **options: Any) -> int:
    """Move one run. Returns the exit code."""
    with answer(job), limit_access(job):
        need_engine("move")
        with end_orderly():
            # The proof trains, so only what comes before it has limits.
            with read_within_limits():
                run = write_run(job, MoveOptions(**options), _meter)
            hear: Callable[[Mapping[str, Any]], None] = (
                (lambda said: None) if job.json else ProgressPrinter().hear
            )
            proof = prove_run(run, hear)
        code = as_json.exit_of(run.findings, job.threshold)
        if proof and code is not Exit.ERROR and proof["verdict"] != "same":
            code = Exit.FINDINGS if proof["verdict"] == "differs" else Exit.UNPROVED
        if job.json:
            print_json(_report_object(run, proof, code))
        else:
            content(run.report)
            content("".join(f"{line}\n" for line in _proof_lines(proof)) if proof else "")
        return code


def _meter(total: int) -> Callable[[int, bool], None]:
    return Progress(total).add_bytes


def _report_object(run: Moved, proof: json_types.Proved | None, code: Exit) -> json_types.Moved:
    source, target = run.source, run.target
    return {
        "output": str(run.options.output),
        "written": not run.options.dry_run,
        "taken_away": lost_settings_line(run.findings),
        "source": {
            "dialect": source.config.dialect.name,
            "format": source.hub.origin.format,
            "steps": source.hub.where.steps,
        },
        "target": {
            "stack": run.options.to,
            "format": target.saves.format,
            "config": target.written.file,
        },
        "launch": list(target.written.command),
        "files": [
            {"name": f"{CHECKPOINT}/{file.name}", "bytes": file.size} for file in run.files.files
        ],
        "findings": [as_json.finding_json(finding) for finding in run.findings],
        "proof": proof,
        "exit_code": code,
    }


def _proof_lines(proof: Mapping[str, Any]) -> Iterator[str]:
    lacking = "; ".join((*proof["lacking"], *([proof["cause"]] if proof["cause"] else [])))
    yield f"{VERDICTS[proof['verdict']]}{f': {lacking}' if lacking else ''}."
    for run in proof["runs"]:
        if run["problem"]:
            yield f"  {run['side']} on {run['engine']}: {run['problem']}"
        else:
            losses = ", ".join(f"{float(loss):.6f}" for loss in run["losses"])
            yield f"  {run['side']} on {run['engine']}, from step {run['first']}: losses {losses}"
    if proof["distance"]:
        gap = proof["distance"]
        loss, norm, update = (
            None if gap[name] is None else f"{float(gap[name]):.1e}"
            for name in ("loss", "norm", "update")
        )
        norms = f", gradient norms {norm}" if norm else ""
        yield f"  largest differences: losses {loss}{norms}, updates {update} ({proof['ranks']} ranks)"
