"""Models of small programs whose output depends only on their arguments and their input."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bridge.shell import effects, file_contents, streams
from bridge.shell.expand import OUTPUT
from bridge.shell.files import GONE, is_gone, path_in_folder
from bridge.shell.patterns import Unread, simple
from bridge.shell.scope import is_file
from bridge.shell.state import ShellState
from bridge.shell.word_pieces import NOWHERE, Pieces, Text, Unknown, text_if_known

MOST = 10_000


def _text(text: str) -> Pieces:
    return (Text(text, NOWHERE, True, plain=False),) if text else ()


def _input(reader: ShellState, names: Sequence[str]) -> Pieces | None:
    """Return the input of a program: the named files, or its standard input; None if it is not known."""
    if not names:
        return reader.scope.input
    pieces: list[Text | Unknown] = []
    for name in names:
        content = file_contents.content(reader, _text(name))
        # The file may be missing, and the program then fails: what `set -e` does is not certain.
        if content is None:
            reader.scope.asked = True
            raise Unread(file_contents.missing(reader, _text(name)))
        if is_gone(content):
            reader.scope.status = 1
        else:
            pieces += content
    return tuple(pieces)


def cat(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `cat`, without options."""
    return None if any(text.startswith("-") for text in texts[1:]) else _input(reader, texts[1:])


def tee(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `tee FILE`, which writes its input to the file and to its output."""
    read = reader.scope.input
    names = [text for text in texts[1:] if not text.startswith("-")]
    more = len(names) + 1 < len(texts)
    content = (
        read
        if read is not None
        else (Unknown("tee", NOWHERE, reader.source.line(reader.place), OUTPUT),)
    )
    for name in names:
        path = _text(name)
        reader.scope.files.put(
            reader.key(path), (*(file_contents.text_before(reader, path) if more else ()), *content)
        )
    return read


def basename(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `basename PATH [SUFFIX]`, `basename -s SUFFIX PATH`."""
    if texts[1:2] == ["-s"] and len(texts) == 4:
        texts = [texts[0], texts[3], texts[2]]
    if not 2 <= len(texts) <= 3 or texts[1].startswith("-"):
        return None
    path = texts[1].rstrip("/")
    name = posixpath.basename(path) if path else texts[1][:1]
    if len(texts) == 3 and name != texts[2]:
        name = name.removesuffix(texts[2])
    return _text(name + "\n")


def place_named(reader: ShellState, name: str, argv: Sequence[Pieces]) -> Pieces | None:
    """Return the output of `dirname`, `readlink -f` or `realpath` for a word of unknown text but
    known path; None in all other cases.
    """
    if name not in ("dirname", "readlink", "realpath"):
        return None
    letters = {
        letter
        for word in argv[1:]
        for letter in (text_if_known(word) or "").lstrip("-")
        if (text_if_known(word) or "").startswith("-")
    }
    operands = [word for word in argv[1:] if not (text_if_known(word) or "").startswith("-")]
    path_piece = path_in_folder(reader.scope.folder, operands[0]) if len(operands) == 1 else None
    if path_piece is None or not letters <= set("fems"):
        return None
    reader.scope.status = 0
    if name == "dirname":
        # `dirname .` is `.` again: only of a file, or of a full path, is it the folder above.
        up = posixpath.normpath(f"{path_piece.at}/..")
        alike = path_piece.firm or is_file(path_piece.at)
        return (replace(path_piece, at=up), *_text("\n")) if alike and not letters else None
    # A script that is a link lies elsewhere, and so do the files beside it.
    resolves = name == "realpath" or letters & set("fem")
    has_link = (Path(reader.name).parent / path_piece.at).is_symlink() or Path(
        reader.name
    ).is_symlink()
    return (replace(path_piece, firm=True), *_text("\n")) if resolves and not has_link else None


def dirname(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `dirname PATH`."""
    if len(texts) != 2 or texts[1].startswith("-"):
        return None
    head, cut, _ = texts[1].rstrip("/").rpartition("/")
    return _text((head.rstrip("/") or ("/" if cut or texts[1].startswith("/") else ".")) + "\n")


def seq(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `seq [-s TEXT] [FIRST [STEP]] LAST` over whole numbers."""
    # The separator behind `-s` may be the rest of its word, or the next word. A NUL stands between
    # words.
    mark, match = "\n", re.fullmatch(r"-s([^\0]+|\0[^\0]*)\0(.*)", "\0".join(texts[1:]), re.DOTALL)
    if match is not None:
        mark, texts = match[1].removeprefix("\0"), ["seq", *match[2].split("\0")]
    if not 2 <= len(texts) <= 4 or not all(
        re.fullmatch(r"-?\d{1,9}", text, re.ASCII) for text in texts[1:]
    ):
        return None
    numbers = [int(text) for text in texts[1:]]
    first, step, last = (
        numbers[0] if len(numbers) > 1 else 1,
        numbers[1] if len(numbers) == 3 else 1,
        numbers[-1],
    )
    if not step:
        return None
    sequence = range(first, last + (1 if step > 0 else -1), step)
    if len(sequence) > MOST:
        raise Unread(f"seq writes more than {MOST:,} lines")
    return _text(mark.join(map(str, sequence)) + "\n") if sequence else ()


def _read(reader: ShellState, names: Sequence[str] = ()) -> str | None:
    """Return the text that a program reads.

    If the text is not known, raises `Unread` with the reason; without a known reason, returns None.
    """
    content = _input(reader, names)
    if names and reader.scope.status:
        raise Unread(GONE)
    unknown = next((piece for piece in content or () if isinstance(piece, Unknown)), None)
    if unknown is not None:
        raise Unread(unknown.why)
    return None if content is None else text_if_known(content)


def count(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `wc -l`, `wc -w` and `wc -c` of the input."""
    text = _read(reader)
    if text is None or len(texts) != 2 or texts[1] not in ("-l", "-w", "-c"):
        return None
    sizes = {"-l": text.count("\n"), "-w": len(text.split()), "-c": len(text.encode())}
    return _text(f"{sizes[texts[1]]}\n")


def part_of_lines(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `head -n N` and `tail -n N` of the input."""
    text = _read(reader)
    match = re.fullmatch(r"-n?\s*(\d{1,9})", " ".join(texts[1:]), re.ASCII)
    if text is None or (match is None and len(texts) > 1):
        return None
    number = int(match[1]) if match else 10
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    selection = (
        lines[:number] if texts[0].endswith("head") else lines[max(len(lines) - number, 0) :]
    )
    return _text("".join(selection))


def cut(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `cut -d X -f LIST` and `cut -c LIST` of the input."""
    text = _read(reader)
    match = CUT.fullmatch("\0".join(texts[1:]))
    if text is None or match is None:
        return None
    mark, list_text = (
        match["mark"] or match["later"] or "\t",
        match["fields"] or match["first"] or match["chars"],
    )
    rows = text.removesuffix("\n").split("\n") if text else []
    return _text(
        "".join(
            f"{_cut(row, mark, match['chars'] is not None, _places(list_text))}\n" for row in rows
        )
    )


CUT = re.compile(
    r"-d\0?(?P<mark>[^\0])\0-f\0?(?P<fields>[\d,-]+)|-f\0?(?P<first>[\d,-]+)(?:\0-d\0?(?P<later>[^\0]))?|-c\0?(?P<chars>[\d,-]+)",
    re.DOTALL | re.ASCII,
)


def _places(list_text: str) -> list[tuple[int, int]]:
    """Return the ranges in a list like `1,3-4,6-`. Raises `Unread` for a list that `cut` refuses."""
    ranges = []
    for part in list_text.split(","):
        match = re.fullmatch(r"(\d{0,6})(-?)(\d{0,6})", part)
        if match is None or not (match[1] or match[3]) or (match[2] == "" and match[3]):
            raise Unread('this list of fields or characters for "cut" is not supported')
        low = int(match[1] or "1")
        ranges.append((low, int(match[3]) if match[3] else MOST if match[2] else low))
    if any(low < 1 or high < low for low, high in ranges):
        raise Unread('this list of fields or characters for "cut" is not supported')
    return ranges


def _cut(row: str, mark: str, chars: bool, places: Sequence[tuple[int, int]]) -> str:
    parts = list(simple(row)) if chars else row.split(mark)
    if not chars and len(parts) == 1:
        return row  # `cut -f` prints lines without the separator as they are
    selection = (
        part
        for index, part in enumerate(parts, 1)
        if any(low <= index <= high for low, high in places)
    )
    return ("" if chars else mark).join(selection)


def translate(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `tr [-s] A B`, `tr -d A`, `tr -cd A`, `tr -s A` for single characters and plain ranges."""
    text = _read(reader)
    rest = list(texts[1:])
    options = ""
    while rest and re.fullmatch(r"-[cCds]+", rest[0]):
        options += rest.pop(0)[1:].lower()
    sets = [_letters(operand) for operand in rest]
    how = "".join(sorted(set(options)))
    if (
        text is None
        or None in sets
        or any(operand.startswith("-") for operand in rest)
        or (how, len(sets)) not in KINDS_OF_TR
    ):
        return None
    first, second = str(sets[0]), str(sets[-1])
    if "d" in how:
        return _text("".join(char for char in text if (char in first) is ("c" in how)))
    if len(sets) == 1:
        return _text(_squeeze_letters(text, first))
    if not first or not second:
        return None
    # GNU's `tr` repeats the last character of a second set that is shorter than the first.
    output = text.translate(
        {ord(char): second[min(index, len(second) - 1)] for index, char in enumerate(first)}
    )
    return _text(_squeeze_letters(output, second) if how else output)


KINDS_OF_TR = frozenset((("", 2), ("s", 2), ("s", 1), ("d", 1), ("cd", 1)))
"""Supported options of `tr`, each with the number of character sets that it needs."""


def _squeeze_letters(text: str, letters: str) -> str:
    return "".join(
        char
        for index, char in enumerate(text)
        if char not in letters or text[index - 1 : index] != char
    )


def _letters(operand: str) -> str | None:
    operand = {r"\n": "\n", r"\t": "\t", "[:upper:]": "A-Z", "[:lower:]": "a-z"}.get(
        operand, operand
    )
    if re.search(r"[\\\[]", operand) or len(set(operand)) < len(operand):
        return None
    spread = re.sub(
        r"(\w)-(\w)",
        lambda match: "".join(map(chr, range(ord(match[1]), ord(match[2]) + 1))),
        operand,
    )
    return spread if spread.isascii() else None


def expr(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `expr A + B` over whole numbers."""
    if len(texts) != 4 or texts[2] not in ("+", "-", "*", "/", "%"):
        return None
    if not all(re.fullmatch(r"-?\d{1,15}", texts[index], re.ASCII) for index in (1, 3)):
        return None
    left, right = int(texts[1]), int(texts[3])
    if texts[2] in "/%" and not right:
        return None
    # Cut towards zero, as in C.
    quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1) if right else 0
    result = {
        "+": left + right,
        "-": left - right,
        "*": left * right,
        "/": quotient,
        "%": left - right * quotient,
    }[texts[2]]
    reader.scope.status = int(not result)  # `expr` fails for a result of 0
    return _text(f"{result}\n")


def model_sed(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `sed [-E] [-i] [-e] SCRIPT [FILE ...]`."""
    flags, scripts, names = _sed_options(texts[1:])
    if not scripts:
        if not names:
            return None
        scripts, names = names[:1], names[1:]
    script = "\n".join(scripts)
    inside = next((flag for flag in flags if flag.startswith(("-i", "--in-place"))), None)
    if inside and not names:
        return None
    inputs = [_read(reader, [name]) for name in names] if inside else [_read(reader, names)]
    if None in inputs:
        return None
    outputs = [streams.sed(str(text), script, bool(flags & {"-E", "-r"})) for text in inputs]
    if not inside:
        return _text(outputs[0])
    for name, before, text in zip(names, inputs, outputs, strict=True):
        # `-i.bak` keeps what was there under another name.
        if len(inside) > 2 and not inside.startswith("--"):
            reader.scope.files.put(reader.key(_text(name + inside[2:])), _text(str(before)))
        reader.scope.files.put(reader.key(_text(name)), _text(text))
    return ()


def _sed_options(words: Sequence[str]) -> tuple[set[str], list[str], list[str]]:
    """Return the options of `sed`, its scripts, and its other arguments."""
    flags, scripts, rest = set[str](), list[str](), list[str]()
    words = list(words)
    while words:
        word = words.pop(0)
        if word in ("-E", "-r", "--in-place") or re.fullmatch(r"-i[.\w]*", word):
            flags.add(word)
        elif word in ("-e", "--expression") and words:
            scripts.append(words.pop(0))
        elif word.startswith("-") and word != "-":
            raise Unread("this option of sed is not supported")
        else:
            rest.append(word)
    return flags, scripts, rest


def model_grep(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `grep [-EFivcoqx] EXPRESSION [FILE]`."""
    rest = list(texts[1:])
    flags = ""
    while rest and re.fullmatch(r"-[EFivcoqx]+", rest[0]):
        flags += rest.pop(0)[1:]
    if not 1 <= len(rest) <= 2 or rest[0].startswith("-"):
        return None
    text = _read(reader, rest[1:])
    if text is None:
        return None
    output = streams.grep(text, flags, rest[0])
    # The status tells whether a line fits, also if nothing or only a number is written.
    reader.scope.status = int(
        not streams.grep(text, flags.replace("q", "").replace("c", ""), rest[0])
    )
    return _text(output)


def sort(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `sort [-nru]`."""
    rest = [text for text in texts[1:] if not re.fullmatch(r"-[nru]+", text)]
    text = _read(reader, rest) if not any(name.startswith("-") for name in rest) else None
    return (
        None
        if text is None
        else _text(streams.sort_lines(text, "".join(set(texts[1:]) - set(rest))))
    )


def uniq(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `uniq` without options."""
    text = _read(reader) if len(texts) == 1 else None
    return None if text is None else _text(streams.single(text))


def fields(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `awk [-F X] '{print $1}' [FILE]`."""
    rest = list(texts[1:])
    mark = None
    if rest and rest[0].startswith("-F"):
        first = rest.pop(0)
        mark = first[2:] or (rest.pop(0) if rest else "")
    text = _read(reader, rest[1:]) if rest and not rest[0].startswith("-") else None
    return None if text is None else _text(streams.fields(text, rest[0], mark))


PROGRAMS: Mapping[str, Callable[[ShellState, Sequence[str]], Pieces | None]] = {
    "cat": cat,
    "tee": tee,
    "basename": basename,
    "dirname": dirname,
    "seq": seq,
    "wc": count,
    "head": part_of_lines,
    "tail": part_of_lines,
    "cut": cut,
    "tr": translate,
    "expr": expr,
    "sed": model_sed,
    "grep": model_grep,
    "sort": sort,
    "uniq": uniq,
    "awk": fields,
    **effects.PROGRAMS,
}
"""Models of programs by name. A model returns the program's output, or None if it is not known."""
