"""Errors of ranks that a launcher started: of those that have the same to say on this machine, one says it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from bridge.cli.terminal import complaints
from bridge.exits import Exit

LINGER = 2.0
"""Seconds for which the rank that spoke waits for the others to come to the same, under torchrun."""
PATIENCE = 5.0
"""Seconds that the others wait for their launcher to end them, before they leave by themselves."""
STALE = 60.0
"""Age in seconds of a mark whose launch is over; ranks that are late have to see it before."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun looks for what a rank failed of, which it then shows in its summary."""


def is_rank() -> bool:
    """Whether this process is one of several that a launcher started."""
    said = os.environ
    many = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
    return any(
        said.get(rank, "").isdecimal() and said.get(world, "").isdecimal() and int(said[world]) > 1 for rank, world in many
    )


@contextmanager
def once(problems: Sequence[str]) -> Iterator[bool]:
    """Whether this process is to say these `problems`: no other rank of its launcher does.

    Behind the block the process is about to leave. Under torchrun, which lists every rank that fails, whoever spoke waits until
    the others have left well; else they wait for the launcher to end them, once the one that spoke has left.
    """
    if not is_rank():
        yield True
        return
    mark = _mark(problems)
    mine = _claimed(mark)
    yield mine
    sys.stderr.flush()
    if mine:
        _summarised(problems)
    if mine == _elastic():
        time.sleep(LINGER if mine else PATIENCE)


def code(mine: bool) -> Exit:
    """What a rank ends with that was refused: torchrun lists every one that fails, and ends with the code of the first."""
    return Exit.ERROR if mine or not _elastic() else Exit.CLEAN


def _elastic() -> bool:
    return is_rank() and ERROR_FILE in os.environ


def _mark(problems: Sequence[str]) -> Path:
    """A file that stands for these problems among the ranks of one launcher: in torchrun's own folder, where there is one."""
    said = sha256("\n".join(problems).encode(errors="replace")).hexdigest()[:16]
    if _elastic():
        return Path(os.environ[ERROR_FILE]).parents[1] / f"stagebridge-{said}"
    return Path(tempfile.gettempdir()) / f"stagebridge-{os.getuid()}-{os.getppid()}-{said}"


def _claimed(mark: Path) -> bool:
    """Whether nobody was here before; where that cannot be told, each says it. Marks of launches that are over go.

    A mark that this very rank left is of a launch before, from the same shell.
    """
    own = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "")
    for old in mark.parent.glob(f"stagebridge-{os.getuid()}-*"):
        with suppress(OSError):
            if time.time() - old.lstat().st_mtime > STALE:
                old.unlink()
    try:
        with os.fdopen(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(own)
    except FileExistsError:
        with suppress(OSError, UnicodeDecodeError):
            return mark.lstat().st_uid != os.getuid() or mark.read_text() == own
    except OSError:
        return True
    return True


def _summarised(problems: Sequence[str]) -> None:
    """Tell torchrun what it was, in its own form, so that its summary says so too."""
    place = os.environ.get(ERROR_FILE)
    if not place:
        return
    told = "\n  ".join(complaints(problems))
    said = {"message": told, "extraInfo": {"timestamp": str(int(time.time()))}}
    with suppress(OSError), open(place, "w", encoding="utf-8") as file:
        json.dump({"message": said}, file)
