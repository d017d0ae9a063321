"""The `move` command: write a config and its checkpoint into a folder from which another stack
resumes the run, and prove that it is the same run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from io import StringIO
from pathlib import Path
from shlex import quote
from typing import Any, cast

from bridge.checkpoint import formats, groups, interface, model_facts, smaller_model
from bridge.checkpoint.files import File
from bridge.checkpoint.groups import (
    DECAY,
    SPARED,
    Row,
    effective_setting,
    fits_config,
    rate_ratios,
    text_of,
)
from bridge.checkpoint.hub import Hub
from bridge.checkpoint.interface import Format, PlannedFiles as Files
from bridge.checkpoint.model_facts import describe_config, rename_under
from bridge.checkpoint.writing import write_checkpoint
from bridge.cli.budget import read_within_limits, stay_within_limits
from bridge.cli.checkpoint import Progress, find_output_inside
from bridge.cli.file_search import STDIN, limit_access
from bridge.cli.folder import CONFIG
from bridge.cli.job import Job
from bridge.cli.local import run_ranks
from bridge.cli.rank_messages import MARK, ProgressPrinter, end_orderly, load_engines
from bridge.cli.read_job import answer_job, document_of, read_job
from bridge.cli.terminal import console, content, note, print_json
from bridge.cli.translate_job import (
    files_to_write,
    lock_job,
    sidecar_of,
    translate_job,
    write_in_format,
)
from bridge.cli.under_launcher import end_process
from bridge.engine.backends import backends
from bridge.engine.environment import detect
from bridge.engine.interface import Backend, Workload
from bridge.engine.learning_rate import learning_rate
from bridge.engine.native import BACKEND
from bridge.errors import BridgeError, SourceError
from bridge.files import Script, as_private_as, read_text
from bridge.files.printable import clean
from bridge.files.progress import listening
from bridge.files.shown import show_value
from bridge.layout.architecture import Architecture
from bridge.report import as_json, as_text, json_types
from bridge.report.exit_codes import Exit
from bridge.stack import launch_command, registry
from bridge.stack.checkpoint_side import Saves, side_of
from bridge.stack.dialect import Config, Written
from bridge.stack.extras import need_engine
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect, How
from bridge.translation.edit import edit_config, without
from bridge.translation.lift import lift
from bridge.translation.translate import Result
from bridge.verify.size import NO_NUMBERS

NATIVE = "native"
CHECKPOINT, LAUNCH, REPORT, PROOF = "checkpoint", "launch.sh", "report.txt", "proof.json"
"""Names of the files that `move` writes into the folder of the config."""
FILE = "parameter_groups.json"
MODEL = "model"
"""Name of the folder with the model's config, as the launch command refers to it."""
RANK = "bridge.cli.move"
RUNNING = "transformers"
"""Parameter naming that a running model of transformers uses."""
LARGE = 2**26
"""Number of weight elements above which a proof runs only the first layers."""
SEQUENCE = 32
"""Largest number of tokens of one sample in a proof."""


@dataclass(frozen=True)
class MoveOptions:
    """The options of `move`.

    `prove` is the number of steps of the proof, and `ranks` the largest number of its local ranks.
    Models of more than `most` elements run with their first layers only.
    """

    checkpoint: Path
    to: str
    output: Path
    to_version: str | None = None
    from_: str | None = None
    model: Path | None = None
    prove: int | None = None
    ranks: int = 2
    processes: int = 1
    dry_run: bool = False
    verify: bool = True
    most: int = LARGE


@dataclass(frozen=True)
class MoveSource:
    """The run that is moved: its config, and its checkpoint with format and path."""

    config: Config
    hub: Hub
    format: Format
    place: Path


@dataclass(frozen=True)
class MoveTarget:
    """The run after the move: its checkpoint with renamed parameters, its config and files, and the
    checkpoint format of its stack.

    `result` is the translation, or None without a translation. `edits` are config settings that the
    checkpoint needs. `groups` are the optimizer's groups, if the run reads them from a separate
    file.
    """

    hub: Hub
    config: Config
    written: Written
    texts: Mapping[str, str]
    saves: Saves
    result: Result | None
    edits: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[Row, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the translation, or the findings on the config if there is no translation."""
        return (
            *(as_json.remarks_of(self.result) if self.result else as_json.all_of(self.config)),
            *self.saves.findings,
        )


@dataclass(frozen=True)
class Moved:
    """A run that was moved: its job, both sides, the files of the checkpoint, and what the report says.
    `parties` is the input of the proof, if there is to be one.
    """

    job: Job
    source: MoveSource
    target: MoveTarget
    files: Files
    findings: tuple[Finding, ...]
    parties: Proof | None
    said: str


def move(job: Job, options: MoveOptions) -> int:
    """Move one run. Returns the exit code."""

    def work() -> int:
        need_engine("move")
        with end_orderly():
            return _move_run(job, options)

    return answer_job(job, work)


def _move_run(job: Job, options: MoveOptions) -> int:
    # The proof trains, so only what comes before it has limits.
    with read_within_limits():
        moved = _write_run(job, options)
    try:
        found = (
            _prove_move(moved.job, options, moved.source, moved.parties) if moved.parties else None
        )
    except BridgeError as error:
        kept = f"{options.output} is written whole, and only its proof failed"
        raise BridgeError(*(f"{problem}; {kept}" for problem in error.problems)) from None
    code = as_json.exit_of(moved.findings, job.threshold)
    if found and code is not Exit.ERROR and found["verdict"] != "same":
        code = Exit.FINDINGS if found["verdict"] == "differs" else Exit.UNPROVED
    if job.json:
        parts = (moved.source, moved.target, moved.files, moved.findings)
        print_json(_report_object(*parts, found, options, code))
    else:
        content(moved.said)
        content("".join(f"{line}\n" for line in _proof_lines(found)) if found else "")
    return code


def _write_run(job: Job, options: MoveOptions) -> Moved:
    """Translate a run and write it, unless it is a dry run."""
    if options.dry_run and options.prove:
        raise BridgeError(
            "--prove: found with --dry-run, which writes nothing to prove; drop one of them"
        )
    source, job = _read_source(job, options)
    target = _make_target(job, options, source)
    hub = _count_samples(target.hub, source, target)
    if target.written.beside and "step" not in hub.client:
        # The training scripts that we write ask the client's state of the checkpoint for the step.
        hub = replace(
            hub, client={**hub.client, "step": (hub.where.steps or 0) + (hub.where.skipped or 0)}
        )
    format = formats.format_of_name(target.saves.format)
    wanted = interface.Wanted(target.saves.dtype, target.saves.ranks, target.saves.level)
    files = formats.plan_files(format, hub, wanted)
    odd = tuple(_find_other_settings(source))
    findings = (*target.findings, *hub.findings, *files.findings, *odd)
    # Before anything is written: a proof that cannot run is refused with the folder still empty.
    parties = _proof_parties(job, options, source, target) if options.prove else None
    said = _report_text(
        source, target, replace(files, findings=(*files.findings, *odd)), findings, options
    )
    # One set of files, renamed as one: a move that was killed leaves no config beside half a checkpoint.
    whole = _gather_files(target, files, said)
    if not options.dry_run:
        _write_move(whole, job, options, source)
    return Moved(job, source, target, files, findings, parties, said)


# Reading


def _read_source(job: Job, options: MoveOptions) -> tuple[MoveSource, Job]:
    """Return the config and the checkpoint, and the job for reading the config.

    If nothing else sets the number of ranks, the job uses the number that saved the checkpoint.
    """
    BridgeError.raise_if(find_output_inside(options.output, options.checkpoint))
    format, place = formats.find_checkpoint(options.checkpoint, options.from_)
    verified = options.verify and not options.dry_run
    if verified:
        formats.verify_checkpoint(format, place)
    hub = formats.read_at(format, place)
    hub = formats.add_doubts(format, place, hub) if verified else hub
    config = read_job(job)
    saved = hub.origin.world
    if config.world_size is None and saved:
        note(
            f"note: read for {saved} ranks, the number in the checkpoint; --world-size N changes that"
        )
        job = replace(job, world_size=saved)
        config = read_job(job)
    spared = side_of(config.dialect).spared
    if spared and _spares_norms(config, hub):
        note(
            f"note: read with --code {spared[0]}, as the checkpoint excludes biases and norms from weight decay"
        )
        job = replace(job, code=(*job.code, *spared))
        config = read_job(job)
    return MoveSource(config, hub, format, place), job


def _spares_norms(config: Config, hub: Hub) -> bool:
    """Return whether the checkpoint's groups exclude biases and norms from weight decay while the config does not."""
    scope = lift(config).optimizer.decay_scope
    return scope is not None and scope != SPARED and fits_config(hub)


def _make_target(job: Job, options: MoveOptions, source: MoveSource) -> MoveTarget:
    """Return the config for the target's stack, with all files that accompany it."""
    if options.to == NATIVE:
        return _keep_config(job, source, options)
    dialect = registry.load(options.to)
    side = side_of(dialect)
    result = _translate_config(job, options)
    brought = RUNNING if options.model else "huggingface"
    usual = side.parameter_names(result.config) or brought
    hub = _fit_names(source, result.config, usual, options.model)
    hub = _apply_scheduled_decay(hub, source.config)
    if side.by_place and hub.parameters is not source.hub.parameters:
        hub = _place_groups(hub)
    groups = _groups_to_write(hub, result.config, side.scoped) if side.grouping else ()
    saves = side.saves(result.config, hub)
    hub = replace(
        hub,
        client={**saves.client, **hub.client},
        config=hub.config if saves.config is None else saves.config,
    )
    hub = _apply_schedule(hub, result.config, saves.schedule)
    wanted = {
        **saves.instead,
        **side.loads[saves.format],
        **(side.settings_for_groups(FILE) if groups else {}),
    }
    # Only what the stack would not do by itself has to stand in the config.
    edits = {
        path: value for path, value in wanted.items() if result.config.effective.get(path) != value
    }
    result = replace(result, config=without(result.config, edits)) if edits else result
    name = Path(dialect.render(result.config).file).name
    written = write_in_format(result, options.output / name)
    if options.model is not None and not dialect.model:
        written, result = _write_program(written, result, options.model)
    written = side.resume_from(written, CHECKPOINT, FILE if groups else "")
    result = replace(result, put=written)
    texts = {
        path.name: text
        for path, text in files_to_write(result, options.output / name, True).items()
    }
    return MoveTarget(
        hub, result.config, written, {**texts, **_file_of(groups)}, saves, result, edits, groups
    )


def _fit_names(source: MoveSource, target: Config, usual: str | None, model: Path | None) -> Hub:
    """Return the checkpoint with the parameter names that the target uses. Raises `SourceError` if the model of
    the folder `model` is another one.
    """
    # What the translation loses, it has named.
    configs = [
        ("the config", describe_config(source.config)),
        ("the translated config", replace(describe_config(target), settings=None)),
    ]
    if model is not None:
        configs.append((str(model / CONFIG), describe_config(_model_config(model))))
    return rename_under(source.hub, None, usual, configs)


def _groups_to_write(hub: Hub, config: Config, scoped: bool = True) -> tuple[Row, ...]:
    """Return the optimizer groups of the checkpoint if a run of `config` would form other groups; else an empty tuple.

    `scoped`: the run itself excludes from weight decay the parameters that the config names.
    """
    optimizer = lift(config).optimizer
    needed = groups.needs_group_file(
        hub, optimizer.decay_scope if scoped else None, side_of(config.dialect).by_place
    )
    return groups.groups_to_write(hub, optimizer) if needed else ()


def _file_of(groups: tuple[Row, ...]) -> dict[str, str]:
    return {FILE: text_of(groups)} if groups else {}


def _apply_scheduled_decay(hub: Hub, config: Config) -> Hub:
    """Return the checkpoint with the weight decay that a run of `config` sets in every step, if its stack sets one
    (Megatron-Core optimizer_param_scheduler.py: step).
    """
    decay = lift(config).optimizer.weight_decay
    if DECAY not in side_of(config.dialect).scheduled or decay is None:
        return hub
    groups = (
        replace(group, settings={**group.settings, DECAY: decay * group.settings.get("wd_mult", 1)})
        if effective_setting(group, DECAY)
        else group
        for group in hub.groups
    )
    return replace(hub, groups=tuple(groups))


def _place_groups(hub: Hub) -> Hub:
    """Return the checkpoint with its groups in the order of the code that a config asks for: what decays comes first."""
    rows = [
        replace(group, settings={**group.settings, DECAY: effective_setting(group, DECAY)})
        for group in hub.groups
        if group.names
    ]
    return replace(hub, groups=tuple(sorted(rows, key=lambda row: row.settings[DECAY] == 0)))


def _apply_schedule(hub: Hub, config: Config, schedule: Mapping[str, Any] | None) -> Hub:
    """Return the checkpoint with the state of the scheduler, and with the next step's learning rate in the groups."""
    optimizer = lift(config).optimizer
    if schedule is None or optimizer.lr is None:
        return hub
    if not schedule:
        return replace(hub, settings={}, schedule=schedule)
    # The stack takes the rate from the file until its scheduler first steps, so it is that of the next step.
    rate = learning_rate(optimizer.lr, optimizer.schedule, hub.where.steps or 0)
    parts = zip(hub.groups, rate_ratios(hub, optimizer), strict=True)
    groups = tuple(
        replace(group, settings={**group.settings, "lr": rate * ratio}) for group, ratio in parts
    )
    return replace(hub, groups=groups, settings={} if groups else {"lr": rate}, schedule=schedule)


def _count_samples(hub: Hub, source: MoveSource, target: MoveTarget) -> Hub:
    """Return the checkpoint with the number of samples seen, computed from the steps, if the target's schedule counts samples."""
    where, each = hub.where, lift(source.config).batch.global_
    if not target.saves.samples or where.samples is not None or where.steps is None or each is None:
        return hub
    return replace(hub, where=replace(where, samples=each * (where.steps + (where.skipped or 0))))


def _translate_config(job: Job, options: MoveOptions) -> Result:
    """Translate the config.

    If the target's config states a model and the source's does not, the model of `--model` is
    added.
    """
    result = _translate_source(job, options)
    if options.model is None or result.source.dialect.model or not result.config.dialect.model:
        return result
    return replace(result, config=_apply_model(result.config, options.model))


@stay_within_limits()
def _translate_source(job: Job, options: MoveOptions) -> Result:
    target = registry.load(options.to)
    with lock_job(job):
        beside = sidecar_of(job)
        if said := beside.note(job.file, target):
            note(said)
        return translate_job(job, target, options.to_version, beside)


def _model_config(folder: Path) -> Config:
    return read_job(Job(str(folder / CONFIG)))


def _apply_model(config: Config, folder: Path) -> Config:
    """Return the config with the model of a folder."""
    model = {
        path: value
        for path, value in lift(_model_config(folder)).values().items()
        if path.startswith("model.")
    }
    return edit_config(config, model, config.world_size)


def _write_program(written: Written, result: Result, folder: Path) -> tuple[Written, Result]:
    """Return the target with a complete training script for the model of a folder, and the
    translation with the settings that the script still lacks.
    """
    model = _model_config(folder)
    plan = {**result.plan.values(), **lift(model).values()}
    plan.pop("model.embedding.padded_vocab", None)  # the checkpoint has the rows of words alone
    program = result.config.dialect.program(written, result.config, plan, model)
    return program.written, replace(result, lacking=program.lacking)


def _keep_config(job: Job, source: MoveSource, options: MoveOptions) -> MoveTarget:
    """Return the target for the native engine, which reads the config unchanged.

    A launch script is rewritten as a self-contained file of its stack.
    """
    config, dialect = source.config, source.config.dialect
    side = side_of(dialect)
    usual = RUNNING if options.model else side.native_parameters
    hub = _fit_names(source, config, usual, options.model)
    groups = _groups_to_write(hub, config)
    edits = dict(side.settings_for_groups(FILE)) if groups else {}
    config = without(config, edits) if edits else config
    rendered = dialect.render(config)
    script = isinstance(document_of(job).data, Script)
    name = Path(rendered.file if script or job.file == STDIN else job.file).name
    written = rendered.under_name(name)
    if not script and job.file != STDIN:
        written = replace(written, text=read_text(job.file))
    model = MODEL if options.model else "file" if side.native_parameters else ""
    before, written = (
        written,
        side.run_natively(
            written, config.world_size or 1, CHECKPOINT, FILE if groups else "", model
        ),
    )
    texts = {path.name: text for path, text in dialect.files(written, Path(name)).items()}
    described: dict[str, str] = {}
    if options.model and MODEL in written.launch and MODEL not in before.launch:
        described[f"{MODEL}/{CONFIG}"] = read_text(options.model / CONFIG)
    return MoveTarget(
        hub,
        config,
        written,
        {**texts, **described, **_file_of(groups)},
        Saves(NATIVE),
        None,
        edits,
        groups,
    )


def _find_other_settings(source: MoveSource) -> Iterator[Finding]:
    """Yield findings on optimizer settings that differ between config and checkpoint.

    A resumed run uses the value of the checkpoint.
    """
    optimizer = lift(source.config).optimizer
    # Under a schedule the checkpoint has the rate of its step, and the config that of the peak: both may be right.
    steered = optimizer.schedule.name not in (None, "constant") or optimizer.schedule.warmup_steps
    names = ("betas", "eps", "weight_decay", *(() if steered else ("lr",)))
    for name in (name for name in names if name not in side_of(source.config.dialect).scheduled):
        said = getattr(optimizer, name)
        wanted = list(said) if isinstance(said, tuple) else said
        held = [group.settings[name] for group in source.hub.groups if name in group.settings]
        if wanted is not None and held and wanted not in held:
            # Groups that are spared weight decay have 0 there, whatever the config says.
            other = next(filter(None, held), held[0])
            message = (
                f"{show_value(wanted)} in the config, {show_value(other)} in the checkpoint; a "
                "resumed run uses the value in the checkpoint"
            )
            yield Finding(f"optimizer.{name}", message, Effect.NUMBERS, before=wanted, after=other)


# Writing


def _gather_files(target: MoveTarget, files: Files, said: str) -> Files:
    """Return all files of the move: the checkpoint in a folder of its own, and next to that folder
    the config, the launch script and the report.
    """
    texts = {**target.texts, LAUNCH: _launch_text(target), REPORT: said}
    small = tuple(File(name, (text.encode(),)) for name, text in texts.items())
    moved = tuple(replace(file, name=f"{CHECKPOINT}/{file.name}") for file in files.files)
    return replace(files, files=(*moved, *small), sums=f"{CHECKPOINT}/{files.sums}")


def _launch_text(target: MoveTarget) -> str:
    """Return a shell script that starts the run from the checkpoint.

    If the run also needs lines in the user's training script, comments show these lines.
    """
    written = target.written
    lines = ["#!/bin/sh", f"# Resumes from the checkpoint in {CHECKPOINT}/."]
    if written.snippet:
        lines += [
            "# Put these lines into your training script:",
            *(f"#   {line}" for line in written.snippet.splitlines()),
        ]
    lines += ["set -e", 'cd "$(dirname "$0")"']
    lines += [f"export {name}={quote(value)}" for name, value in written.environment.items()]
    return "\n".join(
        (
            *lines,
            launch_command.line(written.command) or "# No command can start the run as it is.",
            "",
        )
    )


def _write_move(whole: Files, job: Job, options: MoveOptions, source: MoveSource) -> None:
    progress = Progress(sum(file.size for file in whole.files))
    config = [] if job.file == STDIN else [job.file]
    private: list[str | Path] = [options.checkpoint, *source.hub.origin.files, *config]
    with as_private_as(*private):
        write_checkpoint(
            whole, options.output, source.hub.origin.files, progress.add_bytes, options.processes
        )


# Reporting


def _lost_settings_line(findings: tuple[Finding, ...]) -> str:
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


def _report_text(
    source: MoveSource,
    target: MoveTarget,
    files: Files,
    findings: tuple[Finding, ...],
    options: MoveOptions,
) -> str:
    out = StringIO()
    screen = console(out)
    screen.print(clean(_lost_settings_line(findings)), markup=False, soft_wrap=True)
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
    start = quote(f"{options.output.name}/{LAUNCH}")
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


def _report_object(
    source: MoveSource,
    target: MoveTarget,
    files: Files,
    findings: tuple[Finding, ...],
    found: json_types.Proved | None,
    options: MoveOptions,
    code: Exit,
) -> json_types.Moved:
    return {
        "output": str(options.output),
        "written": not options.dry_run,
        "taken_away": _lost_settings_line(findings),
        "source": {
            "dialect": source.config.dialect.name,
            "format": source.hub.origin.format,
            "steps": source.hub.where.steps,
        },
        "target": {
            "stack": options.to,
            "format": target.saves.format,
            "config": target.written.file,
        },
        "launch": list(target.written.command),
        "files": [
            {"name": f"{CHECKPOINT}/{file.name}", "bytes": file.size} for file in files.files
        ],
        "findings": [as_json.finding_json(finding) for finding in findings],
        "proof": found,
        "exit_code": code,
    }


VERDICTS = {
    "same": "Proved: the same run",
    "differs": "Not the same run",
    "in part": "Proved in part",
    "not run": "Nothing proved",
}


def _proof_lines(found: Mapping[str, Any]) -> Iterator[str]:
    lacking = "; ".join((*found["lacking"], *([found["cause"]] if found["cause"] else [])))
    yield f"{VERDICTS[found['verdict']]}{f': {lacking}' if lacking else ''}."
    for run in found["runs"]:
        if run["problem"]:
            yield f"  {run['side']} on {run['engine']}: {run['problem']}"
        else:
            losses = ", ".join(f"{float(loss):.6f}" for loss in run["losses"])
            yield f"  {run['side']} on {run['engine']}, from step {run['first']}: losses {losses}"
    if found["distance"]:
        gap = found["distance"]
        loss, norm, update = (
            None if gap[name] is None else f"{float(gap[name]):.1e}"
            for name in ("loss", "norm", "update")
        )
        norms = f", gradient norms {norm}" if norm else ""
        yield f"  largest differences: losses {loss}{norms}, updates {update} ({found['ranks']} ranks)"


# Proving


@dataclass(frozen=True)
class Proof:
    """The input of a proof apart from the two configs.

    `layers` is None for all layers, `lacking` are the reasons why the proof is partial, `edits` are
    config settings for the target's checkpoint, and `groups` the optimizer's groups by side.
    """

    source: Backend
    target: Backend
    world: int
    layers: int | None
    model: Mapping[str, Any]
    lacking: tuple[str, ...]
    edits: Mapping[str, Any]
    groups: Mapping[str, tuple[Row, ...]]


def _proof_parties(job: Job, options: MoveOptions, source: MoveSource, target: MoveTarget) -> Proof:
    """Return the input of the proof: engines, ranks and model.

    Raises `BridgeError`, before anything is written, if the proof cannot run.
    """
    from bridge.verify.proof import WEIGHTLESS

    if source.format.name in WEIGHTLESS:
        raise BridgeError(
            f"--prove: {source.format.title} holds only weights, so that no run can resume from "
            "it; drop --prove"
        )
    one = _engine_for_format(source.config, source.format.name)
    other = _engine_for_format(
        target.config, NATIVE if options.to == NATIVE else target.saves.format
    )
    if options.model is None:
        raise BridgeError(
            "--prove: the model is not known; name the folder of its config.json with --model"
        )
    given = json.loads(read_text(options.model / "config.json"))
    layers = _layers_for_proof(source.hub, options.most)
    model, dropped = smaller_model.without_dropout(
        smaller_model.config_with_layers(given, layers) if layers else given
    )
    # Under the names that transformers gives the parameters of the model, which `_check_alike` compares by.
    described = model_facts.describe_config(_model_config(options.model))
    hub = model_facts.rename_under(source.hub, None, RUNNING, [(str(options.model), described)])
    running = smaller_model.cut_layers(hub, layers) if layers else hub
    _check_alike(running, model)
    # No more ranks than the run had, unless an engine needs them.
    saved = max(source.hub.origin.world or 1, source.config.world_size or 1)
    world = max(one.least, other.least, min(options.ranks, saved))
    cut = [f"only the first {layers} layers ran"] if layers else []
    lacking = (*cut, *(f"taken out: {name}" for name in dropped))
    told = {
        "source": _groups_to_write(running, source.config),
        "target": tuple(_groups_within(target.groups, running)),
    }
    return Proof(one, other, world, layers, model, lacking, target.edits, told)


def _groups_within(groups: tuple[Row, ...], hub: Hub) -> Iterator[Row]:
    """Yield the groups, reduced to parameters that `hub` has. Empty groups are left out."""
    for row in groups:
        names = [name for name in row["params"] if name in hub.parameters]
        if names:
            yield {**row, "params": names}


def _engine_for_format(config: Config, format: str) -> Backend:
    """Return the engine that can resume from a checkpoint of `format` with `config`."""
    name = config.dialect.name
    backend = backends(name).get(name)
    if format == NATIVE:
        return (backend.inside if backend else None) or BACKEND
    if format not in side_of(config.dialect).loads or backend is None:
        known = ", ".join((NATIVE, *side_of(config.dialect).loads))
        raise BridgeError(
            f"--prove: {config.dialect.title} resumes from {known}, but the checkpoint is "
            f"{format}; drop --prove"
        )
    if backend.release is None:
        raise BridgeError(
            f"--prove: {backend.title} is not installed here; install it, or drop --prove"
        )
    return backend


def _layers_for_proof(hub: Hub, most: int) -> int | None:
    """Return the number of layers to run of a model that is too large for this machine; None: all layers."""
    count = max(smaller_model.layers_of(hub).values(), default=0)
    if smaller_model.count_elements(hub) <= most or count < 2:
        return None
    return max(
        (number for number in range(1, count) if smaller_model.count_elements(hub, number) <= most),
        default=1,
    )


def _check_alike(hub: Hub, model: Mapping[str, Any]) -> None:
    """Raise `SourceError` unless the model has exactly the parameters of the checkpoint, because
    engines may identify parameters by index alone.
    """
    import torch

    from bridge.engine.models.pretrained import open_model

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        # On the meta device a model has shapes and no memory, so that a large one can be held too.
        with torch.device("meta"):
            known = {
                name: tuple(weight.shape)
                for name, weight in open_model(Path(folder), 0).named_parameters()
            }
    found = {name: held.weight.shape for name, held in hub.parameters.items()}
    names = [name for name in dict.fromkeys((*known, *found)) if known.get(name) != found.get(name)]
    SourceError.raise_if(
        f"--model: {name}: {known.get(name, 'missing')} in this model, {found.get(name, 'missing')} "
        "in the checkpoint; name the model of the checkpoint"
        for name in names[:5]
    )


def _prove_move(
    job: Job, options: MoveOptions, source: MoveSource, proof: Proof
) -> json_types.Proved:
    """Run both sides on ranks of this machine.

    Returns the proof and writes it into the output folder.
    """
    with tempfile.TemporaryDirectory() as folder, as_private_as(folder):
        top = Path(folder)
        (top / "model").mkdir()
        (top / "model" / "config.json").write_text(json.dumps(proof.model))
        starts = _proof_starts(top, options, source, proof)
        spec = {
            "job": asdict(job),
            "options": {
                **asdict(options),
                **{name: str(getattr(options, name)) for name in ("checkpoint", "output", "model")},
            },
            "world": proof.world,
            "formats": {"source": source.format.name, "target": starts.pop("format")},
            "edits": dict(proof.edits),
            "groups": proof.groups,
            "starts": {name: str(path) for name, path in starts.items()},
            "model": str(top / "model"),
        }
        found: dict[str, Any] = {}
        telling = None if job.json else ProgressPrinter()
        # Stacks print to stdout too: only marked lines are ours.
        for line in run_ranks(proof.world, RANK, json.dumps(spec, default=str)):
            said = json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else {}
            if telling:
                telling.hear(said)
            found = said.get("found", found)
    if "problems" in found:
        raise BridgeError(*found["problems"])
    lacking = [*proof.lacking, *found.pop("changed")]
    # The same run of a model that was cut proves nothing about the layers that were left out.
    verdict = "in part" if found["verdict"] == "same" and proof.lacking else found["verdict"]
    told = cast(
        json_types.Proved, {**found, "verdict": verdict, "lacking": lacking, "ranks": proof.world}
    )
    with as_private_as(options.checkpoint):
        (options.output / PROOF).write_text(json.dumps(told, indent=1) + "\n")
    return told


def _proof_starts(
    top: Path, options: MoveOptions, source: MoveSource, proof: Proof
) -> dict[str, Any]:
    """Return, for each side of the proof, the checkpoint from which its run starts.

    The checkpoint on disk is used if the ranks of the proof can read it; else a new one is written.
    """
    format, place = formats.find_checkpoint(options.output / CHECKPOINT)
    target = formats.read_at(format, place)
    sides = {
        "source": (source.hub, source.format, source.place, proof.source),
        "target": (target, format, place, proof.target),
    }
    found: dict[str, Any] = {"format": format.name}
    for side, (hub, form, where, backend) in sides.items():
        held = backend.as_loaded(
            smaller_model.cut_layers(hub, proof.layers) if proof.layers else hub
        )
        layout = hub.origin.layout
        # Some formats can be read only by as many ranks as wrote them.
        fits = not form.fixed or layout.get("ranks") == hub.origin.world == proof.world
        found[side] = (
            where
            if held is hub and fits
            else _write_checkpoint(top / side, held, form, proof.world)
        )
    # A third run in fp32, from the same masters, tells how far rounding alone takes the losses.
    if source.hub.weight_dtype in ("BF16", "F16"):
        held = proof.source.as_loaded(
            smaller_model.cut_layers(source.hub, proof.layers) if proof.layers else source.hub
        )
        found["wider"] = _write_checkpoint(
            top / "wider", replace(held, scale=None), source.format, proof.world, "F32"
        )
    return found


def _write_checkpoint(
    folder: Path, hub: Hub, format: Format, world: int, dtype: str | None = None
) -> Path:
    """Write a checkpoint for the proof. Returns the tag folder inside `folder`."""
    files = formats.plan_files(
        format, hub, interface.Wanted(dtype, world, hub.origin.layout.get("zero"))
    )
    write_checkpoint(files, folder, hub.origin.files, lambda count, fresh: None)
    return formats.find_checkpoint(folder, format.name)[1]


# On a rank


def main(text: str) -> None:
    """Prove a move on one rank. The first rank prints progress and result."""
    spec, rank, out = json.loads(text), detect(), sys.stdout

    def tell(**words: Any) -> None:
        if rank.rank == 0:
            print(MARK + json.dumps(words, allow_nan=False), file=out, flush=True)

    with redirect_stdout(sys.stderr):
        with listening(lambda done, total: tell(at=[done, total])):
            found = _on_rank(spec, lambda line: tell(note=line))
        tell(found=found)
    end_process(rank.world)


def warm(text: str) -> None:
    """Load the engines before ranks are forked."""
    spec = json.loads(text)
    load_engines(
        {
            name
            for name in (spec["options"]["to"], spec["job"]["dialect"])
            if name and name != NATIVE
        }
    )


def _on_rank(spec: Mapping[str, Any], note: Any) -> dict[str, Any]:
    from bridge.engine.joining import join
    from bridge.verify.proof import Party, prove, small

    here, job = detect(), Job(**spec["job"])
    join(here)
    options = MoveOptions(
        **{
            **spec["options"],
            **{name: Path(spec["options"][name]) for name in ("checkpoint", "output", "model")},
        }
    )
    try:
        with limit_access(job):
            source = read_job(job)
            target = (
                source
                if options.to == NATIVE
                else without(_translate_config(job, options).config, spec["edits"])
            )
        folder = Path(spec["model"])
        described = _model_config(folder)
        model = lift(described).model
        found, changed = {}, dict[str, Any]()
        for side, config in {"source": source, "target": target}.items():
            format = spec["formats"][side]
            backend = _engine_for_format(config, format).following(config)
            smaller, differs = small(config, backend, spec["world"], model.layers)
            smaller = without(smaller, dict(side_of(config.dialect).loads.get(format, {})))
            changed |= differs
            found[side] = Party(
                side, smaller, backend, Path(spec["starts"][side]), tuple(spec["groups"][side])
            )
        wider = _widen_source(found["source"], spec)
        shape = json.loads((folder / "config.json").read_text())
        # A learned embedding of positions has no row beyond these.
        most = next(
            (shape[name] for name in POSITIONS if isinstance(shape.get(name), int)), SEQUENCE
        )
        workload = Workload(
            Architecture(vocab=shape["vocab_size"], sequence=min(SEQUENCE, most)),
            model=model,
            folder=folder,
        )
        facts = model_facts.describe_config(described)
        proved = prove(
            found["source"], found["target"], wider, workload, facts, options.prove or 1, note
        )
        told = {
            path: pair
            for path, pair in changed.items()
            if not path.startswith((*NO_NUMBERS, "parallel.data", "model."))
        }
        words = [f"{path} {before} -> {after}" for path, (before, after) in told.items()]
        return {
            **proved,
            "changed": [f"changed for the proof: {', '.join(words)}"] if words else [],
        }
    except BridgeError as error:
        return {"problems": list(error.problems)}


POSITIONS = ("max_position_embeddings", "n_positions")


def _widen_source(source: Any, spec: Mapping[str, Any]) -> Any:
    """Return the source side with computation in fp32, from the same master weights; None if the
    source computes in fp32 already, or if the stack of the source cannot.
    """
    if "wider" not in spec["starts"]:
        return None
    try:
        config = source.backend.edit_config(
            source.config, {"precision.compute": "fp32"}, spec["world"]
        )
    except BridgeError:
        return None
    return replace(
        source, side="source in fp32", config=config, start=Path(spec["starts"]["wider"])
    )


if __name__ == "__main__":
    main(sys.argv[1])
