"""Options that several commands share. The options for reading FILE become one `Job`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from bridge.cli.job import Job, Picture, effect_named
from bridge.errors import SourceError
from bridge.files import obstacles
from bridge.limits import COUNT, RANKS
from bridge.report.row_choice import View

STDOUT = "-"


def output_file(path: Path | None) -> Path | None:
    """Return the path of an output file; - stands for standard output.

    Raises `SourceError` if no file can be written there, before any work is done.
    """
    if path is not None and str(path) != STDOUT:
        SourceError.raise_if(obstacles(path))
    return path


def output_or_folder(path: Path | None) -> Path | None:
    """Return the path of an output file or, for several files, of an existing folder."""
    return path if path is not None and os.path.isdir(path) else output_file(path)


def own_place(path: Path | None) -> Path | None:
    """Return the path of a file or folder.

    Raises `SourceError` for -, which stands for standard output.
    """
    if path is not None and str(path) == STDOUT:
        raise SourceError(
            "-: only convert and drift write to standard output; name a file or folder"
        )
    return path


def own_file(path: Path | None) -> Path | None:
    return output_file(own_place(path))


File = Annotated[
    str,
    typer.Argument(metavar="FILE", help="Config file; - reads standard input.", show_default=False),
]
From = Annotated[
    Optional[str],  # noqa: UP045 - older releases of typer read no unions
    typer.Option(
        "--from", metavar="DIALECT", help="Stack of FILE; recognised from its content by default."
    ),
]
FromVersion = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--from-version", metavar="V", help="Release that FILE is for; the newest known by default."
    ),
]
ToVersion = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--to-version", metavar="V", help="Release to write for; the newest known by default."
    ),
]
Output = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "-o",
        "--output",
        metavar="OUT",
        callback=output_file,
        help="File to write, whose suffix picks the format; - is stdout.",
    ),
]
Outputs = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "-o",
        "--output",
        metavar="OUT",
        callback=output_or_folder,
        help="File to write, whose suffix picks the format; - is stdout; for several files a folder.",
    ),
]
WorldSize = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--world-size",
        metavar="N",
        min=1,
        max=RANKS,
        help="Number of ranks of the run, if the file does not set it.",
    ),
]
Auto = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--auto",
        metavar="NAME=VALUE",
        help='Value of an "auto" in FILE, or a setting from which the value follows.',
    ),
]
AutoFrom = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--auto-from",
        "--with",
        metavar="ARGS",
        help=(
            'Arguments of Hugging Face\'s Trainer beside FILE, which fill in its "auto": a file of '
            "TrainingArguments (JSON, YAML, or a Python program with a call of it, which is not run), NAME=VALUE,"
            " or the config of accelerate that starts the run."
        ),
    ),
]
ModelFolder = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--model",
        metavar="FOLDER",
        help='Folder of the model (config.json), whose sizes fill in "auto".',
    ),
]
UserConfig = Annotated[
    bool,
    typer.Option(
        "--user-config",
        help="Read the config that `accelerate config` wrote for this user, where a launch takes it.",
    ),
]
Code = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--code",
        metavar="NAME=VALUE",
        help="A setting of the training script that belongs to FILE; dots separate sections.",
    ),
]
ModelSize = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        metavar="N",
        min=1,
        max=COUNT,
        help="Size of the model, used instead of the size in FILE or --model.",
        show_default=False,
    ),
]
Env = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--env",
        metavar="NAME=VALUE",
        help="An environment variable for a launch script; 1=VALUE sets the script's first argument.",
    ),
]
Launch = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--launch",
        metavar="N",
        min=1,
        help="Which run of a launch script to read, if it starts several.",
    ),
]
AllowPath = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--allow-path",
        metavar="PATH",
        help=(
            "A file or folder outside FILE's folder and the current one that FILE may name or "
            "source; nothing else outside of the two is opened."
        ),
    ),
]
Lenient = Annotated[
    bool,
    typer.Option(
        "--lenient",
        help="Leave out unknown keys, flags and values; each is named, and counts as different numbers.",
    ),
]
Nearest = Annotated[
    bool,
    typer.Option(
        "--nearest",
        help="If the release is unknown, use the nearest known release before it; the report says so first.",
    ),
]
FailOn = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--fail-on",
        metavar="EFFECT",
        help="Least effect that makes the command fail: stops, different (the default), rounding, memory, or same numbers.",
    ),
]
Silence = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        "--silence",
        metavar="S",
        min=0,
        help="Name a rank that keeps others waiting for S seconds (default 60); 0: never.",
    ),
]
Timeout = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        "--timeout",
        metavar="S",
        min=1,
        help="Give up after waiting S seconds for another rank (default 600).",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of the report (docs/json.md).")
]

All = Annotated[bool, typer.Option("--all", help="Also show findings without effect on the run.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print the verdict alone, in one line.")]
Only = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--only",
        metavar="EFFECT",
        help="Show only this effect: stops, numbers, rounding, memory, same numbers.",
    ),
]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Show where each written value comes from.")
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Replace files that were edited, or that something else wrote."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would change in which file, and write nothing.")
]

Files = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE",
        help="Configs: files, folders, patterns, git:REV:PATH; - reads standard input.",
        show_default=False,
    ),
]
Run = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE",
        help="The run: its launch script or DeepSpeed file, and files of its arguments.",
        show_default=False,
    ),
]
Select = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--select",
        metavar="RULE",
        help="Report only findings whose rule is RULE, begins with RULE/, or matches the pattern RULE (*).",
    ),
]
Ignore = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--ignore",
        metavar="RULE",
        help="Leave out findings whose rule is RULE, begins with RULE/, or matches the pattern RULE (*).",
    ),
]
Baseline = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--baseline", metavar="FILE", help="File of known findings, which are left out."),
]
WriteBaseline = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--write-baseline",
        metavar="FILE",
        callback=own_file,
        help="Write all present findings to FILE as known; --baseline then leaves none out.",
    ),
]
Format = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--format", metavar="FORMAT", help="text, json, github (workflow commands) or sarif."
    ),
]

JsonSteps = Annotated[bool, typer.Option("--json", help="Print one JSON object for each step.")]
Ranks = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--ranks",
        "--world-size",
        metavar="N",
        min=1,
        max=RANKS,
        help="Number of ranks of the run; by default as many as the sizes need.",
    ),
]
ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME",
        help="file, a known shape (tiny, gpt2, llama-7b, ...), or a model's folder.",
    ),
]
Tied = Annotated[
    Optional[bool],  # noqa: UP045
    typer.Option(
        "--tied/--untied",
        help="Whether embedding and output layer share their weights.",
        show_default=False,
    ),
]
MicroBatch = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--micro-batch",
        metavar="N",
        min=1,
        max=COUNT,
        help="Sequences in a microbatch, if FILE does not set it.",
    ),
]
Plot = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--plot",
        metavar="OUT",
        callback=own_file,
        help="Draw the memory of ranks; the suffix of OUT sets the format: svg, pdf, html or png.",
    ),
]
Memory = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        "--memory",
        metavar="GIB",
        min=0.001,
        max=1e6,
        help="Memory of a device, drawn as a line in the plot; ranks that need more are an error.",
    ),
]
SIZING: Mapping[str, tuple[str, Any, Any]] = {
    "model": ("model", ModelName, "file"),
    **{
        name: (name, ModelSize, None)
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence")
    },
    "tied": ("tied", Tied, None),
    "micro_batch": ("micro", MicroBatch, None),
}
"""The options of commands that need a model's sizes, by the names of the plan's model section."""
PICTURING: Mapping[str, tuple[str, Any, Any]] = {
    "plot": ("path", Plot, None),
    "memory": ("memory", Memory, None),
}
"""The options for a picture of what ranks need, next to those for sizes."""
READING: Mapping[str, tuple[str, Any, Any]] = {
    "from_": ("dialect", From, None),
    "from_version": ("version", FromVersion, None),
    "world_size": ("world_size", WorldSize, None),
    "auto": ("auto", Auto, None),
    "auto_from": ("auto_from", AutoFrom, None),
    "code": ("code", Code, None),
    "env": ("env", Env, None),
    "launch": ("launch", Launch, None),
    "allow_path": ("allow", AllowPath, None),
    "lenient": ("lenient", Lenient, False),
    "nearest": ("nearest", Nearest, False),
    "as_json": ("json", Json, False),
}
"""Options for reading FILE, each with its field in a `Job`, its declaration, and its default."""
COUNTING: Mapping[str, tuple[str, Any, Any]] = {"fail_on": ("fail_on", FailOn, None)}
"""Options that set which findings on FILE change the exit code."""
VIEWING: Mapping[str, tuple[str, Any, Any]] = {
    "everything": ("everything", All, False),
    "quiet": ("quiet", Quiet, False),
    "only": ("only", Only, None),
    "origins": ("origins", Verbose, False),
}
"""Options that set which part of the report is shown."""

CHOOSING: Mapping[str, tuple[str, Any, Any]] = {
    "select": ("select", Select, None),
    "ignore": ("ignore", Ignore, None),
    "baseline": ("known", Baseline, None),
    "format": ("format", Format, None),
}
"""Options that set which findings are reported, and in which format."""
GATING: Mapping[str, tuple[str, Any, Any]] = {
    **CHOOSING,
    "write_baseline": ("write_baseline", WriteBaseline, None),
}
"""The options of `CHOOSING`, and the one that writes the findings as known."""
MODEL: Mapping[str, tuple[str, Any, Any]] = {"model": ("model", ModelFolder, None)}
"""The option that names the run's model, for commands that read no other sizes of it."""
OWN = ("job", "view", "gate", "names", "picture", "sizes")
"""Arguments of a command function that are built from several options."""

Command = Callable[..., int]


def reads_file(
    *,
    counts: bool = False,
    reports: bool = False,
    gating: Mapping[str, tuple[str, Any, Any]] = {},
    many: bool = False,
    launched: bool = False,
    model: bool = False,
    sized: bool = False,
    **otherwise: Any,
) -> Callable[[Command], Command]:
    """Return a decorator that turns a function of a `Job` into a command with FILE and the options of `READING`.

    With `counts`, the command also has --fail-on. With `reports`, the function gets `view`, the parts of the report to
    show. With options for `gating`, it gets `gate`; with `many`, the `names` of all files. A `launched` command gets the
    number of ranks from its launcher, not from the project. With `model`, the command has --model FOLDER; if it is
    `sized`, the function gets `sizes`, those of a model, and `picture`. `otherwise` replaces options.
    """
    options = {**READING, **(MODEL if model else {}), **(COUNTING if counts else {})}
    viewing, sizing = VIEWING if reports else {}, SIZING if sized else {}
    picturing = PICTURING if sized else {}

    def wrap_command(command: Command) -> Command:
        @wraps(command)
        def run(file: str | list[str], **arguments: Any) -> int:
            values = {field: arguments.pop(name) for name, (field, _, _) in options.items()}
            if gating:
                from bridge.cli.many_files import gate_of

                arguments["gate"] = gate_of(
                    **{field: arguments.pop(name) for name, (field, _, _) in gating.items()},
                    as_json=values["json"],
                )
            # A command of many files gets all names; its job has the first, which stands for them until they are read.
            if not isinstance(file, str):
                arguments["names"], file = tuple(file), file[0]
            if viewing:
                view_values = {
                    field: arguments.pop(name) for name, (field, _, _) in viewing.items()
                }
                only = tuple(
                    effect_named(SHORT.get(words, words), "--only")
                    for words in view_values["only"] or ()
                )
                arguments["view"] = View(**{**view_values, "only": only})
            if sizing:
                from bridge.api.layout import sizes_of

                arguments["sizes"] = sizes_of(
                    **{field: arguments.pop(name) for name, (field, _, _) in sizing.items()}
                )
                arguments["picture"] = Picture(
                    **{field: arguments.pop(name) for name, (field, _, _) in picturing.items()}
                )
            from bridge.cli.project_settings import apply_project_settings

            # An empty text was typed, too; an empty list or a switch that is off was not.
            explicit = {name: value for name, value in values.items() if value or value == ""}
            return command(
                apply_project_settings(Job(file, **explicit, typed=explicit), file, launched),
                **arguments,
            )

        # Evaluated here, as annotations are texts and their names are known in the module of the command alone.
        own = [
            one
            for one in inspect.signature(command, eval_str=True).parameters.values()
            if one.name not in OWN
        ]
        every = {**picturing, **sizing, **viewing, **gating, **options}
        common = [
            _parameter(name, otherwise.get(name, kind), default)
            for name, (_, kind, default) in every.items()
        ]
        keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        parameters = [
            _parameter("file", otherwise.get("file", Files if many else File)),
            *keywords,
            *common,
        ]
        # Typer reads the options from the signature and the types from the annotations; `wraps` would leave those of `command`.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return wrap_command


SHORT = {"numbers": "different numbers"}
"""Further names of effects for `--only`, besides parts of the effects' full names."""


def _parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
