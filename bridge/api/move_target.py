"""The run that is moved, and the run after the move: configs, checkpoint, parameter names, groups and schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from shlex import quote
from typing import Any

from bridge.api.convert import (
    files_to_write,
    lock_source,
    sidecar_of,
    translate_source,
    write_in_format,
)
from bridge.api.read import CONFIG, document_of, read_config
from bridge.api.source import STDIN, Source
from bridge.checkpoint import formats, groups
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
from bridge.checkpoint.writing import find_output_inside
from bridge.engine.learning_rate import learning_rate
from bridge.errors import BridgeError
from bridge.files import Script, read_text
from bridge.files.notes import note
from bridge.files.printable import clean
from bridge.files.shown import show_value
from bridge.report import as_json, as_text
from bridge.report.console import console
from bridge.stack import registry
from bridge.stack.checkpoint_side import Saves, side_of
from bridge.stack.dialect import Config, Written
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect, How
from bridge.translation.edit import edit_config, without
from bridge.translation.lift import lift
from bridge.translation.translate import Result

NATIVE = "native"
CHECKPOINT, LAUNCH, REPORT, PROOF = "checkpoint", "launch.sh", "report.txt", "proof.json"
"""Names of the files that `move` writes into the folder of the config."""
FILE = "parameter_groups.json"
MODEL = "model"
"""Name of the folder with the model's config, as the launch command refers to it."""
RUNNING = "transformers"
"""Parameter naming that a running model of transformers uses."""
LARGE = 2**26
"""Number of weight elements above which a proof runs only the first layers."""


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


def read_move_source(run: Source, options: MoveOptions) -> tuple[MoveSource, Source]:
    """Return the config and the checkpoint, and the run for reading the config.

    If nothing else sets the number of ranks, the run uses the number that saved the checkpoint.
    """
    BridgeError.raise_if(find_output_inside(options.output, options.checkpoint))
    format, place = formats.find_checkpoint(options.checkpoint, options.from_)
    verified = options.verify and not options.dry_run
    if verified:
        formats.verify_checkpoint(format, place)
    hub = formats.read_at(format, place)
    hub = formats.add_doubts(format, place, hub) if verified else hub
    config = read_config(run)
    saved = hub.origin.world
    if config.world_size is None and saved:
        note(
            f"note: read for {saved} ranks, the number in the checkpoint; --world-size N changes that"
        )
        run = replace(run, world_size=saved)
        config = read_config(run)
    spared = side_of(config.dialect).spared
    if spared and _spares_norms(config, hub):
        note(
            f"note: read with --code {spared[0]}, as the checkpoint excludes biases and norms from weight decay"
        )
        run = replace(run, code=(*run.code, *spared))
        config = read_config(run)
    return MoveSource(config, hub, format, place), run


def _spares_norms(config: Config, hub: Hub) -> bool:
    """Return whether the checkpoint's groups exclude biases and norms from weight decay while the config does not."""
    scope = lift(config).optimizer.decay_scope
    return scope is not None and scope != SPARED and fits_config(hub)


def make_target(run: Source, options: MoveOptions, source: MoveSource) -> MoveTarget:
    """Return the config for the target's stack, with all files that accompany it."""
    if options.to == NATIVE:
        return _keep_config(run, source, options)
    dialect = registry.load(options.to)
    side = side_of(dialect)
    result = translate_config(run, options)
    brought = RUNNING if options.model else "huggingface"
    usual = side.parameter_names(result.config) or brought
    hub = _fit_names(source, result.config, usual, options.model)
    hub = _apply_scheduled_decay(hub, source.config)
    if side.by_place and hub.parameters is not source.hub.parameters:
        hub = _place_groups(hub)
    groups = groups_of_run(hub, result.config, side.scoped) if side.grouping else ()
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
        configs.append((str(model / CONFIG), describe_config(model_config(model))))
    return rename_under(source.hub, None, usual, configs)


def groups_of_run(hub: Hub, config: Config, scoped: bool = True) -> tuple[Row, ...]:
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


def count_samples(hub: Hub, source: MoveSource, target: MoveTarget) -> Hub:
    """Return the checkpoint with the number of samples seen, computed from the steps, if the target's schedule counts samples."""
    where, each = hub.where, lift(source.config).batch.global_
    if not target.saves.samples or where.samples is not None or where.steps is None or each is None:
        return hub
    return replace(hub, where=replace(where, samples=each * (where.steps + (where.skipped or 0))))


def translate_config(run: Source, options: MoveOptions) -> Result:
    """Translate the config.

    If the target's config states a model and the source's does not, the model of `--model` is
    added.
    """
    result = _translate_source(run, options)
    if options.model is None or result.source.dialect.model or not result.config.dialect.model:
        return result
    return replace(result, config=_apply_model(result.config, options.model))


def _translate_source(run: Source, options: MoveOptions) -> Result:
    target = registry.load(options.to)
    with lock_source(run):
        beside = sidecar_of(run)
        if said := beside.note(run.file, target):
            note(said)
        return translate_source(run, target, options.to_version, beside)


def model_config(folder: Path) -> Config:
    return read_config(Source(str(folder / CONFIG)))


def _apply_model(config: Config, folder: Path) -> Config:
    """Return the config with the model of a folder."""
    model = {
        path: value
        for path, value in lift(model_config(folder)).values().items()
        if path.startswith("model.")
    }
    return edit_config(config, model, config.world_size)


def _write_program(written: Written, result: Result, folder: Path) -> tuple[Written, Result]:
    """Return the target with a complete training script for the model of a folder, and the
    translation with the settings that the script still lacks.
    """
    model = model_config(folder)
    plan = {**result.plan.values(), **lift(model).values()}
    plan.pop("model.embedding.padded_vocab", None)  # the checkpoint has the rows of words alone
    program = result.config.dialect.program(written, result.config, plan, model)
    return program.written, replace(result, lacking=program.lacking)


def _keep_config(run: Source, source: MoveSource, options: MoveOptions) -> MoveTarget:
    """Return the target for the native engine, which reads the config unchanged.

    A launch script is rewritten as a self-contained file of its stack.
    """
    config, dialect = source.config, source.config.dialect
    side = side_of(dialect)
    usual = RUNNING if options.model else side.native_parameters
    hub = _fit_names(source, config, usual, options.model)
    groups = groups_of_run(hub, config)
    edits = dict(side.settings_for_groups(FILE)) if groups else {}
    config = without(config, edits) if edits else config
    rendered = dialect.render(config)
    script = isinstance(document_of(run).data, Script)
    name = Path(rendered.file if script or run.file == STDIN else run.file).name
    written = rendered.under_name(name)
    if not script and run.file != STDIN:
        written = replace(written, text=read_text(run.file))
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


def find_other_settings(source: MoveSource) -> Iterator[Finding]:
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
