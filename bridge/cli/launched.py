"""Errors of ranks that a launcher started: of the ranks with the same errors on one machine, one
prints them.
"""

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
"""Seconds for which, under torchrun, the rank that prints the error waits for the others to meet
the same error.
"""
PATIENCE = 5.0
"""Seconds for which the other ranks wait for their launcher to end them before they end by
themselves.
"""
STALE = 60.0
"""Age in seconds from which on a mark belongs to a launch that is over; late ranks have to see the
mark earlier.
"""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the file in which torchrun looks for the error of a rank, to show it in
its summary.
"""


def is_rank() -> bool:
    """Whether this process is one of several that a launcher started."""
    said = os.environ
    many = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
    return any(
        said.get(rank, "").isdecimal() and said.get(world, "").isdecimal() and int(said[world]) > 1
        for rank, world in many
    )


@contextmanager
def once(problems: Sequence[str]) -> Iterator[bool]:
    """Context that yields whether this process prints these `problems`; among the ranks of a
    launcher, one does.

    After the block the process is about to end. Under torchrun the rank that printed them waits, so
    that the others end first, with exit code 0: torchrun lists every rank that fails. Under another
    launcher it ends at once, and the others wait to be ended.
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
    """The exit code of a refused rank. Under torchrun, which lists every rank that fails, only the
    rank that printed the error fails.
    """
    return Exit.ERROR if mine or not _elastic() else Exit.CLEAN


def _elastic() -> bool:
    return is_rank() and ERROR_FILE in os.environ


def _mark(problems: Sequence[str]) -> Path:
    """A file that stands for these problems among the ranks of one launcher: in torchrun's own folder, where there is one."""
    said = sha256("\n".join(problems).encode(errors="replace")).hexdigest()[:16]
    if _elastic():
        # torchrun gives each rank a folder of its own within that of the attempt, which all of them share.
        return Path(os.environ[ERROR_FILE]).parents[1] / f"stagebridge-{said}"
    # Other launchers: all ranks of one machine have the same parent.
    return Path(tempfile.gettempdir()) / f"stagebridge-{os.getuid()}-{os.getppid()}-{said}"


def _claimed(mark: Path) -> bool:
    """Whether this rank is the first to create the mark; if that cannot be decided, every rank
    prints. Old marks are removed.

    A mark that this very rank created comes from an earlier launch in the same shell.
    """
    own = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "")
    for old in mark.parent.glob(f"stagebridge-{os.getuid()}-*"):
        with suppress(OSError):
            if time.time() - old.lstat().st_mtime > STALE:
                old.unlink()
    try:
        # Exactly one rank creates it; O_EXCL follows no link that somebody put there.
        with os.fdopen(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(own)
    except FileExistsError:
        with suppress(OSError, UnicodeDecodeError):
            # The folder is everybody's: a file of another user decides nothing here.
            return mark.lstat().st_uid != os.getuid() or mark.read_text() == own
    except OSError:
        return True
    return True


def _summarised(problems: Sequence[str]) -> None:
    """Write the problems in torchrun's own form, so that its summary shows them too."""
    place = os.environ.get(ERROR_FILE)
    if not place:
        return
    told = "\n  ".join(complaints(problems))
    # The form of `ErrorHandler.record_exception` in torch.distributed.elastic.
    said = {"message": told, "extraInfo": {"timestamp": str(int(time.time()))}}
    with suppress(OSError), open(place, "w", encoding="utf-8") as file:
        json.dump({"message": said}, file)
