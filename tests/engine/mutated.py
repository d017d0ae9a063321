"""Folders of checkpoints with something changed in them: a byte, a value within a pickle, a file; read to errors or to values.

python tests/engine/mutated.py FOLDER [FOLDER ...] --count N
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch

from bridge.errors import BridgeError
from bridge.state import formats

JUNK: tuple[Any, ...] = (
    None,
    -1,
    2**70,
    1.5,
    float("nan"),
    "x",
    b"x",
    [],
    {},
    (),
    [[1]],
    {"a": 1},
    torch.zeros(2),
    torch.Size([3]),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every collection within a value, and a key of it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from places(inner)


def mutate(folder: Path, random: Random) -> str:
    """Change one thing; what it was."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = random.choice(files)
    kind = random.choice(("byte", "value", "value", "value", "cut", "swap", "gone"))
    found = torch.load(path, weights_only=False) if kind == "value" and path.suffix in (".pt", ".bin") else None
    if inside := list(places(found)):
        holder, key = random.choice(inside)
        if random.random() < 0.3:
            del holder[key]
        else:
            holder[key] = random.choice(JUNK)
        torch.save(found, path)
    elif kind == "swap":
        other = random.choice([other for other in files if other.suffix == path.suffix])
        content = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif kind == "gone":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[: random.randrange(path.stat().st_size + 1)])
    else:
        content = bytearray(path.read_bytes())
        for _ in range(random.randrange(1, 4)) if content else ():
            content[random.randrange(len(content))] = random.randrange(256)
        path.write_bytes(content)
    return f"{kind} of {path.name}"


def tried(folder: Path, number: int, scratch: Path) -> str:
    """What reading and planning come to: `accepted`, or the kind of error; anything but a `BridgeError` is raised."""
    target = scratch / str(number)
    shutil.copytree(folder, target)
    try:
        mutate(target, Random(number))
        hub = formats.read(target)
        for _, _, held in hub.tensors():
            assert held.whole().shape == held.shape
        for name in ("native", "safetensors", "universal", "deepspeed", "dcp"):
            formats.planned(formats.named(name), hub, formats.Wanted())
    except BridgeError as error:
        return type(error).__name__
    finally:
        shutil.rmtree(target)
    return "accepted"


def main() -> int:
    """Rounds by hand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=400)
    options = parser.parse_args()
    failed = 0
    for folder in options.folders:
        found: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as scratch:
            for number in range(options.count):
                try:
                    found[tried(folder, number, Path(scratch))] += 1
                except Exception as error:
                    failed += 1
                    print(f"{folder} {number}: {type(error).__name__}: {error}")
        print(folder, dict(found))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
