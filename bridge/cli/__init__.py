"""The `stagebridge` command."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

from bridge.cli.terminal import accept_all_characters, note
from bridge.errors import BridgeError
from bridge.files.notes import gather_notes
from bridge.files.secrets import HIDDEN
from bridge.report.exit_codes import Exit

COMPLETE = "_STAGEBRIDGE_COMPLETE"
"""The environment variable with which the script of a shell asks for completions."""
START = 200_000
"""Number of objects that a command may make before it first looks for garbage. A start makes half of them and drops
hardly any; to look for garbage among them takes a sixth of its time.
"""
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def main() -> NoReturn:
    """Run the command line.

    Each `BridgeError` and each usage error is printed as one message on stderr, with exit code 1.
    """
    _collect_late()
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


def _collect_late() -> None:
    """Have the first search for garbage come after `START` objects, and later ones as usual."""
    usual = gc.get_threshold()

    def restore(phase: str, info: dict[str, int]) -> None:
        gc.set_threshold(*usual)
        gc.callbacks.remove(restore)

    gc.callbacks.append(restore)
    gc.set_threshold(START)
    # The end of the interpreter looks for garbage too.
    atexit.register(lambda: gc.freeze() if gc.get_threshold()[0] == START else None)


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

        shell_completion.complete(_command())

    # `help` runs a command within a command: the secrets of one file mark nothing in the output of the next.
    HIDDEN.forget()
    # Typer brings its own click or uses the installed one; this is the class of usage errors in either.
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]
    try:
        with gather_notes(note):
            return int(_command()(arguments, prog_name="stagebridge", standalone_mode=False) or 0)
    except (BridgeError, usage_error) as error:
        from bridge.cli import refused_commands

        return refused_commands.report(arguments, error)
    except typer.Abort:
        return INTERRUPTED
