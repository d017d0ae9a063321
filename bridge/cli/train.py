"""The `train` command: read a config of any stack, and run its plan on the native engine or on a
stack's own.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.api.access import limit_access
from bridge.api.read import is_folder, model_in, read_config
from bridge.cli.job import Job
from bridge.cli.terminal import note, print_json, say
from bridge.engine.backends import backends, opener
from bridge.engine.choose import choose
from bridge.engine.environment import detect, end_process, find_dead_ranks, neighbours
from bridge.engine.fields import check
from bridge.engine.fit import fit
from bridge.engine.interface import MICRO, Workload
from bridge.errors import BridgeError, ConfigError, nearest
from bridge.layout.architecture import Architecture
from bridge.layout.mesh import Mesh
from bridge.plan.model import Model
from bridge.plan.plan import Plan
from bridge.report.exit_codes import Exit
from bridge.stack.dialect import Config
from bridge.stack.extras import need_engine
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from bridge.translation.lift import lift
from bridge.translation.translate import unheld

if TYPE_CHECKING:
    from bridge.engine.environment import Environment
    from bridge.engine.interface import Backend, Trainer
    from bridge.engine.training import Report, Training
    from bridge.trace.desync import Policy
    from bridge.trace.tracer import Tracer


@dataclass(frozen=True)
class Watch:
    """The options for logging a run and for comparing its ranks.

    The log goes to `folder`; with `full` it contains whole tensors. Tensors that must be equal on
    several ranks are compared in each step that `every` divides. `desync` is the action if they
    differ.
    """

    folder: Path | None = None
    full: bool = False
    desync: str | None = None
    every: int = 1

    def add_to_plan(self, plan: Plan) -> Plan:
        """Return `plan` with the logs and checks that the options ask for.

        Log levels that the plan sets itself stay.
        """
        values = plan.values()
        levels = (
            {}
            if any(f"debug.{name}" in values for name in LEVELS) or not self.folder
            else dict.fromkeys(LEVELS, LEVEL)
        )
        checks = {"tensor_parallel": True} if self.desync else {}
        return Plan.of(
            {**values, **{f"debug.{name}": value for name, value in {**levels, **checks}.items()}}
        )

    def policy(self) -> Policy:
        """Return the policy for comparing ranks: how often, and the action if they differ."""
        from bridge.trace.desync import ACTIONS, Policy

        # Typed as one of ACTIONS, which `check_choice` has made sure of.
        action = next(name for name in ACTIONS if name == (self.desync or "log"))
        return Policy(self.every, action, folder=(self.folder or Path("trace")) / "desync")


LEVELS = ("layer_outputs", "layer_gradients", "param_init", "all_param_gradients", "param_update")
"""Kinds of logs that --trace writes if FILE sets none. LEVEL is the level of each: statistics and 64 values of a tensor."""
LEVEL = 9
NATIVE = "native"
STEPS = 20
"""Number of steps if neither the options nor FILE set it."""


@dataclass(frozen=True)
class TrainOptions:
    """The options of `train`.

    `model` is "tiny", "file" (the shape that the config states), or the folder of a Hugging Face
    model. If `model` is None, the model that the config names is trained, else the tiny one. If
    `steps` is None, a config that names data sets the number of steps; for any other config it is
    `STEPS`.
    """

    steps: int | None = None
    model: str | None = None
    data: Path | None = None
    fit: bool = False
    save: Path | None = None
    resume: Path | None = None
    groups: Path | None = None
    deterministic: bool = False
    watch: Watch = Watch()
    engine: str = NATIVE
    silence: float | None = None
    timeout: float | None = None

    @property
    def number(self) -> int:
        """The number of steps for a config that does not name a model and data."""
        return self.steps or STEPS

    @property
    def native(self) -> Iterator[str]:
        """Yield the given options that only the native engine supports."""
        options = {"--save": self.save, "--resume": self.resume}
        options["--groups"] = self.groups
        folder = {f"--model {self.model}": bool(self.model) and is_folder(self.model or "")}
        limits = {"--silence": self.silence is not None, "--timeout": self.timeout is not None}
        yield from (
            name
            for name, value in {
                **options,
                **folder,
                "--deterministic": self.deterministic,
                **limits,
            }.items()
            if value
        )


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`; else raise `BridgeError`."""
    if value not in choices:
        raise BridgeError(
            f"{option}: found {value}, expected {' or '.join(choices)}{nearest(value, choices)}"
        )
    return value


def train(job: Job, options: TrainOptions) -> int:
    """Train. Returns the exit code."""
    need_engine("train")

    here = detect()
    with limit_access(job):
        config = _read_for_ranks(job, here.world, options.fit)
        from bridge.engine import comm  # what a file is refused for is said before torch is loaded

        comm.patient(options.silence, options.timeout)
        if options.model is None and config.dialect.names_run(config):
            with _name_lost_ranks(options):
                _train_named_model(config, options, here, job)
            end_process(here.world)
            return Exit.CLEAN
        options = replace(options, model=options.model or "tiny")
        plan = lift(config)
        architecture = _architecture_of(plan, options.model)
        backend = _choose_backend(plan, options, here, architecture, job.file)
        runs = _train_natively if backend is None else partial(_train_elsewhere, backend)
        with _name_lost_ranks(options):
            runs(config, plan, architecture, options, here, job)
    end_process(here.world)
    return Exit.CLEAN


def _train_natively(
    config: Config,
    plan: Plan,
    architecture: Architecture,
    options: TrainOptions,
    here: Environment,
    job: Job,
) -> None:
    plan, changes = _fit_plan(plan, here, architecture, options.fit, job.file, check)
    training = _make_training(plan, architecture, options)
    if here.rank == 0:
        _print_findings((*_find_unheard(config), *changes, *training.engine.findings))
    _run_training(training, options.number, options, here.rank == 0, job.json)


def _train_named_model(config: Config, options: TrainOptions, here: Environment, job: Job) -> None:
    """Train the model that the config names on the data that it names."""
    extras = {"--fit": options.fit, "--data": options.data, "--groups": options.groups}
    others = {**extras, f"--engine {options.engine}": options.engine != NATIVE}
    ConfigError.raise_if(
        f"{option}: FILE names its model and its data, and is trained as it is; drop the option, or use --model tiny"
        for option, value in others.items()
        if value
    )
    watch = options.watch
    training = opener(config.dialect.name)(
        config,
        here.world,
        planned=watch.add_to_plan,
        timeout=options.timeout,
        deterministic=options.deterministic,
        trace=watch.folder,
        full=watch.full,
        policy=watch.policy(),
        alike={
            "--steps": options.steps,
            "--resume": bool(options.resume),
            "--save": bool(options.save),
        },
    )
    if options.resume:
        training.engine.load_checkpoint(options.resume)
    if here.rank == 0:
        _print_findings(training.findings)
    _run_training(training, options.steps or training.length, options, here.rank == 0, job.json)


def _choose_backend(
    plan: Plan, options: TrainOptions, here: Environment, architecture: Architecture, file: str
) -> Backend | None:
    """Return the other stack's engine that runs the plan; None for the native engine.

    A note names the engine and the reason.
    """
    if (
        check_choice("--engine", options.engine, (NATIVE, "auto", *backends(options.engine)))
        == NATIVE
    ):
        return None
    # The choice is made for the sizes that will run; what was shrunk is said once, when the engine opens.
    plan, _ = _fit_plan(plan, here, architecture, options.fit, file, _mesh_of_plan)
    name = None if options.engine == "auto" else options.engine
    choice = choose(plan, backends(options.engine), here.world, name)
    if here.rank == 0:
        note(str(choice))
    if choice.backend.name == NATIVE:
        return None
    ConfigError.raise_if(
        f"{option}: only the native engine has this option; drop it, or use --engine native"
        for option in options.native
    )
    return choice.backend


def _train_elsewhere(
    backend: Backend,
    config: Config,
    plan: Plan,
    architecture: Architecture,
    options: TrainOptions,
    here: Environment,
    job: Job,
) -> None:
    """Train on another stack's engine."""
    plan, changes = _fit_plan(plan, here, architecture, options.fit, job.file, _mesh_of_plan)
    if here.rank == 0:
        _print_findings((*_find_unheard(config), *changes))
    from bridge.engine.comm import leave

    with redirect_stdout(sys.stderr):  # stacks print what they like
        model = _named_section(plan, options)
        workload = Workload(architecture, micro=plan.batch.micro or MICRO, model=model)
        trainer = backend.open(plan, workload)
        tracer = _trace_trainer(trainer, backend.name, plan, options.watch)
        reports = _trainer_reports(trainer, architecture, options)
        for report in reports:
            if here.rank == 0:
                with redirect_stdout(sys.__stdout__):
                    (_print_report_object if job.json else _print_report)(report)
        if tracer is not None:
            tracer.remove()
        trainer.close()
    leave()


def _trace_trainer(trainer: Trainer, engine: str, plan: Plan, watch: Watch) -> Tracer | None:
    """Attach a trace to another stack's engine, if the options ask for one."""
    if not (watch.folder or watch.desync):
        return None
    from bridge.trace.attachment import attach

    source = getattr(trainer, "trace_source", None)
    if source is None:
        raise ConfigError(
            f"--trace, --desync: nothing tells a trace what the engine {engine} does; drop the option, or use --engine native"
        )
    debug, policy = watch.add_to_plan(plan).debug, watch.policy()
    return attach(source(), debug, watch.folder, full=watch.full, policy=policy)


def _trainer_reports(
    trainer: Trainer, architecture: Architecture, options: TrainOptions
) -> Iterator[Report]:
    from bridge.engine.data import Text
    from bridge.engine.training import Report, memory, place
    from bridge.verify.measure import batches

    text, skips = Text.of(options.data, architecture.sequence), 0
    # Tokens of a step on all data ranks: samples of a microbatch, microbatches, data ranks, tokens of a sample.
    tokens = trainer.micro * trainer.accumulation * trainer.data[1] * architecture.sequence
    for number in range(options.number):
        start = time.perf_counter()
        step = trainer.train_batch(batches(text, trainer, number))
        speed = tokens / (time.perf_counter() - start)
        if not step.updated:
            skips += 1
        yield Report(
            number + 1,
            step.loss,
            step.grad_norm,
            step.lr,
            step.scale or 1.0,
            speed,
            memory(place()),
            skips,
        )


def _read_for_ranks(job: Job, world: int, fit: bool) -> Config:
    """Read the job's file for the launched ranks.

    If it does not fit them, read it without a number of ranks, so that a later error can name the
    numbers that fit.
    """
    if job.world_size is not None or fit:
        return read_config(job)
    try:
        # With the ranks that are here, the stack works the batch out as it will at the start.
        return read_config(replace(job, world_size=world))
    except BridgeError as error:
        try:
            return read_config(job)
        except BridgeError:
            raise error from None


def _find_unheard(config: Config) -> Iterator[Finding]:
    """Yield findings on settings that change numbers but have no plan field, so that the engine ignores
    them, and on settings that nobody knows.
    """
    yield from (finding for finding in config.remarks if finding.unknown)
    yield from (one for one in unheld(config, blurred=True) if one.effect.reaches(Effect.ROUNDING))


def _architecture_of(plan: Plan, model: str | None) -> Architecture:
    from bridge.engine.training import TINY

    if model in (None, "tiny"):
        return TINY
    if model is not None and is_folder(model):
        return _of_folder(model, plan.model.sequence or TINY.sequence)
    missing = [name for name in ("layers", "hidden", "heads") if getattr(plan.model, name) is None]
    ConfigError.raise_if(
        f"model.{name}: the file does not state this size; use --model tiny" for name in missing
    )
    return Architecture.of(_section_of(plan))


def _section_of(plan: Plan) -> Model:
    """Return the plan's model, with a vocabulary for text that is read byte by byte."""
    from bridge.engine.data import BYTES

    embedding = plan.model.embedding
    # A smaller vocabulary would lack words for it.
    words = max(embedding.padded_vocab or plan.model.vocab or BYTES, BYTES)
    # `words` has the padding already.
    whole = embedding.model_copy(update={"padded_vocab": None})
    return plan.model.model_copy(update={"vocab": words, "embedding": whole})


def _named_section(plan: Plan, options: TrainOptions) -> Model | None:
    """Return the model that the file describes, if that one is trained."""
    own = options.model not in (None, "tiny") and not is_folder(options.model or "")
    return _section_of(plan) if own else None


def _of_folder(folder: str, sequence: int) -> Architecture:
    """Return the shape of the model in a folder, with at most `sequence` tokens in a sample."""
    from bridge.engine.data import BYTES

    model = model_in(folder)
    if (model.vocab or BYTES) < BYTES:
        raise ConfigError(
            f"{folder}: found a vocabulary of {model.vocab}, expected at least {BYTES}, as text is "
            "read byte by byte"
        )
    return Architecture.of(
        model.model_copy(update={"sequence": min(sequence, model.sequence or sequence)})
    )


def _mesh_of_plan(plan: Plan, world: int) -> Mesh:
    """Return the mesh of a plan. Raises an error if its sizes do not fit the ranks, on any engine."""
    return Mesh.of(plan.parallel, world)


def _fit_plan(
    plan: Plan,
    here: Environment,
    architecture: Architecture,
    shrinks: bool,
    file: str,
    check: Callable[[Plan, int], object],
) -> tuple[Plan, tuple[Finding, ...]]:
    """Return the plan for the launched ranks, and findings on changed sizes.

    With `shrinks`, sizes are shrunk until they fit; otherwise `check` raises `ConfigError` for a
    plan that the engine cannot run.
    """
    if shrinks:
        return fit(plan, here.world, architecture)
    try:
        check(plan, here.world)
    except ConfigError as error:
        raise ConfigError(*error.problems, _advice_line(plan, file)) from None
    return plan, ()


def _advice_line(plan: Plan, file: str) -> str:
    """Return a line of advice with commands: the command that runs the plan unchanged, if there is
    one, and the command that shrinks the sizes.
    """
    command = f"-m stagebridge train {shlex.quote(file)}"
    parallel = plan.parallel
    ranks = (parallel.data or 1) * (parallel.tensor or 1) * (parallel.pipeline or 1)
    try:
        check(plan, ranks)
    except ConfigError:
        return f"to run the plan here: stagebridge train {shlex.quote(file)} --fit shrinks sizes until they fit, and says which"
    return f"to run the plan unchanged: PYTHONSAFEPATH=1 torchrun --nproc-per-node {ranks} {command}; or shrink sizes with --fit"


def _make_training(plan: Plan, architecture: Architecture, options: TrainOptions) -> Training:
    from bridge.engine.training import Training

    watch = options.watch
    training = Training.of(
        watch.add_to_plan(plan),
        architecture,
        options.data,
        model=_named_section(plan, options),
        deterministic=options.deterministic,
        trace=watch.folder,
        full=watch.full,
        policy=watch.policy(),
        folder=Path(options.model) if options.model and is_folder(options.model) else None,
        groups=options.groups,
        alike={
            "--steps": options.number,
            "--resume": bool(options.resume),
            "--save": bool(options.save),
        },
    )
    if options.resume:
        training.engine.load_checkpoint(options.resume)
    return training


def _print_findings(findings: Iterable[Finding]) -> None:
    for finding in findings:
        note(f"note: {finding.path}: {finding.message} ({finding.effect.value})")


def _run_training(
    training: Any, number: int, options: TrainOptions, first: bool, as_json: bool
) -> None:
    """Run `training` until `number` steps are done.

    `training` has an `engine`, and `steps(number)` yields a report for each step.
    """
    # One rank prints: the others would print the same lines.
    bar = first and not as_json and sys.stdout.isatty()
    show = _Bar(number) if bar else _print_report if not as_json else _print_report_object
    for report in training.steps(number):
        if first:
            show(report)
    if options.save:
        path = training.engine.save_checkpoint(options.save)
        if first and not as_json:
            say(f"saved {path}")
    training.engine.close()


@contextmanager
def _name_lost_ranks(options: TrainOptions) -> Iterator[None]:
    """Return a context for training: if a collective fails because another rank of this machine has
    ended, raise `BridgeError` that names that rank.
    """
    processes = neighbours()
    try:
        yield
    except RuntimeError as error:
        # A lost rank shows as an error of the collective that waited for it, with its address alone.
        dead = find_dead_ranks(processes)
        if not dead:
            raise
        again = f"start again with --resume {options.save or options.resume or 'DIR'}"
        lines = (
            f"rank {rank} (process {processes[rank]}) ended during the run; {again}"
            for rank in dead
        )
        raise BridgeError(*lines) from error


def _print_report(report: Report) -> None:
    print(report, flush=True)


def _print_report_object(report: Report) -> None:
    print_json(report.fields(), lines=False)


class _Bar:
    """A progress bar on a terminal."""

    def __init__(self, steps: int) -> None:
        from rich.progress import Progress

        self.progress = Progress()
        self.task = self.progress.add_task("", total=steps)
        self.progress.start()

    def __call__(self, report: Report) -> None:
        """Advance the progress bar to the step of `report`."""
        self.progress.update(self.task, completed=report.step, description=str(report))
        if self.progress.finished:
            self.progress.stop()
