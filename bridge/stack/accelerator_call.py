"""The call of accelerate's `Accelerator` in a program, read from the syntax: a source of the run next to its launch.

What wins is in accelerate's Accelerator.__init__ (accelerator.py) and AcceleratorState (state.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bridge.errors import BridgeError
from bridge.files import find, find_calls, read_text
from bridge.stack.findings import Finding, Origin, unknown
from bridge.stack.sources import Said

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


def _name_unread(arguments: Mapping[str, tuple[str, int]], program: str) -> Iterator[Finding]:
    for name, (text, line) in arguments.items():
        if name not in QUIET:
            message = f"{text} is not read, and may set what the launch leaves open or overrule it"
            yield unknown(f"{NAME}({name})", message, origin=Origin(line, "", program), end="")
