"""Content of files: text that the script has written, else a file in the script's folder or in an allowed folder."""

from __future__ import annotations

from pathlib import Path

from bridge.files.named import OutsideError, find
from bridge.shell.files import AWAY, is_gone
from bridge.shell.scope import MOST_CHARACTERS
from bridge.shell.state import ShellState
from bridge.shell.word_pieces import NOWHERE, Pieces, Text, Unknown, spell_pieces


def content(reader: ShellState, path: Pieces) -> Pieces | None:
    """Return the content of a file: text that the script has written, else a file on disk; None if there is neither.

    A file on disk must be in the script's folder or in an allowed folder.
    """
    # A key with a NUL has an unknown part, and could be the key of any file.
    text = file(reader, path)
    key = reader.key(path)
    if text is not None or not key or "\0" in key or key.startswith(AWAY):
        return text
    lies = _lying(reader, key)
    return _fresh(reader, path, lies) if lies is not None else None


def _lying(reader: ShellState, name: str) -> Pieces | None:
    """Return the content of a file in the script's folder or in an allowed folder; None if there is none."""
    try:
        path = find(name, Path(reader.name).parent)
        if path is None or path.stat().st_size > MOST_CHARACTERS:
            return None
        return (Text(path.read_bytes().decode(), NOWHERE, True, plain=False),)
    except OutsideError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        why = f"the file cannot be read: {error}"
        return (Unknown(name, NOWHERE, reader.source.line(reader.place), why),)


def there(reader: ShellState, path: Pieces) -> bool | None:
    """Return whether a file exists, taking into account that the script may write or remove it; None if that is not known."""
    key, files = reader.key(path), reader.scope.files
    folder, slash, _ = key.rpartition("/")
    if key.endswith("/") or f"{key}/" in files.folders or "\0" in key or key.startswith(AWAY):
        return None
    if key in files.held:
        # A file that the script writes into a folder which may not be there may not be there
        # either.
        folder_exists = not slash or f"{folder}/" in files.folders or is_folder(reader, folder)
        return files.there(key) if folder_exists or is_gone(files.held[key]) else None
    return True if key and not files.stale(key) and _beside(reader, key) else None


def has_content(reader: ShellState, path: Pieces) -> bool | None:
    """Return whether an existing file has content; None if that is not known."""
    text, key = file(reader, path), reader.key(path)
    if text is not None:
        return any(isinstance(piece, Text) and piece.text for piece in text) or (
            None if text else False
        )
    disk_path = _beside(reader, key)
    return disk_path.stat().st_size > 0 if disk_path is not None else None


def _beside(reader: ShellState, name: str) -> Path | None:
    """Return the path of a file in the script's folder or in an allowed folder; None if there is none."""
    try:
        return find(name, Path(reader.name).parent)
    except OutsideError:
        return None


def is_folder(reader: ShellState, folder: str) -> bool:
    """Return whether a folder exists inside the script's folder."""
    return not folder.startswith((AWAY, "/", "~")) and (Path(reader.name).parent / folder).is_dir()


def missing(reader: ShellState, path: Pieces) -> str:
    """Return the reason why the content of a file is unknown. The script has not written this file."""
    try:
        find(reader.key(path).replace("\0", ""), Path(reader.name).parent)
    except OutsideError as error:
        return str(error)
    return f"{spell_pieces(path)}: no such file in the script's folder; put it there"


def file(reader: ShellState, path: Pieces) -> Pieces | None:
    """Return the text that the script has written to `path` so far; None if it has not written to `path`."""
    text = reader.scope.files.held.get(reader.key(path))
    return None if text is None else _fresh(reader, path, text)


def _fresh(reader: ShellState, path: Pieces, content: Pieces) -> Pieces:
    """Return `content`, or an unknown content if a program may have changed the file since."""
    why = reader.scope.files.stale(reader.key(path))
    return (
        (Unknown(spell_pieces(path), NOWHERE, reader.source.line(reader.place), why),)
        if why
        else content
    )


def text_before(reader: ShellState, path: Pieces) -> Pieces:
    """Return the content of a file before text is appended; empty if the file does not exist."""
    text = content(reader, path)
    return () if text is None or is_gone(text) else text
