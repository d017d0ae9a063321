"""Says why a command was refused: its error, or what its words do not mean."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from bridge.cli import mistakes, under_launcher
from bridge.cli.terminal import complain, note, print_json
from bridge.errors import BridgeError
from bridge.files.printable import brief, clean_block
from bridge.report.exit_codes import Exit
from bridge.stack import registry


def report(arguments: list[str], error: Any) -> Exit:
    """Print why a command was refused: a `BridgeError`, or the parser's own error. Returns the exit code."""
    explain = _report_refusal if isinstance(error, BridgeError) else _report_misuse
    return explain(arguments, error)


def _report_refusal(arguments: list[str], error: BridgeError) -> Exit:
    """Print why a command was refused, once for all ranks with the same problems. Returns the exit
    code.
    """
    problems = mistakes.instead(arguments, error, registry.names())
    with under_launcher.once(problems) as mine:
        if mine and (error.as_object or _asks_json(arguments)):
            _print_object(arguments, problems)
        if mine:
            complain(problems)
        if mine and error.words:
            note(
                "the command with the missing options: "
                f"{shlex.join(('stagebridge', *arguments, *error.words))}"
            )
    return under_launcher.code(mine)


def _report_misuse(arguments: list[str], error: Any) -> Exit:
    """Print what the parser found wrong or, if it is known, what the user meant. Returns the exit
    code.
    """
    correction = mistakes.corrected_command(arguments, registry.names())
    error.message = brief(clean_block(correction or error.message))
    message = correction or brief(clean_block(error.format_message()))
    with under_launcher.once([message]) as mine:
        if mine and _asks_json(arguments):
            _print_object(arguments, [message])
        if mine and correction:
            complain([correction])
        elif mine:
            error.show()
    return under_launcher.code(mine)


def _asks_json(arguments: list[str]) -> bool:
    """Return whether a refused command line asks for JSON.

    Words after `--` are not looked at: they belong to another command.
    """
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in own or "--format=json" in own or ("--format", "json") in pairwise(own)


def _print_object(arguments: list[str], problems: Sequence[str]) -> None:
    """Print an error as a JSON object; `train` prints each object on one line."""
    print_json({"problems": list(problems), "exit_code": Exit.ERROR}, lines=arguments[0] != "train")
