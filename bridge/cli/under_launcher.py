"""Errors of ranks that a launcher started: if several ranks on one machine have the same errors, only
one of these ranks prints them.
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
from bridge.report.exit_codes import Exit

LINGER = 2.0
"""Seconds that the printing rank waits under torchrun, so that the other ranks meet the same error before it ends."""
PATIENCE = 5.0
"""Seconds that the other ranks wait to be ended by their launcher, before they end by themselves."""
STALE = 60.0
"""Age in seconds from which on a mark file belongs to an earlier launch.

It is long enough that late ranks still find the mark of their own launch.
"""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the file in which torchrun looks for the error of a rank, to show it in
its summary.
"""


def is_rank() -> bool:
    """Whether this process is one of several that a launcher started."""
    variables = os.environ
    many = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
    return any(
        variables.get(rank, "").isdecimal()
        and variables.get(world, "").isdecimal()
        and int(variables[world]) > 1
        for rank, world in many
    )


@contextmanager
def once(problems: Sequence[str]) -> Iterator[bool]:
    """Return a context that yields true if this process has to print these `problems`: of the ranks
    of one launch, exactly one has to.

    After the block the process ends. Under torchrun, which lists every rank that fails, the
    printing rank waits until the others have ended with exit code 0. Under another launcher the
    printing rank ends at once, and the others wait to be ended.
    """
    if not is_rank():
        yield True
        return
    mine = _claim_mark(_mark(problems))
    yield mine
    sys.stderr.flush()
    if mine:
        _write_error_file(problems)
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
    """Return the path of the mark file for these problems, which all ranks of one launch share.

    Under torchrun it is in torchrun's own folder.
    """
    digest = sha256("\n".join(problems).encode(errors="replace")).hexdigest()[:16]
    if _elastic():
        # torchrun gives each rank a folder of its own within that of the attempt, which all of them share.
        return Path(os.environ[ERROR_FILE]).parents[1] / f"stagebridge-{digest}"
    # Other launchers: all ranks of one machine have the same parent.
    return Path(tempfile.gettempdir()) / f"stagebridge-{os.getuid()}-{os.getppid()}-{digest}"


def _claim_mark(mark: Path) -> bool:
    """Return whether this rank is the first to create the mark file.

    Also return true if that cannot be decided, or if the mark is of this same rank, from an earlier
    launch in the same shell. Old marks are removed.
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


def _write_error_file(problems: Sequence[str]) -> None:
    """Write the problems into torchrun's error file, so that torchrun's summary shows them too."""
    place = os.environ.get(ERROR_FILE)
    if not place:
        return
    message = "\n  ".join(complaints(problems))
    # The form of `ErrorHandler.record_exception` in torch.distributed.elastic.
    record = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
    with suppress(OSError), open(place, "w", encoding="utf-8") as file:
        json.dump({"message": record}, file)
