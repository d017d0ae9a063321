"""Redirections: the input of a statement, and the file to which the statement writes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bridge.shell import file_contents
from bridge.shell.expand import Expander
from bridge.shell.files import is_gone
from bridge.shell.source import ShellSource
from bridge.shell.state import Action, ShellState
from bridge.shell.tokens import Token, Word
from bridge.shell.word_pieces import NOWHERE, Pieces, Text, Unknown, spell_pieces, text_if_known

IN_FILE = "the text is in a file that is not known"


def read_with_redirections(
    reader: ShellState,
    redirects: Sequence[Token],
    place: int,
    action: Action,
    program: bool | None = False,
) -> None:
    """Read a statement with its redirections.

    `program` says whether the statement starts a program; None if that is not known. A program's
    redirections are expanded in a separate process.
    """
    there = (
        _overwrites_file(reader, redirects)
        if redirects and reader.scope.may("noclobber")
        else False
    )
    if there and not reader.scope.options >= {"noclobber"}:
        there = None  # a branch decides whether the option is on
    if not redirects:
        action()
    elif there:
        _fail(reader)
    elif there is None:
        reader.read_branches(
            reader.source.line(place),
            lambda: _apply_redirections(reader, redirects, action, program),
            lambda: _fail(reader),
        )
    else:
        _apply_redirections(reader, redirects, action, program)


def _fail(reader: ShellState) -> None:
    reader.scope.status, reader.scope.asked = 1, True


def _overwrites_file(reader: ShellState, redirects: Sequence[Token]) -> bool | None:
    """Return whether a file exists that a redirection may not overwrite, because of `set -C`; None if that is not known."""
    exists: bool | None = False
    for token in redirects:
        if token.text not in (">", "&>") or token.word is None:
            continue
        path = _expand_without_effects(reader, token.word)
        there = None
        if text_if_known(path) is not None:
            there = reader.scope.files.there(reader.key(path))
            if there is None and file_contents.content(reader, path) is not None:
                there = True
        if there and text_if_known(path) != "/dev/null":
            return True
        exists = None if there is None else exists
    return exists


def _expand_without_effects(reader: ShellState, word: Word) -> Pieces:
    """Return the name of a file, expanded without side effects, because the name is expanded again when the file is opened."""
    outer, reader.scope = reader.scope, reader.scope.copy()
    path = reader.expander.text(word)
    reader.scope = outer
    return path


def _apply_redirections(
    reader: ShellState, redirects: Sequence[Token], action: Action, program: bool | None
) -> None:
    before = reader.scope.input, reader.scope.output, reader.scope.captured
    joining = reader.scope.joined
    target, elsewhere = (
        _targets(reader, redirects)
        if program is False
        else _targets_within(reader, redirects, program)
    )
    if elsewhere:
        reader.scope.output, reader.scope.captured = (), target is not None
    check_stops_of(reader, redirects)
    # A shell empties the file before it starts the command, which may read it. The key is made now,
    # as the command may change the working directory.
    if target is not None and not target[1]:
        reader.scope.files.put(reader.key(target[0]), ())
    key = reader.key(target[0]) if target is not None else ""
    try:
        _reading(reader, action, before[0])
    finally:
        output = reader.scope.output
        reader.scope.input, reader.scope.joined = before[0], joining
        if elsewhere:
            reader.scope.output, reader.scope.captured = before[1:]
    if target is not None:
        reader.scope.files.put(
            key, (*(file_contents.text_before(reader, target[0]) if target[1] else ()), *output)
        )


Target = tuple[Pieces, bool]
"""A file to write, and whether text is appended to the file."""


def _targets_within(
    reader: ShellState, redirects: Sequence[Token], program: bool | None
) -> tuple[Target | None, bool]:
    """Return the targets of redirections, as `_targets` does, for a statement that may start a program.

    A program's redirections are expanded in another process, and do not change the script's variables.
    """
    outer, reader.scope = reader.scope, reader.scope.copy()
    targets = _targets(reader, redirects)
    inside, reader.scope = reader.scope, outer
    if program is None and inside.variables != outer.variables:
        why = "the name of the command is not known, and a program expands redirections differently from a function"
        raise reader.refuse(redirects[0].start, why)
    outer.input, outer.joined, outer.files, outer.doubting = (
        inside.input,
        inside.joined,
        inside.files,
        inside.doubting,
    )
    return targets


def _targets(reader: ShellState, redirects: Sequence[Token]) -> tuple[Target | None, bool]:
    """Return the target of the output, and whether the output is redirected.

    The target is None if no file is written, also for /dev/null.
    """
    # Redirections take effect from the left, so that the last one of a stream decides. `2>&1`
    # behind `> file` goes to the file.
    target: Target | None = None
    elsewhere = False
    for token in redirects:
        file_target = _redirect(reader, token)
        if file_target is not None:
            target, elsewhere = file_target, True
        elif (
            token.text == ">&"
            and token.fd in ("", "1")
            and reader.source.text_of(token).endswith("2")
        ):
            target, elsewhere = (target, elsewhere) if reader.scope.joined else (None, True)
        elif token.text.startswith((">", "&>")) and token.fd in ("", "1"):
            target, elsewhere = None, token.text != ">&"
        elif token.text.startswith(">") and token.fd == "2":
            reader.scope.joined = reader.source.text_of(token).replace(" ", "") == "2>&1"
        if token.text in ("&>", "&>>"):
            reader.scope.joined = True
    return target, elsewhere


def _reading(reader: ShellState, action: Action, before: Pieces | None) -> None:
    """Read a statement that a shell starts only if its input file exists."""
    first = next(iter(reader.scope.input or ()), None)
    if reader.scope.input is not before and is_gone(reader.scope.input or ()):
        _fail(reader)
        return
    if reader.scope.input is before or not isinstance(first, Unknown) or first.why != IN_FILE:
        action()
        return
    # Whether the input file is there is not known, so that the command may not be started.
    around, reader.branch = reader.branch, reader.branch or first.line
    action()
    reader.branch, reader.scope.status, reader.scope.asked = around, None, True


def check_stops_of(reader: ShellState, redirects: Sequence[Token]) -> None:
    """Raise `SourceError` if an expansion in a redirection stops a shell."""
    if reader.stops and not any(token.word is None for token in redirects):
        last = reader.stops[-1][0]
        if any(reader.source.line(token.start) == last for token in redirects):
            reader.check_stops()


def _redirect(reader: ShellState, token: Token) -> Target | None:
    """Apply one redirection: set the input, or return the file to write and whether text is appended."""
    word = token.word
    if word is None:
        return None
    if token.text in ("<<", "<<-"):
        reader.scope.input = _document(reader, token)
    elif token.text == "<<<":
        reader.scope.input = (*reader.expander.text(word), Text("\n", NOWHERE, True, plain=False))
    elif token.text == "<" and token.fd in ("", "0"):
        reader.scope.input = _file(reader, word)
    elif token.text in (">", ">|", ">>", "&>", "&>>") and token.fd in ("", "1"):
        target = reader.expander.text(word)
        if text_if_known(target) != "/dev/null":
            return target, token.text.endswith(">>")
    elif token.text in (">", ">|", ">>") and token.fd != "2":
        target = reader.expander.text(word)
        why = "the script writes a stream other than the output to the file"
        reader.scope.files.put(
            reader.key(target),
            (Unknown(spell_pieces(target), NOWHERE, reader.source.line(word.start), why),),
        )
    elif token.text == "<&":
        reader.scope.input = None
    return None


def _file(reader: ShellState, word: Word) -> Pieces:
    """Return the content of a file, or the output of `<(...)`."""
    line = reader.source.line(word.start)
    if (
        len(word.parts) == 1
        and word.parts[0].kind == "process"
        and reader.source.text_of(word).startswith("<")
    ):
        part = word.parts[0]
        return reader.capture(reader.source.within(part.start + 2, part.end - 1))
    path = reader.expander.text(word)
    if text_if_known(path) == "/dev/null":
        return ()
    content = file_contents.content(reader, path)
    return (
        (Unknown(reader.source.text_of(word), NOWHERE, line, IN_FILE),)
        if content is None
        else content
    )


def _document(reader: ShellState, token: Token) -> Pieces:
    body = token.body
    if body is None:
        return ()
    source = reader.source
    # `<<-` drops the tabs at the start of each line. The pieces keep their places in the script.
    if body.tabs:
        pieces = [
            piece
            for line in re.finditer(r"\t*([^\n]*\n?)", source.text[body.start : body.end])
            for piece in source.pieces(body.start + line.start(1), body.start + line.end(1), True)
        ]
        source = ShellSource.inert(tuple(pieces), source)
    start, end = (0, len(source.text)) if body.tabs else (body.start, body.end)
    if body.quoted:
        return tuple(source.pieces(start, end, True))
    expander = Expander(source, reader.scope, reader)
    return tuple(expander.without_splitting(expander.parts(source.double(start, end), True)))
