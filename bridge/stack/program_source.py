"""What a program's text says of its run: its call of accelerate's `Accelerator`, and the class of its arguments.

What wins is in accelerate's Accelerator.__init__ (accelerator.py) and AcceleratorState (state.py).
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bridge.errors import BridgeError
from bridge.files import find, find_calls, read_text
from bridge.stack.findings import Finding, Origin, unknown
from bridge.stack.sources import Said
from bridge.stack.training_arguments import TRL, default_of_trl

NAME = "Accelerator"
READ = ("mixed_precision", "gradient_accumulation_steps", "cpu")
"""Arguments that are read where they are literals."""
QUIET = frozenset(("device_placement", "log_with", "project_config", "project_dir", "rng_types"))
"""Arguments that no step depends on."""
PRECISION_WINS = "the argument of Accelerator wins over the launch; drop one of the two"
VARIABLE_WINS = "the launch wins over the argument of Accelerator; drop one of the two"


@dataclass(frozen=True)
class Told:
    """What the call says by name of the argument, and a finding for each argument that is not read."""

    values: Mapping[str, Said] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


def read_call(program: str, folder: Path | None) -> Told:
    """Return what the call of `Accelerator` in a program says; nothing if the program is not there or has no call."""
    try:
        path = find(program, folder) if program.endswith(".py") else None
        calls = find_calls(read_text(path), (NAME,)) if path else ()
    except BridgeError:
        return Told()
    if not calls:
        return Told()
    if len(calls) > 1:
        lines = ", ".join(str(call.line) for call in calls)
        message = f"found {len(calls)} calls (lines {lines}), and which of them the run makes is not known"
        return Told(
            {}, (unknown(NAME, message, origin=Origin(calls[0].line, "", program), end=""),)
        )
    values = {
        name: Said(f"{NAME}({name})", value, program, line)
        for name, (value, line) in calls[0].values.items()
        if name in READ and value is not None
    }
    others = {
        name: (repr(value), line)
        for name, (value, line) in calls[0].values.items()
        if name not in READ and value not in (None, False)
    }
    return Told(values, tuple(_name_unread({**others, **calls[0].unread}, program)))


def find_defaults_of_trl(
    program: str, folder: Path | None, given: Collection[str]
) -> tuple[Mapping[str, Said], tuple[Finding, ...]]:
    """Return the defaults of the class of trl by which a program takes its arguments, without those that are `given`;
    and a finding if it imports several classes.
    """
    try:
        path = find(program, folder) if program.endswith(".py") else None
        nodes = ast.walk(ast.parse(read_text(path))) if path else iter(())
    except (BridgeError, SyntaxError, ValueError, RecursionError, MemoryError):
        return {}, ()
    imports = (node for node in nodes if isinstance(node, ast.ImportFrom))
    own = (node for node in imports if (node.module or "").partition(".")[0] == "trl")
    names = sorted({one.name for node in own for one in node.names} & TRL["defaults"].keys())
    if len(names) > 1:
        message = f"imports {', '.join(names)} of trl, whose defaults differ, and which it uses is not known"
        return {}, (unknown(program, message, end=""),)
    usual = default_of_trl(names[0], given).places if names else {}
    return {name: said for name, said in usual.items() if name not in given}, ()


def _name_unread(arguments: Mapping[str, tuple[str, int]], program: str) -> Iterator[Finding]:
    for name, (text, line) in arguments.items():
        if name not in QUIET:
            message = f"{text} is not read, and may set what the launch leaves open or overrule it"
            yield unknown(f"{NAME}({name})", message, origin=Origin(line, "", program), end="")
