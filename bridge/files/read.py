"""Reads a file or a text within size limits, and parses it in its format."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from bridge import limits
from bridge.errors import SourceError
from bridge.files.document import TEXT, Document
from bridge.files.json import MalformedError, load_hjson, load_json, load_json_or_hjson
from bridge.files.python import ASSIGNED, NotPythonError, load_python
from bridge.files.shown import show_value
from bridge.files.toml import load_toml
from bridge.files.words import BLANK, load_words
from bridge.files.yaml import load_yaml
from bridge.shell.script import Script, load_script

TEMPLATE = re.compile(
    r"\{\{[^{}]*\}\}|\{%.*?%\}|\$\{[^{}]*\}|<[A-Za-z][\w .-]*>|@\w+@|(?<![\w./-])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+(?![\w./-])"
)
"""Matches what templates write in place of a value."""
SYNTAX = re.compile("syntax there|ends within a value|as a key")
Loader = Callable[[str, str], Document]

LOADERS: Mapping[str, Loader] = {
    ".json": load_json_or_hjson,
    ".hjson": load_hjson,
    ".yaml": load_yaml,
    ".yml": load_yaml,
    ".toml": load_toml,
    ".txt": load_words,
    ".args": load_words,
    **dict.fromkeys((".sh", ".bash", ".slurm", ".sbatch"), load_script),
}


def load(source: str | Path | Document, name: str | None = None) -> Document:
    """Parse a file or a text.

    A string is a text if it has a line break, or starts like JSON or a flag; else it is a path. The
    suffix decides the format, or the content if the suffix is unknown. A `Document` is returned
    unchanged. Raises `SourceError`.
    """
    if isinstance(source, Document):
        return source
    if isinstance(source, str) and is_text(source):
        return parse(source, name or TEXT)
    return parse(read_text(source), name or str(source), Path(source).suffix.lower())


def is_text(source: str) -> bool:
    """Return whether `source` is text to parse, rather than the path of a file."""
    return "\n" in source or not source.strip() or source.lstrip().startswith(("{", "[", "--"))


def parse(text: str, name: str = TEXT, suffix: str = "") -> Document:
    """Parse `text` in the format of `suffix` (`.json`, ...).

    For an unknown suffix, the content decides the format.
    """
    if len(text) > limits.TEXT:
        description = f"found more than {limits.TEXT >> 10} KiB of text"
        raise SourceError(f"{name}: {description}; a config is smaller, is this the right file?")
    if not text.strip():
        raise SourceError(f"{name}: empty; expected a config")
    try:
        document = _loader(text, suffix)(text, name)
    except SourceError as error:
        template = _unfilled(text, name) if SYNTAX.search(str(error)) else None
        raise template or error from None
    if not isinstance(document.data, dict | list | Script):
        description = show_value(document.data, 30)
        raise SourceError(
            f"{name}: found only {description}; expected a mapping of settings or a list of flags"
        )
    return document


def _unfilled(text: str, name: str) -> SourceError | None:
    """Return an error for a text that cannot be parsed because it is a template; None if it has no placeholder."""
    # Outside of JSON most of them are texts like any other, and so they are within quotes.
    loose = not text.lstrip().startswith(("{", "["))
    for number, line in enumerate(text.split("\n"), 1):
        for match in TEMPLATE.finditer(line):
            if line.count('"', 0, match.start()) % 2 == 0 and (
                match[0].startswith("{") or not loose
            ):
                problem = f"{match[0]} is a placeholder of a template that is not filled in; put a value there"
                return SourceError(f"{name}: line {number}: {problem}")
    return None


def _loader(text: str, suffix: str) -> Loader:
    """Return the loader for a suffix; for an unknown suffix, the content decides.

    A text that starts with a flag is a list of flags.
    """
    loader = LOADERS.get(suffix)
    if loader is load_script or (loader is None and re.match(r"#!.*sh\b", text)):
        return load_words if _opens_with_flag(_start(text)) else load_script
    return loader or _loader_of_text(text)


def _start(text: str) -> str:
    blank = BLANK.match(text)
    return text[blank.end() if blank else 0 :].partition("\n")[0]


def _opens_with_flag(start: str) -> bool:
    """Return whether the text starts with a flag, quoted or not.

    A quoted flag before a colon is a key of JSON, and not a flag.
    """
    return bool(
        re.match(r"--?[a-zA-Z]", start) or re.match(r"([\'\"])--?[a-zA-Z](?!.*\1\s*:)", start)
    )


def _loader_of_text(text: str) -> Loader:
    start = _start(text)
    if _opens_with_flag(start):
        return load_words
    # A name in brackets is a table of TOML; a number is a list of JSON.
    if re.fullmatch(r"\[{1,2}[A-Za-z_][\w.-]*\]{1,2}\s*(?:#.*)?", start):
        return load_toml
    if ASSIGNED.match(start):
        return load_python
    return _load_bracketed if start[:1] in ("{", "[", "/") else load_yaml


def _load_bracketed(text: str, name: str) -> Document:
    """Parse JSON, else a Python literal, else HJSON.

    If all three fail, the error is the one for the format that the text resembles most.
    """
    try:
        return load_json(text, name)
    except MalformedError:
        pass
    try:
        return load_python(text, name)
    except NotPythonError as error:
        python = error
    try:
        return load_json_or_hjson(text, name)
    except MalformedError:
        if PYTHONIC.search(text):
            raise python from None
        raise


PYTHONIC = re.compile(r"'\s*:|:\s*(?:True|False|None)\b")
"""Matches Python syntax that JSON does not have: a key in single quotes, or True, False or None as a value."""


def read_text(path: str | Path) -> str:
    r"""Return the text of the UTF-8 file at `path`, with line ends `\n`.

    Scripts keep the line ends of Windows, which a shell does not read as line ends. Raises
    `SourceError` for a file that is not text or is larger than 16 MiB.
    """
    try:
        with open(path, "rb", opener=_at_once) as stream:
            # Of the open file, and not of the path, which may name another one meanwhile. A
            # directory fails when it is read.
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                raise SourceError(
                    f"{path}: found a device or a pipe, expected a regular file; give - as the path, "
                    "and the content on standard input"
                )
            _check_size(status.st_size, path)
            return read_stream(stream, str(path))
    except FileNotFoundError:
        raise SourceError(f"{_printable(str(path))}: no such file; check the path") from None
    except IsADirectoryError:
        raise SourceError(
            f"{path}: found a directory, expected a config file; name a file in it"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SourceError(
            f"{_printable(str(path))}: cannot be read ({reason.lower()}); check the path"
        ) from None


def _at_once(path: str, flags: int) -> int:
    """Open a file without waiting: opening a pipe would otherwise block until another process writes into it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_stream(stream: BinaryIO, name: str) -> str:
    """Return the text of a binary stream.

    Raises `SourceError` if the stream cannot be read, is not text, or has more than 16 MiB.
    """
    try:
        content = stream.read(limits.FILE + 1)  # one byte more tells that there is more
    except OSError as error:
        raise SourceError(
            f"{name}: cannot be read ({(error.strerror or str(error)).lower()}); check the program or file behind it"
        ) from None
    _check_size(len(content), name)
    return _decode_bytes(content, name)


def _check_size(size: int, name: str | Path) -> None:
    if size > limits.FILE:
        description = f"found more than {limits.FILE >> 20} MiB"
        raise SourceError(f"{name}: {description}; a config is smaller, is this the right file?")


def _decode_bytes(content: bytes, name: str) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{name}: found bytes that are not UTF-8 (at {error.start}); save it as UTF-8 text"
        ) from None
    if "\0" in text:
        raise SourceError(f"{name}: found binary data, expected text; is this the right file?")
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    return (
        text
        if plain != text and _loader(plain, Path(name).suffix.lower()) is load_script
        else plain
    )


def _printable(path: str) -> str:
    return path if path.isprintable() else path.encode("unicode_escape").decode()
