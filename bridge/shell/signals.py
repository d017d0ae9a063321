"""Traps, and the signals that a script sends itself."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bridge.shell.expand import OUTPUT
from bridge.shell.launchers import walk
from bridge.shell.nested_shells import list_words
from bridge.shell.state import ShellState
from bridge.shell.word_pieces import NOWHERE, Pieces, Unknown, spell_pieces, text_if_known

NAMED = (
    *(
        "HUP",
        "INT",
        "QUIT",
        "ILL",
        "TRAP",
        "ABRT",
        "BUS",
        "FPE",
        "KILL",
        "USR1",
        "SEGV",
        "USR2",
        "PIPE",
        "ALRM",
        "TERM",
    ),
    *(
        "STKFLT",
        "CHLD",
        "CONT",
        "STOP",
        "TSTP",
        "TTIN",
        "TTOU",
        "URG",
        "XCPU",
        "XFSZ",
        "VTALRM",
        "PROF",
        "WINCH",
        "IO",
        "PWR",
    ),
    "SYS",
)
"""Signals in the order of their numbers on Linux, from 1 on."""
NUMBERS = {name: number for number, name in enumerate(NAMED, 1)}
NAMES = {str(number): name for name, number in NUMBERS.items()}
IGNORED = frozenset(("QUIT", "CHLD", "CONT", "WINCH", "URG"))
"""Signals that have no effect on a shell which sets no trap for them."""
HARMLESS = frozenset(("0", "CONT", "CHLD", "WINCH", "URG"))
"""Signals that do not end a background program which was just started."""
STOPPING = frozenset(("STOP", "TSTP", "TTIN", "TTOU"))
KILLING = frozenset(("kill", "pkill", "killall"))
"""Programs that send signals."""
OWN = re.compile(r"\$\{?(?P<which>\$|BASHPID|PPID)\}?")


def _signal_name(word: Pieces) -> str:
    """Return the name of a signal; empty if it is not known."""
    name = (text_if_known(word) or "").upper().removeprefix("SIG")
    return NAMES.get(name, name)


def trap(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `trap TEXT SIGNAL`. The text of an EXIT trap is read at the end of the shell.

    The text for another signal is read if the script sends this signal to itself.
    """
    scope, line = reader.scope, reader.source.line(place)
    scope.status = 0
    rest = argv[2:] if len(argv) > 1 and text_if_known(argv[1]) == "--" else argv[1:]
    if len(rest) < 2:
        reader.write((Unknown("$(trap)", NOWHERE, line, OUTPUT),))
    bare = len(rest) < 2 or (text_if_known(rest[0]) or "").isdecimal()
    names = {_signal_name(word) for word in (rest if bare else rest[1:])}
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
        names -= {"DEBUG", "RETURN", ""}
    if names & {"EXIT", "0"}:
        scope.at_exit = text or None
    if "ERR" in names and scope.frames:
        problem = "a function sets a trap for errors, which is not supported"
        _check_harmless(reader, place, text or (), problem)
    elif "ERR" in names:
        scope.at_error = text or None
    traps = {name: handler for name, handler in scope.traps.items() if name not in names}
    scope.traps = (
        traps if text is None else {**traps, **dict.fromkeys(names & NUMBERS.keys(), text)}
    )


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
    """Model `kill [-SIGNAL] PROCESS ...`. A signal to another process has no effect on the script."""
    signal, processes = _signal_and_words(argv[1:])
    before = reader.scope.status
    reader.scope.status, reader.scope.asked = None, True  # it fails if there is no such process
    if text_if_known(argv[1] if len(argv) > 1 else ()) in ("-l", "-L"):
        reader.write((Unknown("$(kill)", NOWHERE, reader.source.line(place), OUTPUT),))
        return
    kinds = {_kind(reader, word) for word in processes}
    # A literal number is that of some other program. Any other word may name one that the script
    # has started.
    literal = all((text_if_known(word) or "").isdecimal() for word in processes)
    if "other" in kinds and signal not in HARMLESS and not literal:
        reader.kill_background(place)
    if "group" in kinds and "own" not in kinds:
        _to_group(reader, place, signal)
    if "parent" in kinds:
        # From the background it comes at an unknown time, which matters only if there is a trap for
        # it.
        late = reader.behind and signal and signal not in (reader.scope.around or {})
        if signal != "0" and not late:
            raise reader.refuse(
                place, "an inner shell sends the script a signal, which is not supported"
            )
    if "own" in kinds:
        reader.scope.status = 0 if kinds == {"own"} else None
        _to_itself(reader, place, signal, before)


def _signal_and_words(words: Sequence[Pieces]) -> tuple[str, Sequence[Pieces]]:
    """Return the signal, or an empty text if it is not known, and the words that name its targets."""
    first = spell_pieces(words[0]) if words else ""
    if first in ("-s", "-n"):
        signal, rest = _signal_name(words[1] if len(words) > 1 else ()), words[2:]
    elif first.startswith("-") and first != "--":
        name = (text_if_known(words[0]) or "")[1:].upper().removeprefix("SIG")
        signal, rest = NAMES.get(name, name), words[1:]
    else:
        signal, rest = "TERM", words
    return signal, rest[1:] if rest and text_if_known(rest[0]) == "--" else rest


def _kind(reader: ShellState, word: Pieces) -> str:
    """Return the kind of a target of `kill`: the shell itself, its parent, its process group, or another process."""
    if text_if_known(word) == "0":
        return "own"
    piece = word[-1] if word else None
    match = OWN.fullmatch(piece.spelling) if isinstance(piece, Unknown) else None
    if piece is None or match is None or not isinstance(piece, Unknown):
        return "other"
    if spell_pieces(word) != piece.spelling:
        return "group"
    if match["which"] == "PPID":
        return "parent" if reader.depth else "other"
    # `$$` names the outermost shell even in a subshell; BASHPID names the subshell itself.
    within = reader.scope.around is not None
    return "parent" if within and (match["which"] == "$" or piece.uses) else "own"


def _to_group(reader: ShellState, place: int, signal: str) -> None:
    """Model a signal to a process group. It reaches the shell itself if the shell leads the group."""
    if signal in reader.scope.traps:
        raise reader.refuse(
            place, "the trap runs only if the shell leads its process group, which is not known"
        )
    if signal != "0":
        reader.doubt(reader.source.line(place))


def _to_itself(reader: ShellState, place: int, signal: str, before: int | None) -> None:
    """Run the trap for a signal that the shell sends to itself or, without a trap, end the shell.

    The EXIT trap then sees the status of the command `before`.
    """
    scope = reader.scope
    if signal == "0":
        return
    if signal not in NUMBERS or signal in STOPPING:
        problem = f"the effect of the signal {signal} on the shell is not known"
        raise reader.refuse(
            place, problem if signal else 'the signal that "kill" sends is not known'
        )
    text = scope.traps.get(signal) if signal != "KILL" else None
    if text is None and signal not in IGNORED:
        scope.status = before
        if signal == "KILL":  # no trap runs
            scope.at_exit = None
        reader.read_exit_trap()
        scope = reader.scope
        # The status of a shell that a signal ends.
        scope.ended, scope.left_at, scope.status = (
            "exit",
            reader.source.line(place),
            128 + NUMBERS[signal],
        )
    elif text:
        if len(text) == 1 and isinstance(text[0], Unknown):
            raise reader.refuse(
                place, f"the trap that this signal runs is not known: {text[0].why}"
            )
        reader.read_handler(text)
