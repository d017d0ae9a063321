"""The report of a move: what the config and the checkpoint lost."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from shlex import quote

from bridge.api.move_target import FILE, LAUNCH, MoveSource, MoveTarget
from bridge.checkpoint.groups import Row
from bridge.checkpoint.interface import PlannedFiles as Files
from bridge.files.printable import clean
from bridge.files.shown import show_value
from bridge.report import as_json, as_text
from bridge.report.console import console
from bridge.stack.checkpoint_side import side_of
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect, How


def lost_settings_line(findings: tuple[Finding, ...]) -> str:
    """Return the first line of the report: the settings that were lost, grouped by effect on the run."""
    rows: dict[Effect, list[str]] = {}
    for finding in findings:
        weighty = finding.effect.reaches(Effect.NUMBERS) or (
            finding.given and finding.effect.reaches(Effect.COST)
        )
        if weighty and finding.how is not How.MISSING:
            rows.setdefault(finding.effect, []).append(finding.path)
    told = (
        f"{', '.join(dict.fromkeys(rows[effect]))} ({effect})"
        for effect in Effect
        if effect in rows
    )
    return f"Taken away: {'; '.join(told)}." if rows else "Nothing was taken away."


def report_text(
    source: MoveSource,
    target: MoveTarget,
    files: Files,
    findings: tuple[Finding, ...],
    output: Path,
) -> str:
    """Return the text of the report file of a move to the folder `output`."""
    out = StringIO()
    screen = console(out)
    screen.print(clean(lost_settings_line(findings)), markup=False, soft_wrap=True)
    where, size = source.hub.where.steps, sum(file.size for file in files.files)
    step = "at an unknown step" if where is None else f"at step {where}"
    head = f"{source.hub.origin.format} -> {target.saves.format}, {step}; {len(files.files)} files, {size:,} bytes"
    screen.print(f"Checkpoint: {head}", markup=False, soft_wrap=True)
    for finding in (*target.saves.findings, *target.hub.findings, *files.findings):
        screen.print(
            f"  {finding.effect}: {finding.path}: {finding.message}", markup=False, soft_wrap=True
        )
    if target.result:
        as_text.text(target.result, screen)
    else:
        screen.print(f"Config: {target.written.file}, unchanged", markup=False)
        for finding in as_json.all_of(target.config):
            screen.print(
                f"  {finding.effect}: {finding.path}: {finding.message}",
                markup=False,
                soft_wrap=True,
            )
    own = side_of(target.config.dialect).settings_for_groups(FILE)
    if edits := {path: value for path, value in target.edits.items() if path not in own}:
        said = [f"{path} {value}" for path, value in edits.items() if value is not None]
        gone = [path for path, value in edits.items() if value is None]
        words = ", ".join((*said, *([f"without {', '.join(gone)}"] if gone else [])))
        screen.print(f"For the checkpoint: {words}", markup=False, soft_wrap=True)
    if target.groups:
        screen.print(
            f"Groups of parameters: {_groups_text(target.groups)}", markup=False, soft_wrap=True
        )
    start = quote(f"{output.name}/{LAUNCH}")
    screen.print(f"To start: sh {start}", markup=False, soft_wrap=True)
    return out.getvalue()


def _groups_text(groups: tuple[Row, ...]) -> str:
    """Describe the optimizer's groups in words: the number of parameters in each group, and the
    settings in which the groups differ.
    """
    kinds = [
        name
        for name in groups[0]
        if name != "params" and any(row.get(name) != groups[0][name] for row in groups)
    ]
    rows = (
        f"{len(row['params'])} parameters {', '.join(f'with {name} {show_value(row.get(name))}' for name in kinds)}".strip()
        + f", such as {clean(row['params'][0])}"
        for row in groups
    )
    return (
        f"{'; '.join(rows)}; {FILE} lists the parameters of each group; the run starts with these "
        "groups in this order"
    )
