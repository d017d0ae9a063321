"""The command `resolve`: reads all sources of a run together, and says who wins for each setting."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.api.access import limit_access
from bridge.api.option_values import HOST_FILE, is_part
from bridge.api.read import dialect_of, document_of, place_of, read_as, release_of, start_document
from bridge.cli.budget import stay_within_limits
from bridge.cli.job import Job, answer
from bridge.cli.many_files import OPEN, Gate
from bridge.cli.terminal import print_json
from bridge.errors import BridgeError, ConfigError
from bridge.files import Document, Script, parse, read_text
from bridge.report import as_json, as_text
from bridge.report.console import console
from bridge.report.row_choice import USUAL, View
from bridge.report.sarif import FORMATS, REFUSED, record
from bridge.stack import registry
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding, Origin
from bridge.stack.rules import Effect
from bridge.stack.sources import ResolvedRun
from bridge.stack.training_arguments import ARGUMENTS


def resolve(
    job: Job,
    view: View = USUAL,
    gate: Gate = OPEN,
    names: Sequence[str] = (),
    user_config: bool = False,
) -> int:
    """Resolve one run. Returns the exit code."""
    job = gate.job(replace(job, open_auto=True))

    @stay_within_limits()
    def work() -> int:
        run = sort_sources(job, names or (job.file,), "resolve")
        with limit_access(run):
            found = _read_run(run, user_config)
        findings = gate.choice.of(found.findings, run.file)
        code = as_json.exit_of(findings, run.threshold)
        if gate.is_one_list:
            records = [record(one, run.file, found.name) for one in findings]
            print(FORMATS[gate.format](records, code))
        elif run.json:
            print_json(as_json.resolution_json(found, findings, run.file_name, code))
        else:
            out = console(sys.stdout)
            as_text.resolution_text(found, findings, out, view, run.file_name)
        return code

    with answer(job), limit_access(job):
        return work()


def sort_sources(job: Job, names: Sequence[str], command: str) -> Job:
    """Return the job of the one source that starts or configures the run; the others are files of
    the Trainer's arguments or the model's folder.

    Arguments alone name the DeepSpeed file themselves. Raises `BridgeError` for two such sources.
    """
    runs, arguments, launchers, model = list[str](), list[str](), list[str](), job.model
    named = list[str]()
    for name in names:
        data = _data_of(name)
        if registry.find_front_end(data):
            launchers.append(name)
        elif isinstance(data, Mapping) and (data is _MODEL or "model_type" in data):
            model = Path(name)
        elif (
            isinstance(data, Mapping)
            and not registry.find_host(data)
            and registry.name_lookalike(HOST_FILE, data)
        ):
            arguments.append(name)
            file = data.get(HOST_FILE)
            named += [place_of(file, name)] if isinstance(file, str) else []
        elif registry.find_launcher(data):
            launchers.append(name)
        else:
            runs.append(name)
    flags = [name for name in runs if _data_of(name) is None]
    if len(runs) == 2 and len(flags) == 1 and all(map(is_part, runs)):
        runs, arguments = flags, [*arguments, *({*runs} - {*flags})]
    # Arguments name the DeepSpeed file where nothing else starts the run.
    alone = arguments[:1] if len(arguments) == 1 else []
    runs = runs or launchers or named or alone
    arguments = [name for name in arguments if name not in runs]
    arguments += [name for name in launchers if name not in runs]
    if len(runs) != 1:
        raise BridgeError(
            f"{command}: found {len(runs)} sources that start or configure a run"
            f" ({', '.join(runs) or 'none'}), expected one; give its script or its config, and files of"
            " arguments beside it"
        )
    job = replace(job, file=runs[0], model=model)
    if not arguments and runs[0] != "-":
        job, arguments = _open_passed(job)
    return replace(job, auto_from=(*arguments, *job.auto_from))


def _open_passed(job: Job) -> tuple[Job, list[str]]:
    """Return a job with the file of the Trainer's arguments that its script passes to the program.

    `HfArgumentParser` reads such a file if it is the only word (transformers, hf_argparser.py).
    """
    data = None if _data_of(job.file) is not None else document_of(job).data
    if not isinstance(data, Script):
        return job, []
    is_read = any(registry.recognising(data)[0].values())
    if is_read and not registry.find_host(data):
        return job, []  # a stack reads the words itself
    for launch in data.launches:
        if len(launch.words) != 1 or Path(launch.texts[0]).suffix not in (".json", ".yaml", ".yml"):
            continue
        name = place_of(launch.place(launch.words[0]) or launch.texts[0], job.file)
        if is_read and not (
            Path(name).is_file() and registry.name_lookalike(HOST_FILE, _data_of(name))
        ):
            continue  # a program of its own, which reads a file of its own
        if launch.file(launch.words[0]) is not None or not Path(name).is_file():
            raise BridgeError(
                f"{job.file}, line {launch.line}: {launch.program} is given {launch.texts[0]} alone, and no"
                f" such file is there; save it as {name}, or give its arguments with --with"
            )
        document = parse(read_text(Path(name)), name, Path(name).suffix)
        BridgeError.raise_if(
            f"{name}, line {document.line(*key)}: {key[0]}: found {text}, which is a text in YAML 1.1;"
            " HfArgumentParser makes no number of it, and training stops; write a point and the sign"
            " of the exponent, such as 1.0e-5"
            for key, text in document.strings.items()
            if key[:1] and key[0] in ARGUMENTS
        )
        return job, [name]
    return job, []


_MODEL: Mapping[str, Any] = {}
"""Stands for a folder, which is a model's."""


def _data_of(name: str) -> Any:
    """Return the data of a source; None for standard input, a script, and what has to be read to be refused."""
    path = Path(name)
    if path.is_dir():
        return _MODEL
    if not path.is_file() or path.suffix.lower() not in (".json", ".yaml", ".yml"):
        return None
    return parse(read_text(path), name, path.suffix.lower()).data


def _read_run(job: Job, user_config: bool) -> ResolvedRun:
    """Return the resolved run of a document; of one that a host alone reads, by the host."""
    document = document_of(job)
    job = replace(job, version=job.version or registry.find_release(document.data))
    if user_config and isinstance(document.data, Script):
        document = registry.name_user_config(document)
    trained, told = job.settings_of_options.get("trainer", {}), tuple[Finding, ...]()
    front_end = registry.find_front_end(document.data)
    starts = isinstance(document.data, Script) or front_end
    starts = starts or bool(job.parts) or isinstance(document.data, list)
    if job.launchers or trained or starts:
        # Next to arguments of the Trainer, accelerate's config is one source of the stack that it starts.
        document, told = start_document(job, document)
    host = registry.find_host(document.data) if job.dialect is None else None
    if not host and job.dialect is None and registry.name_lookalike(HOST_FILE, document.data):
        host = registry.find_trainer(document.data)
    # A script that starts a stack with a dialect is the dialect's, whatever starts it.
    script = host and isinstance(document.data, Script)
    if host and not (script and any(registry.recognising(document.data)[0].values())):
        facts = job.settings_of_options.get("auto", {})
        release, said = release_of(job, registry.load(host.NAME), job.version)
        question = host.Question(
            facts, job.outside, user_config, getattr(trained, "places", {}), job.world_size, release
        )
        found: ResolvedRun = host.resolve(document, question)
        own = told if front_end else ()
        return replace(found, findings=(*said, *own, *found.findings))
    config, stops = _read_config(job, document)
    title = as_text.name(config)
    told = (*told, *(stops or as_json.all_of(config)))
    return ResolvedRun(
        config.dialect.name, title, config.version, config.world_size, config.default_source,
        config.resolve(bool(stops)), told,
    )  # fmt: skip


def _read_config(job: Job, document: Document) -> tuple[Config, tuple[Finding, ...]]:
    """Return the config of a run and, if its programs refuse it, a finding for each reason."""
    dialect = dialect_of(job, document)
    version, said = release_of(job, dialect, job.version)
    try:
        config = read_as(job, dialect, document, version)
    except ConfigError as error:
        if error.part is None:
            raise
        built = dialect.build(error.part, dialect.release(version), job.world_size)
        return built, (*said, *map(_stop, error.problems))
    return replace(config, remarks=(*said, *config.remarks)), ()


PROBLEM = re.compile(
    r"((?P<file>[^\s:]+): )?(line (?P<line>\d+): )?((?P<path>[^\s:]+): )?(?P<text>.*)", re.DOTALL
)
"""A problem of a reader: the file and the line, if they are known, the setting, and a sentence."""


def _stop(problem: str) -> Finding:
    found = PROBLEM.fullmatch(problem)
    assert found is not None, "every part but the sentence may be missing"
    file, line, path = found["file"] or "", found["line"], found["path"] or ""
    # Without a line, the one name in front of the sentence is the setting's.
    path, file = (path, file) if line or path else (file, "")
    origin = Origin(int(line) if line else None, "", file if line else "")
    return Finding(path or "run", found["text"], Effect.STOPS, True, origin=origin, rule=REFUSED)
