"""What `verify` does: translate a file, run both sides in small on local ranks, and say whether they are the same run."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge import stacks
from bridge.cli.convert import answered, read, standard_input
from bridge.cli.gathering import STDIN, within
from bridge.cli.job import Job
from bridge.cli.local import ranks
from bridge.cli.terminal import console, note, print_json
from bridge.dialect import Config
from bridge.errors import BridgeError
from bridge.exits import Exit
from bridge.files import as_private_as, write_text
from bridge.grid import Grid
from bridge.translation import Result, translate

if TYPE_CHECKING:
    from bridge.verify.pair import Pair

RANK = "bridge.cli.verify"
MARK = "@stagebridge "
"""Begins our own lines among those that stacks print."""
Fields = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Stack and release to translate to, ranks at most, steps, and whether samples are padded."""

    to: str
    to_version: str | None = None
    ranks: int = 4
    steps: int | None = None
    padded: bool = False


def verify(job: Job, options: Options) -> int:
    """Verify one file; the exit code."""

    def work() -> int:
        if find_spec("torch") is None:
            raise BridgeError("verify: torch is not installed; pip install 'stagebridge[engine]'")
        with orderly(), tempfile.TemporaryDirectory() as folder:
            found = _measured(_at_hand(job, Path(folder)), options)
        code = _exit(found)
        if job.json:
            print_json({**found, "exit_code": code})
        else:
            _show(found)
        return code

    return answered(job, work)


def _exit(found: Fields) -> Exit:
    """Findings where a run differs; clean only where both sides ran whole on their own stacks."""
    if found["verdict"] == "differs":
        return Exit.FINDINGS
    return Exit.CLEAN if found["verdict"] == "same" else Exit.UNPROVED


@contextmanager
def orderly() -> Iterator[None]:
    """Within this block SIGTERM is an exception, so that ranks and files of this command go with it."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = None
    with suppress(ValueError):  # only the main thread may say what signals do
        before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _at_hand(job: Job, folder: Path) -> Job:
    """The job with its standard input in a file, which every rank can read, and nobody else."""
    if job.file != STDIN:
        return job
    path = folder / "standard input"
    with as_private_as(folder):
        write_text(path, standard_input())
    return replace(job, file=str(path), allow=(*job.allow, str(Path.cwd())))


def _measured(job: Job, options: Options) -> Fields:
    """What the ranks found; their progress goes to stderr."""
    world = _pair(job, options).size.world
    found = next(measured([(job, options)], world, None if job.json else _tell))
    if "problems" in found:
        raise BridgeError(*found["problems"])
    return found


def _tell(said: str) -> None:
    note(f"  {said}")


def measured(tasks: Sequence[tuple[Job, Options]], world: int, tell: Callable[[str], None] | None = None) -> Iterator[Fields]:
    """The reports on several files, in order, from one start of `world` ranks; one that fails has its `problems` instead."""
    spec = [{"job": asdict(job), "options": asdict(options)} for job, options in tasks]
    for line in ranks(world, RANK, json.dumps(spec)):
        said = json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else {}
        if "note" in said and tell:
            tell(said["note"])
        if "found" in said:
            yield said["found"]


def _pair(job: Job, options: Options) -> Pair:
    """Both sides, in small."""
    from bridge.verify.pair import fitted

    source = read(job)
    return fitted(source, _target(source, options), stacks.backends(options.to, job.dialect), options.ranks)


def _target(source: Config, options: Options) -> Result:
    """The translation: for the release that is asked for, else for the one that is installed and would run it."""
    dialect, backend = stacks.load(options.to), stacks.backends(options.to).get(options.to)
    installed = backend.release if backend and backend.release in dialect.versions else None
    return translate(source, dialect, options.to_version or installed)


# On the terminal


def _show(found: Fields) -> None:
    out = console(sys.stdout)
    out.print(_verdict(found), markup=False, soft_wrap=True)
    table = Grid("", ("run", "engine", "loss", "gradient norm", "furthest tensor", "verdict"))
    for run in found["runs"]:
        table.add_row(*_cells(run))
    out.print(table)
    for line in _words(found):
        out.print(line, markup=False)


SHOWN = 3
VERDICTS = {"same": "Same run", "differs": "Not the same run", "in part": "Proved in part", "not run": "Nothing proved"}


def _verdict(found: Fields) -> str:
    """The first line: the verdict, and why it is not the whole one."""
    return f"{': '.join((VERDICTS[found['verdict']], *(['; '.join(found['lacking'])] if found['lacking'] else [])))}."


def _cells(run: Fields) -> Iterator[str]:
    written = "as written" if run["as_written"] else "as meant"
    yield f"{run['side']}, {written}"
    yield run["engine"]
    losses, norms, gap = run["losses"], run["grad_norms"], run["distance"]
    yield f"{float(losses[0]):.6f} -> {float(losses[-1]):.6f}" if losses else ""
    yield "" if not norms else "not told" if norms[-1] is None else f"{float(norms[0]):.5g} -> {float(norms[-1]):.5g}"
    yield f"{gap['tensor'].removesuffix('.weight')}  {float(gap['worst']):.1e}" if gap else ""
    yield run["verdict"]


def _words(found: Fields) -> Iterator[str]:
    """Causes, and what was changed."""
    for run in found["runs"]:
        if run["cause"]:
            yield f"{run['side']} on {run['engine']}: {run['verdict']}: {run['cause']}"
    if found["judged_release"]:
        yield found["judged_release"]
    if found["no_script"]:
        why = "; ".join(found["no_script"])
        yield f"Judged in a script that has the model; that of `convert --script` would have the nearest one: {why}"
    yield f"\nIn small, on {found['ranks']} ranks{_changed(found['changes'])}."
    loss, update = (float(found["rounding"][name]) for name in ("loss", "update"))
    yield f"Rounding alone changes losses by {loss:.0e}, updates by {update:.0e}."
    if left := found["left_out"]:
        some = ", ".join(left[:SHOWN]) + (", ..." if len(left) > SHOWN else "")
        yield f"It alone decides the updates of {len(left)} tensors, whose gradients are zero but for it; not compared: {some}."


def _changed(changes: Mapping[str, Fields]) -> str:
    told = [f"{path} {change['before']} -> {change['after']}" for path, change in changes.items()]
    return f"; changed for that: {', '.join(told)}" if told else ""


# On a rank


def warm(text: str) -> None:
    """Load the engines that may be asked, before there are ranks."""
    loaded({name for said in json.loads(text) for name in (said["options"]["to"], said["job"]["dialect"])})


def loaded(named: Iterable[str | None]) -> None:
    """Load the native engine and those of the stacks at hand."""
    from bridge.engine.backend import BACKEND

    with redirect_stdout(sys.stderr):
        for backend in (BACKEND, *stacks.backends(*sorted(filter(None, named))).values()):
            if backend.release is not None:
                backend.load()


def main(text: str) -> None:
    """Verify one file after the other on one rank; the first of them prints what it does and what was found."""
    from bridge.cli.train import end
    from bridge.engine.environment import detect

    tasks, here, out = json.loads(text), detect(), sys.stdout

    def tell(**words: Any) -> None:
        if here.rank == 0:
            print(MARK + json.dumps(words, allow_nan=False), file=out, flush=True)

    with redirect_stdout(sys.stderr):
        for said in tasks:
            tell(found=_found(Job(**said["job"]), Options(**said["options"]), lambda line: tell(note=line)))
    end(here.world)


def _found(job: Job, options: Options, note: Any) -> Fields:
    from torch.cuda import is_available

    from bridge import comm
    from bridge.engine.environment import detect
    from bridge.verify.judge import verify

    here = detect()
    comm.connect(here.rank, here.world, here.address, "nccl" if is_available() else "gloo")
    try:
        with within(job):
            pair = _pair(job, options)
            found = verify(pair, stacks.backends(options.to, job.dialect), options.steps, options.padded, note).fields()
            return {**found, "judged_release": _otherwise(pair.target)}
    except BridgeError as error:
        return {"verdict": "not run", "problems": list(error.problems)}


def _otherwise(target: Config) -> str:
    """For which release the translation is, where that is not the one that `convert` takes by itself."""
    title, newest = target.dialect.title, target.dialect.newest
    if target.version == newest:
        return ""
    asked = f"`convert` writes for {newest} unless told --to-version {target.version}"
    return f"The translation is for {title} {target.version}, which runs here; {asked}."


if __name__ == "__main__":
    main(sys.argv[1])
