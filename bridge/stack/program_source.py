"""What a program's text says of its run: its calls of accelerate's `Accelerator` and of the Trainer's arguments.

What wins is in accelerate's Accelerator.__init__ (accelerator.py) and AcceleratorState (state.py).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError
from bridge.files import (
    Call,
    Launch,
    find,
    find_calls,
    find_defaults,
    find_imports,
    find_methods,
    find_parsed,
    find_variables,
    read_text,
    scalar,
)
from bridge.shell import spell_pieces
from bridge.shell.word_pieces import NOWHERE, Text
from bridge.stack.findings import Finding, Origin, unknown
from bridge.stack.rules import Effect
from bridge.stack.sources import Said
from bridge.stack.training_arguments import (
    ARGUMENTS,
    QUIET as NO_STEP,
    RETIRED,
    TRL,
    default_of_trl,
)

NAME, HOST_FILE = "Accelerator", "deepspeed"
READ = ("mixed_precision", "gradient_accumulation_steps", "cpu")
"""Arguments that are read where they are literals."""
QUIET = frozenset(("device_placement", "log_with", "project_config", "project_dir", "rng_types"))
"""Arguments that no step depends on."""
PRECISION_WINS = "the argument of Accelerator wins over the launch; drop one of the two"
CLASSES = ("TrainingArguments", "Seq2SeqTrainingArguments", *TRL["defaults"])
"""Classes whose call gives the Trainer its arguments."""
VARIABLES = re.compile(r"(ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG)_[A-Z0-9_]+")
"""Variables that accelerate reads in the program."""
SET_BY_PROGRAM = "the program sets it, which is not read, and may overrule the launch"
MODULES = 100
"""Largest number of modules of a program that are looked through."""
GIVE = "give their values with --with NAME=VALUE"
CHANGED = "changed after the call, which stagebridge does not read"
LATE = frozenset(
    {
        "data_seed", "dataloader_drop_last", "label_smoothing_factor", "lr_scheduler_kwargs", "lr_scheduler_type",
        "max_steps", "neftune_noise_alpha", "num_train_epochs", "optim", "seed", "train_sampling_strategy",
        "warmup_steps",
    }
)  # fmt: skip
"""Arguments that the Trainer takes from the object when it is built or trains, so that assignments count until then;
a test runs it with each. The others have had their effect in the call (TrainingArguments.__post_init__).
"""
QUIET_METHODS = frozenset(
    ("set_evaluate()", "set_logging()", "set_push_to_hub()", "set_save()", "set_testing()")
)
"""Methods of TrainingArguments whose arguments no step depends on."""
FILLING = frozenset(
    {
        "adam_beta1", "adam_beta2", "adam_epsilon", "gradient_accumulation_steps", "learning_rate", "max_grad_norm",
        "per_device_train_batch_size", "weight_decay",
    }
)  # fmt: skip
"""Arguments that fill in the DeepSpeed file of the call in that call (trainer_config_process), and are late without one."""
CLIPS: Mapping[str, tuple[str, Effect]] = {
    "clip_grad_norm_": (
        "accelerate clips nothing here under DeepSpeed, whose gradient_clipping alone counts; set that in the DeepSpeed"
        " file to the value of this call",
        Effect.NUMBERS,
    ),
    "clip_grad_value_": (
        "accelerate refuses this call under DeepSpeed; drop it, and set gradient_clipping in the DeepSpeed file",
        Effect.STOPS,
    ),
}
CALL_WINS = "the call in the program counts, not the command"
UNKNOWN = "unknown"
CHANGES = "the program changes it, so give its value with --with {}=VALUE"
ASSIGNED = "the program assigns it last; change it there"
VARIABLE_WINS = "the launch wins over the argument of Accelerator; drop one of the two"


@dataclass(frozen=True)
class Told:
    """What the call says by name of the argument, and a finding for each argument that is not read.

    `assigned` are the values that the object gets after the call, and `changed` the arguments that the program changes
    so that the value in force is not known; one that it assigns after its effect has that value.
    """

    values: Mapping[str, Said] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    assigned: Mapping[str, Said] = field(default_factory=dict)
    changed: Mapping[str, Said] = field(default_factory=dict)


def read_call(launch: Launch, folder: Path | None) -> Told:
    """Return what the program of a launch says by its call of `Accelerator` and by variables of accelerate that it sets;
    nothing if the program is not there or says neither.
    """
    variables = tuple(
        unknown(name, SET_BY_PROGRAM, origin=Origin(line, "", launch.program), end="")
        for name, line in find_variables(_read_program(launch, folder)).items()
        if VARIABLES.fullmatch(name)
    )
    launch, text = _find_module(launch, folder, (NAME,))
    call, findings = _find_call(text, (NAME,), launch.program)
    if call is None:
        return Told({}, (*findings, *variables))
    values = _say(call, launch.program)
    others = {
        name: (repr(value), line)
        for name, (value, line) in call.values.items()
        if name not in READ and value not in (None, False)
    }
    return Told(
        {name: said for name, said in values.items() if name in READ},
        (*_name_unread({**others, **call.unread}, launch.program), *variables),
    )


def find_clipping(launch: Launch, folder: Path | None, in_file: Any) -> Iterator[Finding]:
    """Yield a finding for each call of accelerate's clipping in the program of a launch, which does not clip under
    DeepSpeed, unless it asks for what the file says.

    Source: accelerate/accelerator.py (clip_grad_norm_, clip_grad_value_).
    """
    launch, text = _find_module(launch, folder, (NAME,))
    for call in find_methods(text, CLIPS) if find_calls(text, (NAME,)) else ():
        asked = call.unread.get("argument 2", ("", 0))[0]
        value = call.values.get("max_norm", (scalar(asked), 0))[0]
        message, effect = CLIPS[call.name]
        origin = Origin(call.line, "", launch.program)
        if effect is not Effect.STOPS and isinstance(value, str):
            yield unknown(call.name, f"{message} ({value} is not read)", origin=origin, end="")
        elif effect is Effect.STOPS or value != in_file:
            yield Finding(call.name, message, effect, True, origin=origin, surprising=True)


def read_arguments_call(
    launch: Launch,
    folder: Path | None,
    flags: Collection[str],
    names: Collection[str],
    beside: Mapping[str, Any] | None = None,
) -> Told:
    """Return what the program of a launch says by a call of TrainingArguments, or of a class of trl: arguments of
    `names` that are literals, and a finding on the others. What it passes on from one of the `flags` of the launch is
    no news. Without a call, the defaults count that a class of its own gives to arguments without a flag.

    What it assigns to the object of the call, or of a parser, counts behind that. Of arguments that the user gives
    `beside` the launch, only the assignments are news.
    """
    start, given = launch, beside or {}
    launch, text = _find_module(launch, folder, CLASSES)
    call, findings = _find_call(text, CLASSES, launch.program)
    own = find_defaults(text, CLASSES)
    program = launch.program
    if call is None and not findings:
        classes = (*CLASSES, *(one.name for one in own))
        # The program may have its class in another module.
        texts = {start.program: _read_program(start, folder), program: text}
        found = ((name, find_parsed(one, classes)) for name, one in texts.items())
        program, parsed = next((one for one in found if one[1]), (program, None))
        call = own[0] if len(own) == 1 else parsed
        if call is None:
            return Told()
        values, unread = (
            {name: one for name, one in rows.items() if name not in flags}
            for rows in (call.values, call.unread)
        )
        later = (parsed.later, parsed.changes) if parsed else ({}, {})
        call = replace(call, values=values, unread=unread, later=later[0], changes=later[1])
        news = {*ARGUMENTS, *RETIRED} & {*unread}
    elif call is None:
        return Told({}, findings)
    else:
        news = {*call.unread}
    has_file = any((HOST_FILE in flags, given.get(HOST_FILE), HOST_FILE in call.unread))
    has_file = has_file or call.values.get(HOST_FILE, (None, 0))[0] is not None
    assignments, changes = sort_changes(call, program, has_file)
    # A value that the user gives by hand is the one in force.
    typed = {name for name, said in getattr(given, "places", {}).items() if not said.line}
    lost = {
        name: line
        for name, (source, line) in call.unread.items()
        if name in news and name not in NO_STEP and name != "argument 1"
        if not (name in flags and source.endswith(f".{name}"))
        if name not in given and name not in assignments
    }
    findings = tuple(
        unknown(said.setting, CHANGED, origin=Origin(said.line, "", program), end="")
        for name, said in changes.items()
        if name not in typed
    )
    if lost:
        message = f"{', '.join(lost)}: no literals, so they are not read, and may overrule the launch; {GIVE}"
        origin = Origin(min(lost.values()), "", launch.program)
        findings = (unknown(call.name, message, origin=origin, end=""), *findings)
    said = {name: one for name, one in _say(call, launch.program).items() if name in names}
    assignments = {
        name: one for name, one in assignments.items() if name in names and name not in typed
    }
    changes = {name: one for name, one in changes.items() if name in names and name not in typed}
    return Told({**said, **assignments}, findings, assignments, changes)


def sort_changes(
    call: Call, program: str, has_file: bool
) -> tuple[dict[str, Said], dict[str, Said]]:
    """Return the values that a call's object gets before the Trainer takes them, and each other change of it."""
    names = LATE if has_file else LATE | FILLING
    # None may stand for a default, which nobody reads here.
    late = {name: one for name, one in call.later.items() if name in names and one[0] is not None}
    early = {name: value for name, (value, _) in call.later.items() if name not in names}
    arguments = {*ARGUMENTS, *RETIRED, *call.values, *call.unread}
    changes = {
        name: Said(f"{call.name}({name})", early.get(name), program, line)
        for name, line in {
            **{name: line for name, (_, line) in call.later.items()},
            **call.changes,
        }.items()
        if name not in late
        if name in arguments or call.name in TRL["defaults"] or not name.isidentifier()
        if name not in NO_STEP | QUIET_METHODS
    }
    return _say(replace(call, values=late), program), changes


def _say(call: Call, program: str) -> dict[str, Said]:
    return {
        name: Said(f"{call.name}({name})", value, program, line)
        for name, (value, line) in call.values.items()
        if value is not None
    }


def _find_call(
    text: str, names: Collection[str], program: str
) -> tuple[Call | None, tuple[Finding, ...]]:
    """Return the one call of `names`; None and a finding if there are several."""
    calls = find_calls(text, names)
    if len(calls) < 2:
        return (calls[0] if calls else None), ()
    lines = ", ".join(str(call.line) for call in calls)
    message = (
        f"found {len(calls)} calls (lines {lines}), and which of them the run makes is not known"
    )
    origin = Origin(calls[0].line, "", program)
    return None, (unknown(calls[0].name, message, origin=origin, end=""),)


def _read_program(launch: Launch, folder: Path | None) -> str:
    """Return the text of the program of a launch, a file or a module; empty if it is not there."""
    name = launch.program
    name = name if name.endswith(".py") else f"{name.replace('.', '/')}.py"
    word = (Text(name, NOWHERE),)
    written = launch.file(word)
    try:
        path = find(launch.place(word) or name, folder)
        return spell_pieces(written) if written else read_text(path) if path else ""
    except BridgeError:
        return ""


def _find_module(launch: Launch, folder: Path | None, names: Collection[str]) -> tuple[Launch, str]:
    """Return a launch of the file that calls one of `names`, or derives a class from it, and its text: its program's,
    else that of the modules next to it, which it imports.
    """
    seen, found = dict[str, str](), list[str]()
    waiting = [launch.program]
    while waiting and len(seen) < MODULES:
        name = waiting.pop(0)
        text = seen[name] = _read_program(replace(launch, program=name), folder)
        if find_calls(text, names) or find_defaults(text, names):
            found.append(name)
        if not found or name == launch.program:
            place = Path(launch.program).parent if launch.program.endswith(".py") else Path()
            own = (str(place / f"{one.replace('.', '/')}.py") for one in find_imports(text))
            waiting += (one for one in own if one not in seen and one not in waiting)
        if found == [launch.program]:
            break
    # Of several modules, nobody knows which is run: all their calls are counted.
    name = found[0] if found else launch.program
    return replace(launch, program=name), "\n".join(seen[one] for one in found) or seen[
        launch.program
    ]


def find_defaults_of_trl(
    launch: Launch, folder: Path | None, given: Collection[str]
) -> tuple[Mapping[str, Said], tuple[Finding, ...]]:
    """Return the defaults of the class of trl by which a program takes its arguments, without those that are `given`;
    and a finding if it imports several classes.
    """
    try:
        nodes = [*ast.walk(ast.parse(_read_program(launch, folder)))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}, ()
    imports = (node for node in nodes if isinstance(node, ast.ImportFrom))
    own = (node for node in imports if (node.module or "").partition(".")[0] == "trl")
    names = sorted({one.name for node in own for one in node.names} & TRL["defaults"].keys())
    if len(names) > 1:
        message = f"imports {', '.join(names)} of trl, whose defaults differ, and which it uses is not known"
        return {}, (unknown(launch.program, message, end=""),)
    usual = default_of_trl(names[0], given).places if names else {}
    return {name: said for name, said in usual.items() if name not in given}, ()


def _name_unread(arguments: Mapping[str, tuple[str, int]], program: str) -> Iterator[Finding]:
    for name, (text, line) in arguments.items():
        if name not in QUIET:
            message = f"{text} is not read, and may set what the launch leaves open or overrule it"
            yield unknown(f"{NAME}({name})", message, origin=Origin(line, "", program), end="")
