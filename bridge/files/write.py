"""Files written whole or not at all: beside the target, synced, then renamed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from bridge.errors import SourceError


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all. Raises `SourceError`."""
    write_all({Path(path): text})


def write_all(texts: Mapping[Path, str] | Mapping[Path, str | bytes]) -> None:
    """Write several files, all of them or none. Raises `SourceError`."""
    targets = {Path(os.path.realpath(path)): text for path, text in texts.items()}
    SourceError.raise_if(problem for path in targets for problem in _obstacles(path))
    staged: dict[Path, Path] = {}
    try:
        for path, text in targets.items():
            staged[path] = _beside(path)
            _stage(path, staged[path], text)
        _rename(staged)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SourceError(f"{path}: cannot be written ({reason}); nothing was written") from None
    finally:
        for beside in staged.values():
            beside.unlink(missing_ok=True)


def _obstacles(path: Path) -> Iterator[str]:
    if path.is_dir():
        yield f"{path}: found a directory, expected the name of a file; name a file in it"
    elif path.exists() and not path.is_file():
        yield f"{path}: found a device or a pipe, expected a regular file; name another"
    elif not path.parent.is_dir():
        yield f"{path}: there is no directory {path.parent}; create it first"


def _beside(path: Path) -> Path:
    return path.parent / f".stagebridge-{os.getpid()}-{os.urandom(4).hex()}.tmp"


def _stage(path: Path, beside: Path, text: str | bytes) -> None:
    with open(beside, "xb") as stream:
        if path.exists():
            os.chmod(beside, stat.S_IMODE(path.stat().st_mode))
        stream.write(text.encode() if isinstance(text, str) else text)
        stream.flush()
        os.fsync(stream.fileno())


def _rename(staged: Mapping[Path, Path]) -> None:
    """Move staged files into place; if one cannot, put back those that were moved."""
    before = {path: path.read_bytes() if path.exists() else None for path in staged}
    moved: list[Path] = []
    try:
        for path, beside in staged.items():
            os.replace(beside, path)
            moved.append(path)
    except OSError:
        for path in moved:
            _put_back(path, before[path])
        raise


def _put_back(path: Path, content: bytes | None) -> None:
    with suppress(OSError):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
