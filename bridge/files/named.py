"""Files that an input names. They are opened only in the folder of that input, or in folders that the user allows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import SourceError
from bridge.files.document import Document


@dataclass(frozen=True)
class Reach:
    """The folder of the input, and further files and folders that the user allows to open."""

    folder: Path = Path()
    allowed: tuple[Path, ...] = ()

    def holds(self, path: Path) -> bool:
        """Return whether `path`, with links resolved, lies inside the folder or is allowed."""
        # Links are resolved on both sides: a link within the folder must not lead out of it.
        real = Path(os.path.realpath(path))
        roots = [Path(os.path.realpath(root)) for root in (self.folder, *self.allowed)]
        return any(real.is_relative_to(root) for root in roots)

    def candidates(self, name: str) -> Iterator[Path]:
        """Yield the paths that a name can stand for: in the folder, in the working directory, and in each allowed folder."""
        yield from dict.fromkeys(root / name for root in (self.folder, Path(), *self.allowed))


_REACH: ContextVar[Reach | None] = ContextVar("reach", default=None)


class OutsideError(SourceError):
    """Raised if an input names a file that lies outside the input's folder and was not allowed.

    The file was not opened.
    """


@contextmanager
def reaching(folder: str | Path, extra_paths: Iterable[str | Path] = ()) -> Iterator[None]:
    """Return a context in which an input in `folder` may name files inside it, and the files and folders of `extra_paths`."""
    token = _REACH.set(Reach(Path(folder), tuple(Path(path) for path in extra_paths)))
    try:
        yield
    finally:
        _REACH.reset(token)


def folder_of(source: object) -> Path | None:
    """Return the folder of an input that is a file; None for any other input."""
    name = source.name if isinstance(source, Document) else source
    if not isinstance(name, str | Path) or "\n" in str(name):
        return None
    return Path(name).parent if is_file(Path(name)) else None


def own(name: str) -> Path | None:
    """Return `name` as a path if that file exists; else None.

    `name` comes from the caller and not from an input, so the file may be in any folder.
    """
    return Path(name) if is_file(Path(name)) else None


def find(name: str, folder: Path | None = None) -> Path | None:
    """Return the path of the file that an input calls `name`; None if the file does not exist.

    `folder` is the folder of that input; None: the folder of the current input. Raises
    `OutsideError`, and opens nothing, if the file lies outside the folder and is not allowed.
    """
    current = _REACH.get() or Reach()
    reach = Reach(current.folder if folder is None else folder, current.allowed)
    places = list(reach.candidates(name))
    path = next((place for place in places if reach.holds(place) and is_file(place)), None)
    if path is None:
        # A name that leads out is refused, whether or not a file is there.
        outside = [place for place in places if not reach.holds(place)]
        there = next((place for place in outside if is_file(place)), None)
        if there or (outside and not reach.holds(places[0])):
            raise OutsideError(_outside(name, there or outside[0], reach))
    return path


def path_of_name(name: str) -> str | Path:
    """Return the path of the file that the current input calls `name`.

    Without a current input, or if the file does not exist, return `name`.
    """
    return name if _REACH.get() is None else find(name) or name


def existing_path(name: str) -> Path | None:
    """Return the path of the file that the current input calls `name`; None if the file does not exist.

    Without a current input, `name` is a path from the caller, which may lead anywhere.
    """
    return own(name) if _REACH.get() is None else find(name)


def writable(name: str) -> Path:
    """Return the path of the output folder that an input calls `name`, relative to the working directory.

    Raises `OutsideError` unless the folder lies below the working directory or the input's folder,
    or is allowed.
    """
    reach, place = _REACH.get(), Path(name)
    if reach is not None and not (reach.holds(place) or Reach().holds(place)):
        raise OutsideError(_outside(name, place, reach).replace("opened", "written"))
    return place


def _outside(name: str, place: Path, reach: Reach) -> str:
    roots = dict.fromkeys(os.path.realpath(root) for root in (reach.folder, *reach.allowed))
    return (
        f"{name}: leads out of {' and of '.join(roots)}, so nothing was opened; "
        f"give --allow-path {os.path.realpath(place)} if you trust this path"
    )


def is_file(path: Path) -> bool:
    """Whether there is a file at `path`; False for names that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
