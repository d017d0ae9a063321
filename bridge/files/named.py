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
    """The folder of the input, and further files and folders that the user allows."""

    folder: Path = Path()
    allowed: tuple[Path, ...] = ()

    def holds(self, path: Path) -> bool:
        """Whether `path`, its links resolved, lies inside the folder or is allowed."""
        # Links are resolved on both sides: a link within the folder must not lead out of it.
        real = Path(os.path.realpath(path))
        roots = [Path(os.path.realpath(root)) for root in (self.folder, *self.allowed)]
        return any(real.is_relative_to(root) for root in roots)

    def candidates(self, name: str) -> Iterator[Path]:
        """Paths that a name can mean: from the folder, from the working directory, and from each allowed folder."""
        yield from dict.fromkeys(root / name for root in (self.folder, Path(), *self.allowed))


_REACH: ContextVar[Reach | None] = ContextVar("reach", default=None)


class OutsideError(SourceError):
    """An input names a file that lies outside its folder and was not allowed; it was not opened."""


@contextmanager
def reaching(folder: str | Path, allowed: Iterable[str | Path] = ()) -> Iterator[None]:
    """Within this block an input in `folder` may name files inside of it, and the `allowed` files and folders."""
    token = _REACH.set(Reach(Path(folder), tuple(Path(path) for path in allowed)))
    try:
        yield
    finally:
        _REACH.reset(token)


def folder_of(source: object) -> Path | None:
    """The folder of an input that is a file; None for any other."""
    name = source.name if isinstance(source, Document) else source
    if not isinstance(name, str | Path) or "\n" in str(name):
        return None
    return Path(name).parent if is_file(Path(name)) else None


def own(name: str) -> Path | None:
    """The path of the file `name`, an argument of the caller; None if it does not exist."""
    return Path(name) if is_file(Path(name)) else None


def find(name: str, folder: Path | None = None) -> Path | None:
    """The path of the file that an input in `folder` calls `name`; None if it does not exist.

    Default of `folder`: that of the current input. Raises `OutsideError`, and opens nothing, if the
    file is outside the folder and not allowed.
    """
    known = _REACH.get() or Reach()
    reach = Reach(known.folder if folder is None else folder, known.allowed)
    places = list(reach.candidates(name))
    found = next((place for place in places if reach.holds(place) and is_file(place)), None)
    if found is None:
        # A name that leads out is refused, whether or not a file is there.
        outside = [place for place in places if not reach.holds(place)]
        there = next((place for place in outside if is_file(place)), None)
        if there or (outside and not reach.holds(places[0])):
            raise OutsideError(_outside(name, there or outside[0], reach))
    return found


def placed(name: str) -> str | Path:
    """The path of the file that the current input calls `name`; `name` itself if there is no input
    or no file.
    """
    return name if _REACH.get() is None else find(name) or name


def reached(name: str) -> Path | None:
    """The path of the file that the current input, or the caller if there is none, calls `name`;
    None if absent.
    """
    return own(name) if _REACH.get() is None else find(name)


def writable(name: str) -> Path:
    """The output folder `name` of an input, from the working directory.

    Raises `OutsideError` unless it is below the working directory or the input's folder, or is allowed.
    """
    reach, place = _REACH.get(), Path(name)
    if reach is not None and not (reach.holds(place) or Reach().holds(place)):
        raise OutsideError(_outside(name, place, reach).replace("opened", "written"))
    return place


def _outside(name: str, place: Path, reach: Reach) -> str:
    folder = os.path.realpath(reach.folder)
    return f"{name}: leads out of {folder}, so it was not opened; give --allow-path {os.path.realpath(place)} if you trust it"


def is_file(path: Path) -> bool:
    """Whether there is a file at `path`; False for names that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
