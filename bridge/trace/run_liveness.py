"""Running: a file in a run's folder that shows whether the training still runs, so that a program
that follows the run knows when it ends.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bridge.errors import SourceError
from bridge.files.contained import read_text
from bridge.files.sealed import parse_object

ATTACHED = "attached.json"
"""Name of the file in a run's folder by which `stagebridge trace run` knows that a model was
attached.
"""

APART = "apart"
"""If ranks are traced separately, the first rank writes into the run's folder, and every other
rank into a subfolder whose name is this prefix with the rank.
"""

FILE = "running.json"
MOST = 2**16


def mark_process(folder: Path) -> Callable[[], None]:
    """Write a file that says that this process writes to `folder`. Returns a function that deletes
    the file; the file is also deleted when the process ends.
    """
    path = folder / FILE

    def remove_mark() -> None:
        with suppress(OSError):  # a folder that is gone needs no note
            path.unlink(missing_ok=True)
        atexit.unregister(remove_mark)

    with suppress(OSError):  # a folder that cannot be written to is reported by the log
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        atexit.register(remove_mark)
    return remove_mark


def is_alive(folder: Path) -> bool:
    """Return whether a process still writes to `folder`. This is so if `mark_process` has left its file
    and the process in it still exists. On another host this cannot be found out, and the file
    alone decides.
    """
    path = folder / FILE
    if not path.exists():
        return False
    try:
        mark = parse_object(read_text(path, folder, MOST), path)
        process = int(mark["pid"])
        if mark["host"] == socket.gethostname():
            os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    except (SourceError, KeyError, TypeError, ValueError, OverflowError):
        return path.exists()  # it is being written, or was taken away just now
    return True
