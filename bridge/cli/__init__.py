"""The `stagebridge` command."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NoReturn

from bridge.errors import BridgeError
from bridge.files.printable import brief, clean_block
from bridge.files.secrets import HIDDEN
from bridge.report.exit_codes import Exit

COMPLETE = "_STAGEBRIDGE_COMPLETE"
"""The environment variable with which the script of a shell asks for completions."""
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def main() -> NoReturn:
    """Run the command line.

    Each `BridgeError` and each usage error is printed as one message on stderr, with exit code 1.
    """
    from bridge.cli.terminal import accept_all_characters

    try:
        if sys.stdout is None:  # closed by whoever started the command
            sys.exit("error: standard output: closed; send it to a file, or to /dev/null")
        accept_all_characters()
        code = run(sys.argv[1:])
        # A reader that went away shows itself at the flush; at the end of the interpreter nobody could catch it.
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader went away: nothing is left to say.
        code = _unheard()
    except OSError as error:
        if _writable():
            raise
        sys.stderr.write(f"error: standard output: cannot be written ({error.strerror})\n")
        code = _unheard()
    except KeyboardInterrupt as error:
        for line in getattr(error, "__notes__", ()):
            sys.stderr.write(f"note: {line}\n")
        code = INTERRUPTED
    sys.exit(code)


def _writable() -> bool:
    """Return whether stdout can be written. If it can, a new line is."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _unheard() -> int:
    """Discard what stdout has not written yet, so that Python's own flush at exit says nothing of
    it. Returns the exit code.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(Exit.ERROR)


@cache
def _command() -> Callable[..., Any]:
    """Return the command line as click's command, which takes long to build."""
    from typer.main import get_command

    from bridge.cli.app import app

    return get_command(app)


def run(arguments: list[str]) -> int:
    """Run the command line with `arguments` and return its exit code."""
    import typer

    if COMPLETE in os.environ:
        from bridge.cli import shell_completion
        from bridge.cli.app import app

        shell_completion.complete(app)

    # `help` runs a command within a command: the secrets of one file mark nothing in the output of the next.
    HIDDEN.forget()
    # Typer brings its own click or uses the installed one; this is the class of usage errors in either.
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]
    try:
        return int(_command()(arguments, prog_name="stagebridge", standalone_mode=False) or 0)
    except BridgeError as error:
        return _refuse(arguments, error)
    except usage_error as error:
        return _report_misuse(arguments, error)
    except typer.Abort:
        return INTERRUPTED


def _refuse(arguments: list[str], error: BridgeError) -> Exit:
    """Print why a command was refused, once for all ranks with the same problems. Returns the exit
    code.
    """
    from bridge.cli import mistakes, under_launcher
    from bridge.cli.terminal import complain, note
    from bridge.stack import registry

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
    from bridge.cli import mistakes, under_launcher
    from bridge.cli.terminal import complain
    from bridge.stack import registry

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
    from bridge.cli.terminal import print_json

    print_json({"problems": list(problems), "exit_code": Exit.ERROR}, lines=arguments[0] != "train")
