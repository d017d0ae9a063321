"""`python -m compat.deepspeed SCRIPT ...` runs a script in which `import deepspeed` means the native engine."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from compat.deepspeed.names import install

if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        found = sys.argv[1] if sys.argv[1:] else "nothing"
        print(
            f"python -m compat.deepspeed: found {found}, expected a script and its arguments",
            file=sys.stderr,
        )
        raise SystemExit(1)
    install()
    sys.argv.pop(0)
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
