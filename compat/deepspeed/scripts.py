"""Reads launch scripts: finds a run's DeepSpeed config, either a file or text in the script itself,
and the settings on the run's command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError, ConfigError, SourceError
from bridge.files import Document, Launch, Script, find, folder_of, load, parse, scalar
from bridge.files.shown import brief
from bridge.shell import Pieces, cut, line_of, spell_pieces, text_if_known, unknowns
from bridge.shell.word_pieces import NOWHERE, Text
from bridge.stack import trainer_detection
from bridge.stack.findings import Finding, Origin, find_assumptions, unknown
from bridge.stack.program_source import (
    ASSIGNED as ASSIGNED,
    CALL_WINS,
    find_clipping,
    find_defaults_of_trl,
    read_arguments_call,
    read_call,
)
from bridge.stack.rules import Effect
from bridge.stack.sources import NO_SOURCES, Placed, Said, Sources, Unheard
from bridge.stack.training_arguments import QUIET, SHOWN, read_word
from compat.deepspeed import accelerated
from compat.deepspeed.trainer import COURSE, DATED, DEFAULTS, FILE, TRAINED, name_argument

PROGRAM = "train.py"
"""Stands for the program that a launch of flags alone does not name."""
WORKING_FOLDER = ("`pwd`", "$(pwd)", "$PWD", "${PWD}")
OPTIONS = ("--deepspeed_config", "--deepspeed-config")
SPELLED = re.compile(
    r"--(?:ds|deepspeed)(?:[-_]?(?:config|conf|cfg|json))?(?:[-_]?(?:file|path|name|json))?"
)
"""Matches the options by which programs name their DeepSpeed file. Only one whose value names a file does so."""
YAML = (".yaml", ".yml")
SCRIPTS = "no config of DeepSpeed has this: it belongs to the training script, and stagebridge does not read it"
UNSURE = {"auto_find_batch_size", "dataloader_drop_last"}
"""The Trainer's arguments that no plan holds: the batch then follows from the memory of the machine, and
the length of an epoch from the data.
"""
TRAINER = "--deepspeed"
"""The option that names a config file in scripts with Hugging Face's Trainer. In other scripts it
is a switch without a value.
"""

CODE: Mapping[str, str] = {
    # `ds-sequence-parallel-size` is Ulysses: it splits samples.
    # Megatron's `sequence-parallel` is another thing.
    "tensor-model-parallel-size": "tensor_parallel",
    "pipeline-model-parallel-size": "pipeline_stages",
    "ds-sequence-parallel-size": "context_parallel",
}
"""Maps flags of Megatron-DeepSpeed (megatron/arguments.py there) to the settings of the code part
that they set.
"""

LAUNCHED = frozenset(
    {
        TRAINER,
        *OPTIONS,
        *(f"--{name}" for name in CODE),
        "--no-pipeline-parallel",
        "--deepspeed-activation-checkpointing",
        "--zero-stage",
    }
)
"""Options of launches that are read here."""
MODEL = {"num-layers", "hidden-size", "num-attention-heads"}
"""Flags without which Megatron-DeepSpeed refuses to start. They show that a run is one of
Megatron-DeepSpeed.
"""
CALLED = "optimizer.type"
UNREAD = "Megatron-DeepSpeed builds optimizer and schedule from its flags, which a file alone does not tell"
PIPED = ("pretrain_gpt.py", "finetune_llama.py", "train.py")
"""Programs that build a PipelineModule unless they are told not to, whatever the number of stages."""
PIPES = (
    "the program builds a PipelineModule, whose engine refuses ZeRO stages 2 and 3; use"
    " --no-pipeline-parallel, or stage 0 or 1"
)
STAGES = (
    "the program builds the model for ZeRO {}, and the engine runs stage {} of the DeepSpeed file; make"
    " both equal"
)
EXPERTS = (
    "layers of DeepSpeed's MoE, by default every second one, are read as Megatron's in all layers; set"
    " the model's mixture of experts in the target"
)
DECIDES = (
    "zero.",
    "precision.compute",
    "precision.master",
    "precision.reduce",
    "precision.communicate",
    "precision.loss_scale.",
    "precision.autocast",
    "precision.moments",
    "optimizer.clip",
    "habits.clip_scope",
    "habits.nonfinite",
    "habits.overflow_steps",
    "parallel.order",
    "parallel.pipeline",
    "parallel.context",
    "schedule.",
    "stages.",
)
"""Plan fields that DeepSpeed's file, and not a flag of Megatron-DeepSpeed, decides. Its training.py gives
deepspeed.initialize the optimizer and the schedule, and each step the size of the whole batch
(set_train_batch_size).
"""

ON_CPU = "with it accelerate does not use DeepSpeed (AcceleratorState); drop it"
IGNORED = {
    f"ACCELERATE_{name}": Effect.NUMBERS
    for name in ("GRADIENT_ACCUMULATION_STEPS", "GRADIENT_CLIPPING", "MIXED_PRECISION")
}
"""Variables of accelerate that change numbers where it starts a run; the others change memory and speed."""


@dataclass(frozen=True)
class Found:
    """The config that a script passes to its run, with everything else that the script says: the
    arguments of Hugging Face's Trainer, the code part, the number of ranks, and findings. `trained`
    is true if something shows that the Trainer starts the run; without it, the arguments count only
    if the user says so. `file` is the name of the config file; empty if the script itself contains
    the document. `facts` replace "auto" where accelerate starts the run. `environment` has the
    variables that accelerate reads where another program starts it. `sources` say who sets what of a
    run that accelerate starts. `assigned` are
    arguments that the program gives the Trainer last, over all that anybody says beside it.
    """

    document: Document
    arguments: Placed
    trained: bool = False
    code: Mapping[str, Any] = field(default_factory=dict)
    ranks: int | None = None
    findings: tuple[Finding, ...] = ()
    file: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Said] = field(default_factory=dict)
    sources: Sources = NO_SOURCES
    assigned: Placed = field(default_factory=lambda: Placed({}, {}))


def is_launch(launch: Launch, script: Script) -> bool:
    """Return whether a command of the script passes a DeepSpeed config to its program."""
    if any(True for _ in _configs(launch)):
        return True
    try:
        return accelerated.starts(launch, script, _file_opener(script, launch))
    except BridgeError:
        return False


def name_other_run(script: Script) -> str:
    """Return what a script starts instead of a run with DeepSpeed, if that is known; otherwise an empty string."""
    if any(is_launch(launch, script) for launch in script.launches):
        return ""
    answers = (
        accelerated.name_other_run(launch, _file_opener(script, launch))
        for launch in script.launches
    )
    return next(filter(None, (*answers, *map(_without_config, script.launches))), "")


def find_called(document: Document) -> Document | None:
    """Return a script with only its launch of Megatron-DeepSpeed; None if its launch with a DeepSpeed file is none."""
    script = document.data
    if not isinstance(script, Script):
        return None
    launch = script.launch(lambda launch: is_launch(launch, script), "--deepspeed_config")
    alone = replace(script, chosen=None)
    alone.__dict__["launches"] = (launch,)
    return replace(document, data=alone) if set(_names(launch)) >= MODEL else None


def join_flags(flags: Document, file: str) -> Document | None:
    """Return the launch of a program of Megatron-DeepSpeed that has these flags, with the DeepSpeed file `file`; if that is
    empty, with the one that they name, and None if they name none. Raises `BridgeError` if they name another.
    """
    texts = [*map(str, flags.data)]
    words = [(text, flags.line(at) or 1) for at, text in enumerate(texts)]
    place = os.path.relpath(file, folder_of(flags.name)) if file else ""

    def launch() -> Launch:
        pieces = tuple((Text(word, NOWHERE),) for word, _ in words)
        return Launch(PROGRAM, pieces, (), {}, 1, tuple(line for _, line in words))

    own = next((spell_pieces(name) for _, name, _ in _configs(launch())), "")
    if own and file and find(own, folder_of(flags.name)) != find(place, folder_of(flags.name)):
        raise BridgeError(
            f"{flags.name}: names the DeepSpeed file {own}, and {file} is given; give one of them"
        )
    if not own and file:
        words += ((word, 0) for word in ("--deepspeed", OPTIONS[0], place))
    script = Script("", flags.name)
    script.__dict__["launches"] = (launch(),)
    return replace(flags, data=script) if own or file else None


def _without_config(launch: Launch) -> str:
    """Return a sentence on a launch with DeepSpeed whose program makes the config itself; otherwise an
    empty string.
    """
    if TRAINER not in launch.texts or set(_names(launch)) >= MODEL:
        return ""
    return (
        f"a launch of {launch.program} with {TRAINER} and without a config file, so that the program"
        " itself makes DeepSpeed's config from its flags, and stagebridge does not run it; write the"
        " mapping that the program passes to deepspeed.initialize into a file, and give that file"
    )


def _names(launch: Launch) -> list[str]:
    return [text.partition("=")[0].removeprefix("--") for text in launch.texts]


def _file_opener(script: Script, launch: Launch) -> accelerated.Opens:
    """Return the function that reads a file that the launch names: a file beside it, or one that the script writes."""

    def read_named_file(path: Pieces, line: int) -> Document:
        content = launch.file(path)
        return (
            _read_beside(script, launch, path, line)
            if content is None
            else _read_here(script, content, spell_pieces(path))
        )

    return read_named_file


def read(script: Script, arguments: Mapping[str, Any] | None = None) -> Found:
    """Return the config that the script passes to its run; `arguments` are the Trainer's that the
    caller gives next to it, None for a run without them. Raises `BridgeError` unless
    exactly one command gets a config and the config's text is known.
    """
    launch = script.launch(lambda launch: is_launch(launch, script), "--deepspeed_config")
    own = next(_configs(launch), None)
    accelerate_config = _read_accelerated(launch, script, arguments) if own is None else None
    if accelerate_config is not None:
        return accelerate_config
    # Of an option that is given twice, the last one counts.
    same = (config for config in _configs(launch) if own and config[0] == own[0])
    *_, (_, path, line) = ("", (), launch.line), *same
    content = path if _is_inline(path) else launch.file(path)
    document = (
        _read_beside(script, launch, path, line) if content is None else _read_here(script, content)
    )
    options = {name: value for name, value, _ in _arguments(launch)}
    usual = _trainer_arguments(launch, {**SHOWN, **DATED, **DEFAULTS, **COURSE, **TRAINED})
    by_trainer, assumption = _starts_trainer(launch, script)
    by_option = own is not None and own[0] == TRAINER
    usual, told, assigned = _add_arguments(launch, script, usual, arguments, by_option)
    file = Path(document.name).name if content is None else ""
    twins = _find_twins(script, path, line) if content is None else ()
    findings = (
        *told,
        *_find_unread(launch, options, document),
        *twins,
        *(assumption if arguments is None else ()),
        *_find_programs(launch, by_trainer),
        *(_find_unknown_words(launch, script) if by_trainer else ()),
        *find_assumptions(script, launch),
    )
    words = [one for one in _configs(launch) if own and one[0] == own[0]]
    # Of a launch that stands for a config next to this file, nobody wrote the words.
    place = None if document.name == script.name and content is None else line
    winner = Said(words[-1][0] if words else "", brief(spell_pieces(path)), script.name, place)
    options_at = [at for at, text in enumerate(launch.texts) if text == winner.setting]
    if said := launch.sources.get(max(options_at, default=-1)):
        winner = Said(said[0], winner.value, said[1], said[2])
    passed = accelerated.pass_on(launch, script, _file_opener(script, launch), winner)
    why = accelerated.describe_winner(winner)
    unheard = [*passed.unheard]
    unheard += [
        Unheard(Said(option, spell_pieces(value), "", at), why)
        for option, value, at in words[:-1]
        if spell_pieces(value) != winner.value
    ]
    if not by_trainer and arguments is None:
        unheard += [
            Unheard(said, why, IGNORED.get(name, Effect.COST))
            for name, said in passed.environment.items()
            if name in accelerated.BESIDE.values()
        ]
    return Found(
        document,
        usual,
        by_trainer,
        _code(options),
        launch.ranks or passed.ranks,
        (*findings, *passed.findings),
        file,
        environment=passed.environment,
        sources=Sources(unheard=tuple(unheard)),
        assigned=assigned,
    )


def _read_accelerated(
    launch: Launch, script: Script, arguments: Mapping[str, Any] | None
) -> Found | None:
    """Return the config that accelerate passes to DeepSpeed; None if it does not start the run."""
    usual = _trainer_arguments(launch, {**SHOWN, **DATED, **DEFAULTS, **TRAINED})
    by_trainer, _ = trainer_detection.evidence(
        trainer_detection.read(launch.program, folder_of(script.name)), _flags(launch)
    )
    by_trainer = by_trainer or arguments is not None
    usual, told, assigned = _add_arguments(launch, script, usual, arguments)
    beside = getattr(arguments, "places", {})
    said = {**usual.places, **beside, **assigned.places} if by_trainer else {}
    halves = (replace(said[name], setting=f"--{name}") for name in ("fp16", "bf16") if name in said)
    precision = next((one for one in halves if one.value is True), None)
    call = read_call(launch, folder_of(script.name))
    on_cpu = [one for name, one in call.values.items() if name == "cpu" and one.value is not False]
    if not by_trainer and "mixed_precision" in call.values:
        said_of_call = call.values["mixed_precision"]
        precision = replace(said_of_call, setting=str(said_of_call.value))
    launch_config = accelerated.read(
        launch, script, _file_opener(script, launch), precision, call.values
    )
    if launch_config is None:
        return None
    data = launch_config.document.data
    clip = data.get("gradient_clipping") if isinstance(data, Mapping) else None
    findings = (
        *launch_config.findings,
        *told,
        *call.findings,
        *find_clipping(launch, folder_of(script.name), clip),
        *(
            unknown(one.setting, ON_CPU, origin=Origin(one.line, "", one.source), end="")
            for one in on_cpu
        ),
        *_find_programs(launch, by_trainer),
        *(_find_unknown_words(launch, script) if by_trainer else ()),
        *find_assumptions(script, launch),
    )
    file = Path(launch_config.document.name).name
    return Found(
        launch_config.document,
        usual,
        by_trainer,
        {},
        launch_config.ranks,
        findings,
        file,
        launch_config.facts,
        sources=launch_config.sources,
        assigned=assigned,
    )


def _add_arguments(
    launch: Launch,
    script: Script,
    arguments: Placed,
    beside: Mapping[str, Any] | None,
    by_option: bool = False,
) -> tuple[Placed, tuple[Finding, ...], Placed]:
    """Return the arguments of a launch under those that its program writes in a call, and over the defaults of trl, if
    the program takes them by a class of trl; and what the program assigns after the call, which counts over
    arguments that are given `beside` the launch too. `by_option` says that an option gives the Trainer its file.
    """
    folder = folder_of(script.name)
    names = {**SHOWN, **DATED, **DEFAULTS, **COURSE, **TRAINED}
    flags = {*arguments, *({FILE} if by_option else ())}
    call = read_arguments_call(launch, folder, flags, names, beside)
    given = {name: said for name, said in call.values.items() if name not in call.assigned}
    values = {name: said.value for name, said in given.items()}
    arguments = arguments.overlay(Placed(values, given), CALL_WINS)
    usual, told = find_defaults_of_trl(launch, folder, arguments)
    values = {name: said.value for name, said in usual.items()}
    found = Placed({**values, **arguments}, {**usual, **arguments.places}, arguments.lost)
    assigned = Placed({name: said.value for name, said in call.assigned.items()}, call.assigned)
    assigned.unknown |= call.changed
    return found, (*call.findings, *told), assigned


def _find_unknown_words(launch: Launch, script: Script) -> Iterator[Finding]:
    """Yield a finding for each word of a launch with the Trainer that may be more of its arguments, and
    for each argument of unknown value that a run has and no DeepSpeed file. Raises `ConfigError` for
    unknown values of arguments that a DeepSpeed file takes.
    """
    problems, values = [], set[int]()
    for index, text in enumerate(launch.texts):
        option, tied, _ = text.partition("=")
        at = index if tied else index + 1
        name = name_argument(option) if option.startswith("--") else None
        switch = isinstance(DEFAULTS.get(name or ""), bool) and at in launch.loose
        if not option.startswith("--") or switch or at not in launch.opaque:
            continue
        values.add(at)
        message = f"{option}: {launch.opaque[at]}"
        if name in DEFAULTS:
            problems.append(f"{script.name}: line {launch.lines[at]}: {message}")
        elif name in COURSE or name in TRAINED:
            yield unknown(option, launch.opaque[at], origin=Origin(launch.lines[at]), end="")
    ConfigError.raise_if(problems)
    for at in sorted(launch.loose - values):
        message = f"may contain flags: {launch.opaque[at]}"
        yield unknown(launch.texts[at], message, origin=Origin(launch.lines[at]), end="")


def _find_programs(launch: Launch, by_trainer: bool) -> Iterator[Finding]:
    """Yield a finding on the program of a launch and on each of its arguments that no config has.

    They belong to the training script, so a translation of the config loses none of them. Nothing
    tells what they do to the run, apart from arguments that the Trainer does not train by.
    """
    read_here = {*LAUNCHED, *(option for option, _, _ in _configs(launch))}
    if by_trainer:
        read_here |= {f"--{name}" for name in {*DEFAULTS, *COURSE, *TRAINED} - UNSURE}
    own: dict[str, list[str]] = {Path(launch.program).name: []}
    for text in launch.texts:
        option, tied, value = text.partition("=")
        if option.startswith("--"):
            name = name_argument(option) if by_trainer else None
            option = f"--{name}" if name else option
            own[option] = [value] if tied else []
        else:
            own[[*own][-1]].append(text)
    quiet = {f"--{name}" for name in QUIET} if by_trainer else set()
    for option, values in own.items():
        if option not in read_here:
            change = " ".join(values)
            origin, is_quiet = Origin(launch.line), option in quiet
            yield Finding(
                brief(option),
                SCRIPTS,
                Effect.NONE,
                origin=origin,
                change=change,
                unknown=not is_quiet,
            )


def _starts_trainer(launch: Launch, script: Script) -> tuple[bool, tuple[Finding, ...]]:
    """Return whether Hugging Face's Trainer starts the run, and a finding if the option that names
    the config file is the Trainer's, but nothing shows that there is a Trainer.
    """
    line = next((line for option, _, line in _configs(launch) if option == TRAINER), None)
    if line is None:
        return False, ()
    program = trainer_detection.read(launch.program, folder_of(script.name))
    by_trainer, why = trainer_detection.evidence(program, _flags(launch))
    if by_trainer:
        return True, ()
    # A program with this option in its own parser reads the file itself.
    own = program is not None and TRAINER in program.options
    why = f"its own parser takes {TRAINER}, and it imports no Trainer" if own else why
    message = (
        f"nothing shows that Hugging Face's Trainer runs {launch.program}: {why}; stagebridge assumes"
        " that DeepSpeed gets the file as it is; if the Trainer runs it, give its TrainingArguments with"
        " --auto-from"
    )
    effect = Effect.NONE if own else Effect.NUMBERS
    return False, (Finding(TRAINER, message, effect, origin=Origin(line)),)


def _flags(launch: Launch) -> set[str]:
    return {text.partition("=")[0] for text in launch.texts if text.startswith("--")}


def _find_unread(
    launch: Launch, options: Mapping[str, str], document: Document
) -> Iterator[Finding]:
    """Yield a finding on a launch of Megatron-DeepSpeed, whose flags its caller's reader reads, and those on what
    of DeepSpeed the flags ask for.
    """
    if not set(_names(launch)) >= MODEL:
        return
    yield Finding(CALLED, UNREAD, Effect.NUMBERS, origin=Origin(launch.line))
    section = document.data.get("zero_optimization") if isinstance(document.data, Mapping) else None
    stage = section.get("stage", 0) if isinstance(section, Mapping) else int(bool(section))
    piped = "no-pipeline-parallel" not in options and Path(launch.program).name in PIPED
    said = scalar(options.get("zero-stage", "1"))
    if stage in (2, 3) and piped:
        origin = Origin(launch.line)
        yield Finding("zero_optimization.stage", PIPES, Effect.STOPS, True, origin=origin)
    if said != stage and 3 in (said, stage):
        effect = Effect.NUMBERS if said == 3 else Effect.COST
        message = STAGES.format(said, stage)
        yield Finding("--zero-stage", message, effect, origin=Origin(launch.line), surprising=True)
    if options.get("num-experts", "1") != "1":
        yield Finding("--num-experts", EXPERTS, Effect.NUMBERS, True, origin=Origin(launch.line))


def _configs(launch: Launch) -> Iterator[tuple[str, Pieces, int]]:
    """Yield the options that name a config file, each with the word that is the name, and with the line of this word."""
    for index, (word, text) in enumerate(zip(launch.words, launch.texts, strict=True)):
        option, tied, _ = text.partition("=")
        at = index if tied else index + 1
        value = (
            cut(word, len(option) + 1)
            if tied
            else launch.words[at]
            if at < len(launch.words)
            else ()
        )
        inline = option == TRAINER and _is_inline(value)
        open_ = _names_file(value) or inline or (option != TRAINER and text_if_known(value) is None)
        if value and (option in OPTIONS or (SPELLED.fullmatch(option) and open_)):
            yield option, value, launch.lines[at]


def _is_inline(word: Pieces) -> bool:
    """Whether a word is a DeepSpeed config itself: HfArgumentParser takes one as JSON (training_args.py: _VALID_DICT_FIELDS)."""
    return spell_pieces(word).startswith("{")


def _names_file(word: Pieces) -> bool:
    return spell_pieces(word).endswith((".json", ".hjson")) and not spell_pieces(word).startswith(
        "-"
    )


def _read_here(script: Script, content: Pieces, name: str = ".hjson") -> Document:
    """Return the config that the script itself writes to the file `name`."""
    ConfigError.raise_if(
        f"{script.name}: line {part.line}: the value of {part.spelling} is not known: {part.why}"
        for part in unknowns(content)
    )
    document = parse(
        spell_pieces(content),
        script.name,
        Path(name).suffix if Path(name).suffix in YAML else ".hjson",
    )
    # Lines are counted from the script's first, so that a message
    # points into the file that the user has.
    first = (line_of(content, script.text) or 1) - 1
    return replace(document, lines={key: line + first for key, line in document.lines.items()})


def _read_beside(script: Script, launch: Launch, path: Pieces, line: int) -> Document:
    """Return the config file, which must be in the script's folder, in the current folder, or in a
    folder that the user allowed.
    """
    name = launch.place(path) or text_if_known(cut_folder(path))
    if name is None:
        part = next(unknowns(cut_folder(path)))
        raise SourceError(
            f"{script.name}: line {line}: the name of the config contains {part.spelling}, whose"
            f" value is not known: {part.why}"
        )
    place = find(name, folder_of(script.name))
    if place is None:
        raise SourceError(
            f"{script.name}: line {line}: {name}: no such file in the script's folder or in the"
            " current folder; put the file there, or pass the folder in which the script starts"
            " with --allow-path FOLDER"
        )
    return load(place)


def _find_twins(script: Script, path: Pieces, line: int) -> Iterator[Finding]:
    """Yield a finding if a relative name stands for different files in the script's folder and in the current one."""
    name, folder = text_if_known(path), folder_of(script.name)
    if name is None or folder is None or Path(name).is_absolute():
        return
    own, here = find(name, folder), find(name, Path())
    if own and here and own.read_bytes() != here.read_bytes():
        message = f"{own} is read, next to the script; started in the current folder, the script reads {here}"
        yield Finding(
            "config", f"{message}; remove one of the two", Effect.NUMBERS, origin=Origin(line)
        )


def cut_folder(path: Pieces) -> Pieces:
    """Return a path that begins with `$PWD/` as a path relative to the folder in which the script
    starts. Return other paths unchanged.
    """
    first = spell_pieces(path[:1])
    return (
        cut(path[1:], 1)
        if first in WORKING_FOLDER and spell_pieces(path[1:]).startswith("/")
        else path
    )


def _trainer_arguments(launch: Launch, names: Mapping[str, Any]) -> Placed:
    """Return the arguments of `names` that a command gives. HfArgumentParser takes each flag with
    dashes too, and of a flag that is given twice the last one counts.
    """
    arguments = Placed({}, {})
    for option, text, at in _arguments(launch):
        name = name_argument(f"--{option}") or option.replace("-", "_")
        value = read_word(name, text, f"--{option}")
        if name in names:
            setting, source, line = launch.place_of(at, f"--{option}")
            said = Said(setting, value, source, line)
            if name in arguments:
                arguments.lost.append(
                    Unheard(
                        arguments.places[name],
                        f"given again on line {said.line}; the last one counts",
                    )
                )
            arguments[name], arguments.places[name] = value, said
    return arguments


def _arguments(launch: Launch) -> Iterator[tuple[str, str, int]]:
    """Yield name, value and index of each option in a command, if the value of the option is known.
    Names have no dashes. An option without a value has the value `true`.
    """
    words: Sequence[str | None] = [text_if_known(word) for word in launch.words]
    for index, word in enumerate(words):
        if word is None or not word.startswith("--"):
            continue
        name, tied, value = word.removeprefix("--").partition("=")
        after = words[index + 1] if index + 1 < len(words) else "--"
        # What may expand to nothing leaves a switch without a value.
        argument = DEFAULTS.get(name_argument(word.partition("=")[0]) or "")
        if isinstance(argument, bool) and index + 1 in launch.loose:
            after = "--"
        if tied:
            yield name, value, index
        elif after is not None:
            yield name, "true" if after.startswith("--") else after, index


def _code(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the code part that flags of Megatron-DeepSpeed set. Sizes of one rank are left out."""
    sizes = {name: scalar(options[flag]) for flag, name in CODE.items() if flag in options}
    # With this flag the model is no PipelineModule, whatever the
    # size of the axis (its pretrain_gpt.py, model_provider).
    if "no-pipeline-parallel" in options:
        sizes.pop("pipeline_stages", None)
    checkpointing = (
        {"checkpointing": True} if "deepspeed-activation-checkpointing" in options else {}
    )
    return {name: size for name, size in sizes.items() if size != 1} | checkpointing
