"""Writes files whole or not at all: a temporary file is synced, then renamed.

A user who cannot read the file from which the content comes cannot read the new file either."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from bridge.errors import SourceError
from bridge.files.lock import exclusive
from bridge.files.shown import show_value

PLAIN = 0o666
"""Widest mode of a new file, before the umask of the process applies."""
PRIVATE = 0o600
_WIDEST: ContextVar[int] = ContextVar("widest", default=0o777)


@contextmanager
def as_private_as(*sources: str | Path | None) -> Iterator[None]:
    """Return a context in which no file that this process writes has a wider mode than any of `sources`.

    None stands for an input that has no mode, such as standard input.
    """
    widest = _WIDEST.get()
    for source in sources:
        with suppress(OSError, ValueError):
            widest &= stat.S_IMODE(os.stat(source).st_mode) | 0o700 if source is not None else 0o777
    # The umask can be read only by setting it. It binds files that libraries write, too.
    token, mask = _WIDEST.set(widest), os.umask(0o077)
    os.umask(mask | (0o077 & ~widest))
    try:
        yield
    finally:
        _WIDEST.reset(token)
        os.umask(mask)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all. Raises `SourceError`."""
    write_all({Path(path): text})


def write_all(
    texts: Mapping[Path, str] | Mapping[Path, str | bytes], beside: Iterable[Path] = ()
) -> None:
    """Write several files, either all or none, under a lock against other writers.

    `beside` are those of the paths that the user did not name. A link at one of them is refused and
    not followed. Raises `SourceError`.
    """
    # A link that the user named is followed: its target is replaced, and not the link.
    targets = {Path(os.path.realpath(path)): text for path, text in texts.items()}
    SourceError.raise_if(problem for path in targets for problem in obstacles(path))
    SourceError.raise_if(
        f"{path}: is a link to {os.path.realpath(path)}, which is not followed; remove the link, "
        "or name another output"
        for path in beside
        if path in texts and path.is_symlink()
    )
    staging: dict[Path, Path] = {}
    path = Path()
    try:
        for path, text in targets.items():
            # In the same folder, as only there a rename replaces a file at once.
            staging[path] = path.parent / f".stagebridge-{os.getpid()}-{os.urandom(8).hex()}.tmp"
            _stage(path, staging[path], text)
        with ExitStack() as locks:
            # In one order, so that two writers of the same folders do not wait for each other.
            for folder in sorted({path.parent for path in targets}):
                locks.enter_context(exclusive(folder))
            _rename(staging)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SourceError(f"{path}: cannot be written ({reason}); nothing was written") from None
    finally:
        for leftover in staging.values():
            leftover.unlink(missing_ok=True)


def obstacles(path: Path) -> Iterator[str]:
    """Yield reasons why no file can be written to `path`."""
    try:
        if not path.name or path.is_dir():
            yield f"{path}: found a directory, expected the name of a file; name a file in it"
        elif path.exists() and not path.is_file():
            yield f"{path}: found a device or a pipe, expected a regular file; name another output"
        elif not path.parent.is_dir():
            yield f"{path}: there is no directory {path.parent}; create it first"
    except OSError as error:
        yield f"{show_value(str(path))}: cannot be written ({(error.strerror or str(error)).lower()}); name another output"


def _stage(path: Path, beside: Path, text: str | bytes) -> None:
    """Write the new content to a temporary file.

    The temporary file gets the mode of the file that it replaces, but no wider mode than the source has.
    """
    there = stat.S_IMODE(path.stat().st_mode) & 0o777 if path.exists() else None
    # A file that is replaced gets its mode before the content, and is private until then.
    mode = PLAIN & _WIDEST.get() if there is None else PRIVATE
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
        if there is not None:
            os.fchmod(stream.fileno(), there & _WIDEST.get())
        stream.write(text.encode() if isinstance(text, str) else text)
        # On the disk before the rename: after a crash the new name must not lead to an empty file.
        stream.flush()
        os.fsync(stream.fileno())


def _rename(staging: Mapping[Path, Path]) -> None:
    """Move the temporary files to their final paths.

    If one cannot be moved, restore the files that were replaced already.
    """
    before = {path: path.read_bytes() if path.exists() else None for path in staging}
    replacements: list[Path] = []
    try:
        for path, beside in staging.items():
            os.replace(beside, path)
            replacements.append(path)
    except BaseException:
        for path in replacements:
            _put_back(path, before[path])
        raise


def _put_back(path: Path, content: bytes | None) -> None:
    with suppress(OSError):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
