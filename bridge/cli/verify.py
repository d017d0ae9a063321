"""The `verify` command: translate a file, run both sides at small sizes on local ranks, and say
whether they are the same run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bridge.cli.file_search import STDIN, limit_access
from bridge.cli.job import Job
from bridge.cli.local import run_ranks
from bridge.cli.project_settings import apply_project_settings
from bridge.cli.rank_messages import MARK, Fields, ProgressPrinter, end_orderly, load_engines
from bridge.cli.read_job import answer_job, read_job, standard_input
from bridge.cli.terminal import console, print_json
from bridge.cli.under_launcher import end_process
from bridge.engine.backends import backends
from bridge.engine.environment import detect
from bridge.engine.interface import Backend
from bridge.engine.native import BACKEND
from bridge.engine.plain import BACKENDS
from bridge.errors import BridgeError
from bridge.files import as_private_as, write_text
from bridge.files.progress import listening
from bridge.report.exit_codes import Exit
from bridge.report.tables import Grid
from bridge.stack import registry
from bridge.stack.dialect import Config
from bridge.stack.extras import need_engine
from bridge.translation.translate import Result, translate
from bridge.verify.own import engines_of, pair_configs
from bridge.verify.pair import Side, TranslationPair, fit_pair

RANK = "bridge.cli.verify"


@dataclass(frozen=True)
class Own:
    """What a comparison of two configs needs: the second config, the model's folder, the file of
    the batch, and the engine of each config.
    """

    other: str
    model: str
    batch: str
    on: tuple[str, str] | None = None


@dataclass(frozen=True)
class VerifyOptions:
    """The options of `verify`: stack and release to translate to, largest number of ranks, number
    of steps, and whether samples are padded.

    If `own` is given, nothing is translated: the file is compared with this second config.
    """

    to: str | None = None
    to_version: str | None = None
    ranks: int = 4
    steps: int | None = None
    padded: bool = False
    own: Own | None = None


def own_of(
    file: str,
    other: str | None,
    to: str | None,
    model: Path | None,
    batch: Path | None,
    on: str | None,
) -> Own | None:
    """Return the second config with its options; None without a second config.

    Raises `BridgeError` if options are missing or contradict each other.
    """
    if other is None:
        alone = {"--model": model, "--batch": batch, "--on": on}
        BridgeError.raise_if(
            f"{name}: needs a second config: verify {file} OTHER {name} ..."
            for name in alone
            if alone[name]
        )
        BridgeError.raise_if(
            []
            if to
            else ["verify: expected --to DIALECT, or a second config with --model and --batch"]
        )
        return None
    BridgeError.raise_if(
        ["--to: found together with a second config; give one of them"] if to else []
    )
    lacks = [
        name
        for name, path in {"--model FOLDER": model, "--batch FILE": batch}.items()
        if path is None
    ]
    BridgeError.raise_if(f"verify: a second config needs {name} too" for name in lacks)
    assert model is not None and batch is not None
    config = model / "config.json"
    BridgeError.raise_if(
        []
        if config.is_file()
        else [f"{config}: not found; expected the config.json of a Hugging Face model"]
    )
    BridgeError.raise_if(
        []
        if batch.is_file()
        else [f"{batch}: not found; bridge.trace.batch({batch.name!r}, batch) writes one"]
    )
    names = tuple(on.split(",")) if on else None
    BridgeError.raise_if(
        [f"--on: found {on}, expected two engines: --on ddp,deepspeed"]
        if names and len(names) != 2
        else []
    )
    return Own(other, str(model.absolute()), str(batch.absolute()), names)  # type: ignore[arg-type]


def verify(job: Job, options: VerifyOptions) -> int:
    """Verify one file. Returns the exit code."""

    def work() -> int:
        need_engine("verify")
        with end_orderly(), tempfile.TemporaryDirectory() as folder:
            fields = _print_and_measure(_at_hand(job, Path(folder)), options)
        if fields["verdict"] == "differs":
            code = Exit.FINDINGS
        elif fields["verdict"] == "same":
            code = Exit.CLEAN
        else:
            code = Exit.UNPROVED  # a side did not run, or not whole: a part is no proof
        if job.json:
            print_json({**fields, "exit_code": code})
        else:
            _print_verdicts(fields)
        return code

    return answer_job(job, work)


def _at_hand(job: Job, folder: Path) -> Job:
    """Return the job.

    If it reads standard input, the input is first saved in a private file in `folder`, so that
    every rank can read it.
    """
    if job.file != STDIN:
        return job
    path = folder / "standard input"
    with as_private_as(folder):
        write_text(path, standard_input())
    return replace(job, file=str(path), allow=(*job.allow, str(Path.cwd())))


def _print_and_measure(job: Job, options: VerifyOptions) -> Fields:
    """Return the report that the ranks print; progress lines go to stderr."""
    world = (
        _make_own_pair(job, options.own, options.ranks)[0]
        if options.own
        else _make_pair(job, options)
    ).size.world
    fields = next(run_tasks([(job, options)], world, None if job.json else ProgressPrinter()))
    if "problems" in fields:
        raise BridgeError(*fields["problems"])
    return fields


def run_tasks(
    tasks: Sequence[tuple[Job, VerifyOptions]], world: int, printer: ProgressPrinter | None = None
) -> Iterator[Fields]:
    """Return the reports on several files, in order. The `world` ranks are started once.

    A file that fails has its `problems` instead of a report.
    """
    spec = [{"job": asdict(job), "options": asdict(options)} for job, options in tasks]
    for line in run_ranks(world, RANK, json.dumps(spec)):
        message = json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else {}
        if printer:
            printer.hear(message)
        if "found" in message:
            yield message["found"]


def _make_pair(job: Job, options: VerifyOptions) -> TranslationPair:
    """Return both sides of the translation, at small sizes."""
    source = read_job(job)
    return fit_pair(
        source, _translate_target(source, options), backends(options.to, job.dialect), options.ranks
    )


def _make_own_pair(
    job: Job, own: Own, limit: int
) -> tuple[TranslationPair, Mapping[Side, Backend]]:
    """Return both configs at small sizes, and the engine of each config."""
    configs = read_job(job), _read_config(apply_project_settings(job, own.other))
    options = {
        **backends(*(config.dialect.name for config in configs)),
        **BACKENDS,
        BACKEND.name: BACKEND,
    }
    engines = engines_of(configs, own.on, options)
    return pair_configs(configs, engines, limit), engines


def _read_config(job: Job) -> Config:
    with limit_access(job):
        return read_job(job)


def _translate_target(source: Config, options: VerifyOptions) -> Result:
    """Translate for the release of --to-version, else for the release that is installed here."""
    assert options.to is not None, "--to is required if there is no second config"
    dialect, backend = registry.load(options.to), backends(options.to).get(options.to)
    # A run on the stack that is here proves nothing about a file for another release.
    release = backend.release if backend and backend.release in dialect.versions else None
    return translate(source, dialect, options.to_version or release)


# On the terminal


def _print_verdicts(fields: Fields) -> None:
    out = console(sys.stdout)
    lacking = f": {'; '.join(fields['lacking'])}" if fields["lacking"] else ""
    out.print(f"{VERDICTS[fields['verdict']]}{lacking}.", markup=False, soft_wrap=True)
    table = Grid("", ("run", "engine", "loss", "gradient norm", "furthest tensor", "verdict"))
    for run in fields["runs"]:
        table.add_row(*_run_cells(run))
    out.print(table)
    for line in _words_below(fields):
        out.print(line, markup=False)


SHOWN = 3
VERDICTS = {
    "same": "Same run",
    "differs": "Not the same run",
    "in part": "Proved in part",
    "not run": "Nothing proved",
}


def _run_cells(run: Fields) -> Iterator[str]:
    spelling = "as written" if run["as_written"] else "as meant"
    yield f"{run['side']}, {spelling}"
    yield run["engine"]
    losses, norms, gap = run["losses"], run["grad_norms"], run["distance"]
    yield f"{float(losses[0]):.6f} -> {float(losses[-1]):.6f}" if losses else ""
    yield (
        ""
        if not norms
        else "not told"
        if norms[-1] is None
        else f"{float(norms[0]):.5g} -> {float(norms[-1]):.5g}"
    )
    yield f"{gap['tensor'].removesuffix('.weight')}  {float(gap['worst']):.1e}" if gap else ""
    yield run["verdict"]


def _words_below(fields: Fields) -> Iterator[str]:
    """Yield the lines below the table: causes, changed sizes, and the differences that rounding
    alone makes.
    """
    for run in fields["runs"]:
        if run["cause"]:
            yield f"{run['side']} on {run['engine']}: {run['verdict']}: {run['cause']}"
    if fields["judged_release"]:
        yield fields["judged_release"]
    if fields["no_script"]:
        why = "; ".join(fields["no_script"])
        yield (
            "Both sides ran with this model; the training script of `convert --script` has the "
            f"nearest model that it can build: {why}"
        )
    smaller = [
        f"{path} {change['before']} -> {change['after']}"
        for path, change in fields["changes"].items()
    ]
    shrinking = f"; values changed to fit: {', '.join(smaller)}" if smaller else ""
    yield f"\nRun at small sizes, on {fields['ranks']} ranks{shrinking}."
    loss, update = (float(fields["rounding"][name]) for name in ("loss", "update"))
    yield f"Rounding alone changes losses by {loss:.0e}, updates by {update:.0e}."
    if names := fields["left_out"]:
        some = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        yield f"Rounding alone decides the updates of {len(names)} tensors, whose true gradients are zero; not compared: {some}."


# On a rank


def warm(text: str) -> None:
    """Load the engines that may be used, before ranks are forked."""
    spec = json.loads(text)
    # An engine that is loaded after the fork is loaded once by every rank.
    on = [name for task in spec for name in (task["options"].get("own") or {}).get("on") or ()]
    load_engines(
        {*on, *(name for task in spec for name in (task["options"]["to"], task["job"]["dialect"]))}
    )


def main(text: str) -> None:
    """Verify one file after the other on one rank. The first rank prints the progress and the
    reports.
    """
    tasks, here, out = json.loads(text), detect(), sys.stdout

    def tell(**words: Any) -> None:
        if here.rank == 0:
            # Stacks print to stdout as they like: ours goes there alone, and marked.
            print(MARK + json.dumps(words, allow_nan=False), file=out, flush=True)

    with redirect_stdout(sys.stderr):
        for task in tasks:
            with listening(lambda count, total: tell(at=[count, total])):
                fields = _judge_job(
                    Job(**task["job"]), _options_of(task["options"]), lambda line: tell(note=line)
                )
            tell(found=fields)
    end_process(here.world)


def _options_of(values: Mapping[str, Any]) -> VerifyOptions:
    own = values.get("own")
    return VerifyOptions(
        **{
            **values,
            "own": Own(**{**own, "on": tuple(own["on"]) if own["on"] else None}) if own else None,
        }
    )


def _judge_own(job: Job, options: VerifyOptions, own: Own, note: Any) -> Fields:
    """The report on two configs of a user's own."""
    from bridge.engine.rows import Rows
    from bridge.trace.batch_file import read_batch as kept
    from bridge.verify.on_batch import Given, judge_on_batch

    pair, engines = _make_own_pair(job, own, options.ranks)
    folder = Path(own.model)
    rows = Rows.of(own.batch, kept(Path(own.batch)).tensors)
    sample = Given(folder, _read_config(Job(str(folder / "config.json"))), rows)
    return {
        **judge_on_batch(pair, engines, sample, options.steps, note).fields(),
        "judged_release": "",
    }


def _judge_job(job: Job, options: VerifyOptions, note: Any) -> Fields:
    from bridge.engine.joining import join
    from bridge.verify.judge import verify

    here = detect()
    join(here)
    try:
        with limit_access(job):
            if options.own:
                return _judge_own(job, options, options.own, note)
            pair = _make_pair(job, options)
            fields = verify(
                pair, backends(options.to, job.dialect), options.steps, options.padded, note
            ).fields()
            return {**fields, "judged_release": _release_line(pair.target)}
    except BridgeError as error:
        return {"verdict": "not run", "problems": list(error.problems)}


def _release_line(target: Config) -> str:
    """Return a line that names the target release of the translation, if it is not the default
    release of `convert`; else an empty text.
    """
    title, newest = target.dialect.title, target.dialect.newest
    if target.version == newest:
        return ""
    advice = f"`convert` writes for {newest} unless given --to-version {target.version}"
    return f"The translation is for {title} {target.version}, which is installed here; {advice}."


if __name__ == "__main__":
    main(sys.argv[1])
