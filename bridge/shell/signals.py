"""Traps, and the signals that a script sends."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bridge.shell.expand import OUTPUT
from bridge.shell.launchers import walk
from bridge.shell.nested_shells import list_words
from bridge.shell.state import ShellState
from bridge.shell.word_pieces import NOWHERE, Pieces, Unknown, spell_pieces, text_if_known

KILLING = frozenset(("kill", "pkill", "killall"))
"""Programs that send signals."""
OWN = re.compile(r"-?(0|\$\{?(\$|BASHPID)\}?)")
"""Matches the targets of `kill` that name the shell itself or its process group."""


def trap(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `trap TEXT SIGNAL`. The text of an EXIT trap is read at the end of the shell."""
    scope, line = reader.scope, reader.source.line(place)
    scope.status = 0
    rest = argv[2:] if len(argv) > 1 and text_if_known(argv[1]) == "--" else argv[1:]
    if len(rest) < 2:
        reader.write((Unknown("$(trap)", NOWHERE, line, OUTPUT),))
    bare = len(rest) < 2 or (text_if_known(rest[0]) or "").isdecimal()
    signals = rest if bare else rest[1:]
    names = {_name(text_if_known(word) or "") for word in signals}
    text = (
        None
        if bare or text_if_known(rest[0]) == "-"
        else rest[0]
        if text_if_known(rest[0]) != ""
        else ()
    )
    if names & {"DEBUG", "RETURN", ""} and text:
        problem = "a trap that runs where functions and sourced files end is not supported"
        if "DEBUG" in names:
            problem = "a trap that runs before every command is not supported"
        if "" in names:
            problem = "the signal of a trap is not known"
        _check_harmless(reader, place, text, problem)
    if names & {"EXIT", "0"}:
        scope.at_exit = text or None
    if "ERR" in names and scope.frames:
        problem = "a function sets a trap for errors, which is not supported"
        _check_harmless(reader, place, text or (), problem)
    elif "ERR" in names:
        scope.at_error = text or None
    scope.handled = (scope.handled | names) if text else (scope.handled - names)


def _check_harmless(reader: ShellState, place: int, text: Pieces, problem: str) -> None:
    """Raise `SourceError` with `problem` if a trap that runs at an unknown time may change the script's runs."""
    outer, first = reader.scope, len(reader.commands)
    reader.scope = outer.copy()
    reader.read_handler(text)
    inner, reader.scope = reader.scope, outer
    programs = {text_if_known(command.words[0]) or "" for command in reader.commands[first:]}
    starts = any(walk(list_words(command.words)).kind for command in reader.commands[first:])
    del reader.commands[first:]
    # A function that the script defines only later may do anything.
    if inner.ended or starts or programs & {"", *reader.defined} or not inner.settles(outer):
        raise reader.refuse(place, problem)


def kill(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `kill [-SIGNAL] PROCESS ...`. A signal to another process has no effect on the script.

    The handler for a signal that a script sends itself is not read: none of 2,500 launch scripts has one.
    """
    reader.scope.status, reader.scope.asked = None, True  # it fails if there is no such process
    words = [spell_pieces(word) for word in argv[1:]]
    signal = "TERM"
    if words and words[0].startswith("-") and words[0] != "--":
        first = words.pop(0)
        signal = words.pop(0) if first in ("-s", "-n") and words else first[1:]
    if signal in ("l", "L"):
        reader.write((Unknown("$(kill)", NOWHERE, reader.source.line(place), OUTPUT),))
        return
    handled, own = reader.scope.handled, any(map(OWN.fullmatch, words))
    parent = reader.depth and any("PPID" in word for word in words)
    if signal != "0" and (own or parent):
        is_read = signal.isalpha() and _name(signal) not in handled
        if parent or reader.scope.nested or (handled and not is_read):
            raise reader.refuse(place, "a signal that a script sends itself is not supported")
        reader.doubt(reader.source.line(place))
    # A literal number is that of some other program. Any other word may name one that the script
    # has started.
    elif signal != "0" and not all(word.isdecimal() for word in words):
        reader.kill_background(place)


def _name(signal: str) -> str:
    return signal.upper().removeprefix("SIG")
