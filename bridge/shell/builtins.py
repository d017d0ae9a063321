"""Built-in commands of a shell: the variables that they set, their output and their status."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

from bridge.shell import arithmetic, file_contents, formatting, getopts_builtin, signals, variables
from bridge.shell.decide import Bad, evaluate_test
from bridge.shell.expand import FILES, OUTPUT
from bridge.shell.files import AWAY, is_gone, path_in_folder
from bridge.shell.options import LETTERS, OFF, SET, SHOPT, Options
from bridge.shell.patterns import Unread
from bridge.shell.scope import RUN, SOURCED, Value, several
from bridge.shell.source import ShellSource, Sourced, check_ends
from bridge.shell.state import ShellState
from bridge.shell.word_pieces import (
    DEFAULT_IFS,
    NOWHERE,
    Pieces,
    Text,
    Unknown,
    cut,
    spell_pieces,
    text_if_known,
    unknowns,
    words,
)

MOST_CHARACTERS = 2**20
TOOLS = re.compile(
    r"(^|/)(\.?bashrc|\.?(bash_)?profile|activate|conda\.sh|setvars\.sh|modules?\.sh)$|^/.*/(bash|init\.sh)$|^/etc/|/etc/profile"
)
"""Sourced files that set up tools. They are assumed to set no variable that a training run uses."""
SET_OPTION = re.compile(r"[-+][abefhkmnptuvxBCEHPTo]+")
INPUT = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
HIDDEN = 0xF0000
"""First of the private code points that replace characters after a backslash, so that `read` does not split a line at
these characters.
"""


def _text(text: str) -> Pieces:
    return (Text(text, NOWHERE, True, plain=False),) if text else ()


def _unknown(reader: ShellState, name: str, why: str = OUTPUT, loose: bool = False) -> Pieces:
    return (Unknown(f"${name}", NOWHERE, reader.source.line(reader.place), why, loose=loose),)


def _number(reader: ShellState, argv: Sequence[Pieces], default: int) -> int:
    """Return the number that is the argument of a command, such as the 2 of `break 2`; `default` without an argument."""
    if len(argv) < 2:
        return default
    text = text_if_known(argv[1])
    if text is None or not re.fullmatch(r"-?\d{1,9}", text, re.ASCII):
        raise reader.refuse(
            reader.place,
            f"{spell_pieces(argv[1])} after {spell_pieces(argv[0])} is no number, or is not known",
        )
    return int(text)


# Output


def echo(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `echo`, which writes its arguments with spaces between them."""
    rest, flags = list(argv[1:]), "e" if reader.scope.on("xpg_echo") else ""
    # A word with any other letter is text, and so is everything behind it.
    while rest and re.fullmatch(r"-[neE]+", text_if_known(rest[0]) or ""):
        flags += (text_if_known(rest.pop(0)) or "")[1:]
    reader.scope.status = 0
    output: list[Text | Unknown] = []
    for index, word in enumerate(rest):
        output += [*(_text(" ") if index else ()), *word]
    if "e" in flags and flags.rfind("e") > flags.rfind("E"):  # the later one takes effect
        text = text_if_known(output)
        try:
            output = list(
                _text(formatting.decode_escapes(text))
                if text is not None
                else _unknown(reader, "(echo -e)")
            )
        except Unread as error:
            output = list(_unknown(reader, "(echo -e)", str(error)))
    reader.write((*output, *(() if "n" in flags else _text("\n"))))


def printf(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `printf`, which writes into a variable with `-v`."""
    rest = list(argv[1:])
    target: Pieces | None = None
    if rest and spell_pieces(rest[0]).startswith("-v"):
        target, rest = cut(rest[0], 2), rest[1:]
        if not target and rest:
            target, rest = rest[0], rest[1:]
    if rest and text_if_known(rest[0]) == "--":
        rest = rest[1:]
    elif rest and re.match(r"-.", spell_pieces(rest[0])):
        reader.scope.status = 2
        return
    texts = [None if several(word) else text_if_known(word) for word in rest]
    try:
        if not texts or None in texts:
            raise Unread(OUTPUT)
        output = _text(formatting.format_output(str(texts[0]), [str(text) for text in texts[1:]]))
        reader.scope.status = 0
    except Unread as error:
        output = _unknown(reader, "(printf)", str(error))
        reader.scope.status = None
    name = text_if_known(target) if target else None
    if not target:
        reader.write(output)
    elif name is None or several(target):
        reader.overtake(place, target)
    else:
        variables.put(reader, name, Value((output or (Text("", NOWHERE),),)))


def working_folder(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `pwd`."""
    value = reader.scope.get("PWD")
    reader.scope.status = 0
    reader.write((value.pieces if value else ()) or _unknown(reader, "PWD", RUN))
    reader.write(_text("\n"))


# Status and paths


def return_success(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `:` and `true`."""
    reader.scope.status = 0


def fail(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `false`."""
    reader.scope.status = 1


def outside(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model a command whose status is unknown and which sets no variables."""
    # `wait` without arguments succeeds. With a process number it returns that program's status.
    waits = spell_pieces(argv[0]) == "wait"
    reader.scope.status = 0 if len(argv) == 1 and waits else None
    if waits and not (text_if_known(argv[-1]) or "").isdecimal():
        # Whatever was started in the background has begun by then. Only a bare `wait` waits for the
        # end of all of it.
        reader.start_background()
        if len(argv) == 1:
            reader.scope.files.settle_background()
    if spell_pieces(argv[0]) in (
        "type",
        "jobs",
        "times",
        "ulimit",
        "umask",
        "caller",
        "dirs",
        "hash",
    ):
        reader.write(_unknown(reader, f"({spell_pieces(argv[0])})"))


def end(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `exit`, `return`, `break` and `continue`."""
    name = spell_pieces(argv[0])
    if name in ("break", "continue"):
        # Outside of a loop a shell reports it, and goes on.
        if not reader.loops:
            reader.scope.status = 0
            return
        levels = _number(reader, argv, 1)
        reader.scope.status = int(levels < 1)
        reader.scope.levels = min(levels, reader.loops) if levels > 0 else reader.loops
    elif name == "return" and not (reader.scope.frames or reader.scope.taken):
        # An error outside of functions and sourced files; the script goes on.
        reader.scope.status = 2
        return
    elif len(argv) > 1:
        text = text_if_known(argv[1])
        reader.scope.status = (
            int(text) % 256
            if text is not None and re.fullmatch(r"-?\d{1,9}", text, re.ASCII)
            else None
        )
    reader.scope.ended, reader.scope.left_at = name, reader.source.line(place)


def test(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `test` and `[`."""
    inside = argv[1:]
    try:
        if spell_pieces(argv[0]) == "[":
            if any(several(word) for word in inside):
                raise Unread("the number of words is not known")
            if not inside or text_if_known(inside[-1]) != "]":
                raise Bad("missing ]")
            inside = inside[:-1]
        reader.answer(evaluate_test(inside, reader.expander))
    except Bad:
        reader.scope.status = 2
    except Unread:
        reader.answer(None)


def let(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `let`."""
    for word in argv[1:]:
        expander = reader.expander
        # No file is called like an expression, so its `*` stays a `*`.
        text = (
            spell_pieces(word)
            if [piece.why for piece in unknowns(word)] == [FILES]
            else text_if_known(expander.plain(word))
        )
        try:
            if text is None:
                expander.forget(spell_pieces(word), next(unknowns(word)).why)
                raise Unread("it is not known")
            reader.answer(bool(expander.evaluate_text(text)))
        except Unread:
            reader.answer(None)
        except arithmetic.Unset:
            raise  # unlike other errors, `set -u` ends the shell
        except arithmetic.Wrong:
            reader.scope.status = 1
            return


# Input


def read(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `read`, which sets variables from a line of the input.

    Where the input is not known, the variables become unknown.
    """
    options, words_ = _options(argv[1:], "adnNpitu")
    array = options.get("a")
    targets = [name for name in map(text_if_known, words_) if name is not None]
    if len(targets) < len(words_):
        _ask(reader, targets, array, None)
        for word in words_:
            reader.overtake(place, word)
        return
    unread = sorted(options.keys() & {"n", "N", "u", "t", "s"})
    if unread or reader.scope.input is None:
        _ask(
            reader,
            targets,
            array,
            None,
            f"read -{unread[0]} is not supported" if unread else OUTPUT,
        )
        return
    line = _line(reader, options.get("d", "\n"), "r" not in options)
    if line is None:
        _ask(reader, targets, array, None)
        return
    separators = reader.scope.separators
    if separators is None:
        _ask(reader, targets, array, None)
    elif array:
        fields = words([Text(line, NOWHERE, splits=True, plain=False)], separators)
        reader.scope.set(
            array,
            Value(
                tuple(_text(_reveal_hidden(spell_pieces(field))) or field for field in fields), True
            ),
        )
    else:
        for name, text in zip(
            targets or ["REPLY"], _fields(line, targets, separators), strict=True
        ):
            variables.assign(
                reader,
                name,
                None,
                Value((_text(_reveal_hidden(text)) or (Text("", NOWHERE),),)),
                False,
            )


def _options(words_: Sequence[Pieces], value_letters: str) -> tuple[dict[str, str], list[Pieces]]:
    """Return the options of a command, as values by letter, and the other words of the command."""
    values: dict[str, str] = {}
    rest = list(words_)
    while rest:
        text = text_if_known(rest[0])
        if text is None or not re.fullmatch(r"-[A-Za-z]+.*", text, re.DOTALL):
            break
        rest.pop(0)
        if text == "--":
            break
        for index, letter in enumerate(text[1:], 1):
            if letter not in value_letters:
                values[letter] = ""
                continue
            # The value is the rest of the word, or else the next word.
            values[letter] = text[index + 1 :] or ((text_if_known(rest[0]) if rest else None) or "")
            if not text[index + 1 :] and rest:
                rest.pop(0)
            break
    return values, rest


def _ask(
    reader: ShellState,
    names: Sequence[str],
    array: str | None,
    status: int | None,
    why: str = OUTPUT,
) -> None:
    """Mark as unknown the variables that `read` sets, and the rest of the input."""
    for name in names or ([] if array else ["REPLY"]):
        reader.scope.set(name, Value((_unknown(reader, name, why),)))
    if array:
        reader.scope.set(array, Value((_unknown(reader, array, why, loose=True),), True))
    reader.scope.status = status
    if reader.scope.input is not None:
        reader.scope.input = _unknown(reader, "(input)")


def _line(reader: ShellState, end_: str, escapes: bool) -> str | None:
    """Return the next line of the input; None if it is not known.

    Sets the status to 1 if the line has no end. With `escapes`, a character after a backslash
    separates no words and ends no line.
    """
    text = text_if_known(reader.scope.input or ())
    if text is None:
        return None
    if end_ == "":
        end_ = "\0"  # `read -d ''` reads up to a NUL
    end_ = re.escape(end_[0])
    match = re.match(
        rf"((?:\\.|[^\\{end_}])*\\?)({end_}?)" if escapes else f"([^{end_}]*)({end_}?)",
        text,
        re.DOTALL,
    )
    line, terminator = match.groups() if match else ("", "")
    reader.scope.input = _text(text[len(line) + len(terminator) :])
    reader.scope.status = int(not terminator)

    def hidden(escape: re.Match[str]) -> str:
        char = escape[1]
        if char in ("", "\n"):
            return ""  # the line goes on
        return chr(HIDDEN + ord(char)) if char.isascii() else char

    return re.sub(r"\\(.?)", hidden, line, flags=re.DOTALL) if escapes else line


def _reveal_hidden(text: str) -> str:
    return "".join(
        chr(ord(char) - HIDDEN) if HIDDEN <= ord(char) < HIDDEN + 128 else char for char in text
    )


def _fields(line: str, names: Sequence[str], separators: str) -> list[str]:
    """Return the value of each name: one field of the line, and for the last name the rest of the line."""
    if not names:
        return [line]
    # Blanks of IFS separate in runs, and are dropped at both ends. Any other character of IFS
    # separates by itself, together with the blanks around it.
    blanks = "".join(char for char in separators if char in DEFAULT_IFS)
    others = re.escape("".join(char for char in separators if char not in DEFAULT_IFS))
    blank = f"[{re.escape(blanks)}]*" if blanks else ""
    mark = (
        f"{blank}[{others}]{blank}|{blank[:-1]}+"
        if others and blanks
        else f"[{others}]"
        if others
        else f"{blank[:-1]}+"
    )
    rest, values = line.lstrip(blanks) if blanks else line, list[str]()
    if not separators:
        return [line, *("" for _ in names[1:])]
    for _ in names[1:]:
        cut = re.search(mark, rest)
        values.append(rest[: cut.start()] if cut else rest)
        rest = rest[cut.end() :] if cut else ""
    rest = rest.rstrip(blanks) if blanks else rest
    # A single field for the last name loses a separator at its end; of several fields the text
    # stays as it is.
    alone = (
        re.fullmatch(f"([^{others}{re.escape(blanks)}]*){blank}[{others}]", rest)
        if others
        else None
    )
    return [*values, alone[1] if alone else rest]


def map_file(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `mapfile [-t] [-d MARK] [-s SKIP] [-n COUNT] NAME`."""
    options, names = _options(argv[1:], "dnOsucC")
    name = text_if_known(names[0]) if names else "MAPFILE"
    if name is None:
        reader.overtake(place, names[0])
        reader.scope.status = None
        return
    text = text_if_known(reader.scope.input) if reader.scope.input is not None else None
    counts = [options.get(letter, "0") for letter in "sn"]
    if (
        text is None
        or options.keys() - set("tdsn")
        or not all(re.fullmatch(r"[0-9]{1,6}", count) for count in counts)
    ):
        _ask(reader, [], name, None)
        return
    # 0 lines: all of them.
    mark, (skip, most) = options.get("d", "\n")[:1] or "\0", map(int, counts)
    lines = re.findall(f"[^{re.escape(mark)}]*{re.escape(mark)}|[^{re.escape(mark)}]+", text)
    selection = lines[skip : skip + most if most else None]
    texts = [line.removesuffix(mark) if "t" in options else line for line in selection]
    reader.scope.set(
        name, Value(tuple(_text(line) or (Text("", NOWHERE),) for line in texts), True)
    )
    reader.scope.input, reader.scope.status = _text("".join(lines[skip + len(selection) :])), 0


# Arguments and options


def shift(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `shift`."""
    arguments = reader.scope.positional_arguments
    count = (
        _number(reader, argv, 1)
        if len(argv) < 2 or text_if_known(argv[1]) is not None
        else len(arguments)
    )
    # A word of unknown length may be all that is shifted away, or less than that.
    if any(text_if_known(word) is None for word in argv[1:2]) or any(
        several(word) for word in arguments[:count]
    ):
        reader.scope.arguments = (
            _unknown(reader, "@", '"shift" removes an unknown number of arguments', loose=True),
        )
        reader.scope.status = None
    elif count > len(arguments) or count < 0:
        reader.scope.status = 1
        reader.scope.shifted += max(count, 0)
    else:
        if reader.scope.arguments is not None or arguments:
            reader.scope.arguments = arguments[count:]
        reader.scope.shifted += count
        reader.scope.status = 0


def set_(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `set`, which sets shell options and the arguments of the script."""
    rest = list(argv[1:])
    reader.scope.status = 0
    if not rest or (len(rest) == 1 and text_if_known(rest[0]) in ("-o", "+o")):
        reader.write(_unknown(reader, "(set)"))
        return
    # A shell looks at all options before it sets the first.
    texts = (None if several(word) else text_if_known(word) for word in rest)
    option_words = takewhile(
        lambda text: text not in (None, "--") and re.match(r"[-+].", text), texts
    )
    if not all(SET_OPTION.fullmatch(str(text)) for text in option_words):
        reader.scope.status = 2
        return
    while rest:
        text = None if several(rest[0]) else text_if_known(rest[0])
        if text == "--" or text is None or not re.fullmatch(r"[-+][A-Za-z]*", text):
            rest = rest[1:] if text == "--" else rest
            reader.scope.arguments, reader.scope.placed = tuple(rest), not reader.scope.frames
            break
        rest.pop(0)
        for letter in text[1:]:
            name = text_if_known(rest.pop(0)) if letter == "o" and rest else LETTERS.get(letter)
            _switch(reader, place, SET, name, text[0] == "-")


def _switch(reader: ShellState, place: int, options: Options, name: str | None, on: bool) -> None:
    """Turn an option on or off. Raises `SourceError` for options that are not supported."""
    if name is not None and not options.has(name):
        reader.scope.status = None  # a shell reports it, and goes on
        return
    problem = (
        f"the option of {options.command} is not known"
        if name is None
        else options.problem(name, on)
    )
    if problem:
        raise reader.refuse(place, problem)
    if name == "extglob" and on and name not in reader.scope.options:
        reader.grouping = reader.source.line(place)
    reader.scope.turn(str(name), on)
    if name == "noexec" and on:
        # From here on a shell reads commands and runs none, traps included.
        reader.scope.at_exit = reader.scope.at_error = None
        reader.scope.ended, reader.scope.left_at = "exit", reader.source.line(place)


def shopt(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `shopt`."""
    flags, words_ = _options(argv[1:], "")
    names = [text_if_known(word) for word in words_]
    if not flags.keys() & {"s", "u", "q"}:
        reader.write(_unknown(reader, "(shopt)"))
    for name in names if flags.keys() & {"s", "u"} else ():
        _switch(reader, place, SET if "o" in flags else SHOPT, name, "s" in flags)
    option_names = {str(name) for name in names}
    answerable = option_names <= OFF and "q" in flags and bool(option_names)
    if answerable and not flags.keys() & {"s", "u"}:
        reader.answer(
            None
            if option_names & reader.scope.unsure.keys()
            else option_names <= reader.scope.options
        )
    else:
        turns = bool(flags.keys() & {"s", "u"})
        reader.scope.status = (
            0 if turns and all(name and SHOPT.has(name) for name in names) else None
        )


def unset(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `unset NAME`, `unset NAME[index]`, `unset -f NAME`."""
    option = text_if_known(argv[1] if len(argv) > 1 else ())
    functions = option == "-f"
    reader.scope.status = 0
    for word in argv[1:]:
        text = None if several(word) else text_if_known(word)
        if text is None:
            reader.overtake(place, word)
            continue
        name, _, index = text.partition("[")
        if text.startswith("-"):
            continue
        # Without an option, a name that is no variable is looked up among the functions.
        if functions or (name in reader.scope.functions and reader.scope.get(name) is None):
            reader.scope.functions.pop(name, None)
        elif index and index[:-1] not in ("@", "*"):
            _unset_element(reader, name, index[:-1])
        else:
            name = name if option == "-n" else reader.scope.target(name)
            reader.scope.certain(name)
            if "r" in reader.scope.marks.get(name, ()):
                reader.scope.status = 1
                continue
            if reader.scope.reveal(name):
                continue
            # None, and not absent: it hides a variable of the same name from outside.
            reader.scope.variables[name] = None
            reader.scope.exported.discard(name)
            reader.scope.marks.pop(name, None)


def _unset_element(reader: ShellState, name: str, index: str) -> None:
    value = reader.scope.get(name)
    if value is None:
        return
    expander = reader.expander
    key: int | str = index.strip("'\"")
    if not value.open and not value.table:
        key = arithmetic.value(index, expander)
    if value.open or expander.lacking:
        why = (
            expander.lack() if expander.lacking else '"unset" removes an element that is not known'
        )
        reader.scope.set(name, Value((_unknown(reader, name, why, loose=True),), True))
        return
    if isinstance(key, int) and key < 0:
        # From the end of the array.
        key += max((int(place) for place in value.places), default=-1) + 1
    reader.scope.set(name, value.without(key))


# Other shells, files and commands


def eval_(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `eval TEXT`."""
    reader.scope.status = 0
    words_ = argv[2:] if len(argv) > 1 and text_if_known(argv[1]) == "--" else argv[1:]
    # `eval` has no options: without `--` before it, a word with a dash is an error.
    if len(words_) == len(argv) - 1 and words_ and re.match(r"-.", spell_pieces(words_[0])):
        reader.scope.status = 2
        return
    pieces = tuple(
        piece
        for index, word in enumerate(words_)
        for piece in (*(_text(" ") if index else ()), *word)
    )
    reader.read_inner_text(place, pieces)


def take_file(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `source FILE`.

    If the file cannot be read, the variables that it may set become unknown.
    """
    path = argv[1] if len(argv) > 1 else ()
    reader.scope.status = None
    from_input = text_if_known(path) in INPUT
    text = reader.scope.input if from_input else file_contents.content(reader, path)
    if from_input and text is None:
        raise reader.refuse(place, '"source" reads the input of the script, which is not known')
    if text is not None and is_gone(text):
        reader.scope.status = 1
    elif text is None or any(isinstance(piece, Unknown) for piece in text):
        _pass_by(reader, path, text)
    else:
        _run_file(reader, path, text, argv[2:])


def _pass_by(reader: ShellState, path: Pieces, text: Pieces | None) -> None:
    """Record a sourced file that is not read.

    It may set every variable, unless it is a file that sets up tools.
    """
    line = reader.source.line(reader.place)
    reasons = (piece.why for piece in text or () if isinstance(piece, Unknown))
    tools = bool(TOOLS.search(spell_pieces(path)))
    reader.sourced.append(
        Sourced(
            line,
            spell_pieces(path),
            next(reasons, "") or file_contents.missing(reader, path),
            tools,
        )
    )
    if not tools:
        reader.scope.overtaken(f"the file that is sourced on line {line}")


def _run_file(reader: ShellState, path: Pieces, text: Pieces, arguments: Sequence[Pieces]) -> None:
    if reader.depth >= 30:
        raise reader.refuse(
            reader.place, "a file sources itself without end; is this the right file?"
        )
    plain = text_if_known(text)
    check_ends(plain or "", spell_pieces(path))
    if plain is not None:
        # By itself first: an error then names this file and its line, not the script that sources it.
        ShellSource(plain, reader.key(path))
    source = ShellSource.of(text, reader.source)
    before, mark, here = reader.scope.arguments, len(reader.leaving), reader.scope.here
    folder, slash, name = reader.key(path).rpartition("/")
    # `BASH_SOURCE` names this file within it. The mark keeps it apart from the script itself.
    reader.scope.here = f"{folder}{slash}{SOURCED}{name}"
    reader.scope.placed = False
    if arguments:
        reader.scope.arguments = tuple(arguments)
    reader.scope.status = 0
    reader.depth += 1
    reader.scope.taken += 1
    reader.run(source)
    reader.scope.taken -= 1
    reader.depth -= 1
    reader.merge_exits(mark, ("return",))
    reader.scope.here = here
    if arguments:
        _put_back(reader, before)


def _put_back(reader: ShellState, before: tuple[Pieces, ...] | None) -> None:
    """Restore the script's arguments after a sourced file that was given arguments.

    The arguments stay changed if that file called `set` outside of functions.
    """
    if reader.scope.placed is None:
        reader.scope.arguments = (
            _unknown(
                reader,
                "@",
                "it is not known whether the sourced file sets the arguments",
                loose=True,
            ),
        )
    elif not reader.scope.placed:
        reader.scope.arguments = before
    reader.scope.placed = False


def change_folder(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `cd`, `pushd` and `popd`.

    The new folder is known if it is the script's folder or was made by the script.
    """
    scope, name = reader.scope, spell_pieces(argv[0])
    before = scope.folder
    if name == "popd" and len(argv) == 1 and scope.folders:
        *rest, scope.folder = scope.folders
        scope.folders, scope.status = tuple(rest), 0
    else:
        _enter(reader, f"{AWAY}{place}.{reader.steps}/", argv[1:])
        if name != "cd":
            scope.folders = (*scope.folders, before) if name == "pushd" and len(argv) == 2 else ()
    for variable in ("PWD", "OLDPWD"):
        if variable in scope.variables:
            scope.set(variable, Value((_unknown(reader, variable, RUN),)))
    if name != "cd" or (
        argv[1:] and text_if_known(argv[-1]) in ("-", None) and not path_in_folder(before, argv[-1])
    ):
        reader.write(_unknown(reader, f"({name})"))


def _enter(reader: ShellState, away: str, words_: Sequence[Pieces]) -> None:
    """Enter a folder. `away` stands for the folder if its location is not known."""
    scope = reader.scope
    words_ = [word for word in words_ if text_if_known(word) not in ("--", "-P", "-L")]
    if words_ and text_if_known(words_[0]) == "":
        scope.status = 0
        return
    target = words_ and (text_if_known(words_[0]) or path_in_folder(scope.folder, words_[0]))
    key = reader.key(words_[0]) if target else away
    folder = "" if key == "." else f"{key.removesuffix('/')}/"
    exists = len(words_) == 1 and (
        folder in ("", "../")
        or folder in scope.files.folders
        or file_contents.is_folder(reader, folder)
    )
    scope.folder, scope.status = (folder, 0) if exists else (away, None)


def run_in_place(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `exec COMMAND`, `nohup`, `command` and `builtin`, which run the command in their arguments."""
    name, rest = spell_pieces(argv[0]), list(argv[1:])
    if name == "command" and rest and re.fullmatch(r"-[vVp]+", text_if_known(rest[0]) or ""):
        reader.scope.status = None
        if text_if_known(rest[0]) != "-p":
            reader.write(_unknown(reader, "(command)"))
            return
        rest = rest[1:]
    while name == "exec" and rest and (text_if_known(rest[0]) or "").startswith("-"):
        rest = rest[2 if text_if_known(rest[0]) == "-a" else 1 :]
    if not rest:
        reader.stops.clear()
        return
    reader.start(rest, place, functions=False)
    if name == "exec":
        reader.scope.ended, reader.scope.left_at = "exit", reader.source.line(place)


def alias(reader: ShellState, place: int, argv: Sequence[Pieces]) -> None:
    """Model `alias`, which has an effect only in a script that may turn on `expand_aliases`, on words behind its line."""
    reader.scope.status = 0
    if not any("=" in spell_pieces(word) for word in argv[1:]):
        reader.write(_unknown(reader, "(alias)"))
    behind = reader.source.text[place:].partition("\n")[2]
    for word in argv[1:] if reader.scope.may("expand_aliases") else ():
        name = (text_if_known(word) or "").partition("=")[0]
        if not name or re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w./-])", behind):
            problem = f'"alias" changes the meaning of {name or spell_pieces(word)}, which is not supported'
            raise reader.refuse(place, problem)


BUILTINS: Mapping[str, Callable[[ShellState, int, Sequence[Pieces]], None]] = {
    "echo": echo,
    "printf": printf,
    "pwd": working_folder,
    **dict.fromkeys((":", "true"), return_success),
    "false": fail,
    **dict.fromkeys(("exit", "return", "break", "continue"), end),
    **dict.fromkeys(("[", "test"), test),
    "let": let,
    "read": read,
    **dict.fromkeys(("mapfile", "readarray"), map_file),
    "shift": shift,
    "set": set_,
    "shopt": shopt,
    "unset": unset,
    "getopts": getopts_builtin.step,
    "eval": eval_,
    **dict.fromkeys(("source", "."), take_file),
    **dict.fromkeys(("cd", "pushd", "popd"), change_folder),
    **dict.fromkeys(("exec", "nohup", "command", "builtin"), run_in_place),
    "trap": signals.trap,
    "kill": signals.kill,
    "alias": alias,
    **dict.fromkeys(
        (
            *("ulimit", "umask", "wait", "jobs", "type", "hash"),
            *("times", "caller", "dirs", "bg", "fg", "disown", "unalias"),
        ),
        outside,
    ),
}
