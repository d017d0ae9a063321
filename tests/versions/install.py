"""Install every release of `releases.toml` into a folder of its own beside one torch: `python install.py FOLDER`."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

TABLE = Path(__file__).with_name("releases.toml")
PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
# Megatron-Core names Python 3.12 since 0.17, and its config classes need no more than 3.11.
APART = ("--no-deps", "--no-build-isolation", "--ignore-requires-python", "--upgrade", "--target")


def wanted() -> Iterator[str]:
    """What to install, as pip spells it."""
    for row in tomllib.loads(TABLE.read_text("utf-8")).values():
        yield from (f"{row['package']}=={release}" for release in row["releases"])


def install(what: str, folder: Path) -> None:
    """One release, whole or not at all; nothing to do if it is there. DeepSpeed's kernels are left out.

    The project's constraints name one release of each stack, and are for the others' sake not asked."""
    place = folder / what
    if place.is_dir():
        return
    partial = folder / f"{what}.partial"
    environment = {
        name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"
    } | {"DS_BUILD_OPS": "0"}
    start = monotonic()
    subprocess.run([*PIP, *APART, str(partial), what], check=True, env=environment, timeout=600)
    partial.rename(place)
    print(f"{what}: {monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for item in wanted():
        install(item, target)
