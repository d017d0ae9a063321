"""Folders of checkpoints with something changed in them: a byte, a value within a pickle or a header, a file, a link, a payload.

    python -m tests.checkpoint.mutated FOLDER [FOLDER ...] --count N

Each is read, held against its checksums, and planned in every format: it comes to an error that names a file, or to what was
there before. Nothing in it is executed. Only a value that somebody changed and saved anew may come to another whole checkpoint.
"""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import struct
import sys
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from functools import cache
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import torch

from bridge.checkpoint import formats, interface
from bridge.checkpoint.hub import Hub
from bridge.errors import BridgeError

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
KINDS = (
    "byte",
    "value",
    "value",
    "value",
    "cut",
    "swap",
    "gone",
    "double",
    "link",
    "name",
    "payload",
    "payload",
)
MARKER = "executed"
END = b"PK\x05\x06"


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every collection within a value, and a key of it; an object is the collection of its attributes."""
    held = (
        value
        if isinstance(value, dict | list | torch.Tensor | Enum)
        else getattr(value, "__dict__", None)
    )
    items = (
        held.items()
        if isinstance(held, dict)
        else enumerate(held)
        if isinstance(held, list)
        else ()
    )
    for key, inner in list(items):
        yield held, key
        yield from places(inner)


# What a file may hold that executes


def pickle_of(marker: Path) -> bytes:
    """A pickle that makes a file where it is executed."""
    command = f": > {marker}".encode()
    return b"\x80\x02cposix\nsystem\nX" + struct.pack("<I", len(command)) + command + b"\x85R."


def archives(content: bytes) -> Iterator[tuple[int, int]]:
    """Where the archives of torch.save lie in a file: one, or one behind the other."""
    begin = at = 0
    while (at := content.find(END, at)) >= 0:
        yield begin, at + 22
        begin = at = at + 22


def poisoned(path: Path, number: int, marker: Path) -> bool:
    """Put a payload into the place of a file's pickle, with a checksum that fits; whether there is one, and room for it."""
    content = bytearray(path.read_bytes())
    payload = pickle_of(marker)
    if path.name == ".metadata":
        path.write_bytes(payload)
        return True
    found = list(archives(content))
    if not found or content[:4] != b"PK\x03\x04":
        return False
    begin, end = found[number % len(found)]
    with zipfile.ZipFile(BytesIO(content[begin:end])) as archive:
        info = next(
            (info for info in archive.infolist() if info.filename.endswith("/data.pkl")), None
        )
    if info is None or info.file_size < len(payload):
        return False
    header = begin + info.header_offset
    name, extra = struct.unpack("<HH", content[header + 26 : header + 30])
    start = header + 30 + name + extra
    body = payload + bytes(info.file_size - len(payload))
    content[start : start + info.file_size] = body
    was, now = struct.pack("<I", info.CRC), struct.pack("<I", zlib.crc32(body))
    content[begin:end] = content[begin:end].replace(was, now)
    path.write_bytes(content)
    return True


# Changes


def mutate(folder: Path, random: Random) -> str:
    """Change one thing; what kind of change it was."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".py")
    path = random.choice(files)
    kind = random.choice(KINDS)
    if kind == "value" and valued(path, random):
        return "value"
    if kind == "payload" and poisoned(path, random.randrange(1000), folder / MARKER):
        return "payload"
    if kind == "swap":
        other = random.choice([other for other in files if other.suffix == path.suffix])
        content = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif kind == "double":
        others = [other for other in files if other.suffix == path.suffix and other != path]
        shutil.copy(path, random.choice(others or [path.with_name(f"more{path.suffix}")]))
    elif kind == "link":
        elsewhere = folder.parent / f"{folder.name}.elsewhere"
        path.rename(elsewhere)
        path.symlink_to(random.choice((elsewhere, Path("/etc/passwd"), Path(path.name), folder)))
    elif kind == "name":
        path.rename(
            path.with_name(
                random.choice(
                    (f"x{path.name}", path.name.replace("0", "1"), path.name.replace("1", "2"))
                )
            )
        )
    elif kind == "gone":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[: random.randrange(path.stat().st_size + 1)])
    else:
        content = bytearray(path.read_bytes())
        for _ in range(random.randrange(1, 4)) if content else ():
            content[random.randrange(len(content))] = random.randrange(256)
        path.write_bytes(content)
        return "byte"
    return kind


def valued(path: Path, random: Random) -> bool:
    """Change a value in a file and save it anew; whether it has values."""
    if path.suffix in (".pt", ".bin"):
        found = torch.load(path, weights_only=False)
        if changed(found, random, JUNK):
            torch.save(found, path)
            return True
    if path.name == ".metadata":
        described = pickle.loads(path.read_bytes())
        with suppress(
            AttributeError, RuntimeError
        ):  # some of its objects are not saved with something missing
            if changed(described, random, JUNK):
                path.write_bytes(pickle.dumps(described))
                return True
    if path.suffix == ".json":
        found = json.loads(path.read_text())
        if changed(
            found,
            random,
            (
                *(value for value in JUNK[:6] if value != JUNK[4]),
                "../x",
                "/etc/passwd",
                [],
                {},
                [[1]],
            ),
        ):
            path.write_text(json.dumps(found))
            return True
    if path.suffix == ".safetensors":
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        if changed(header, random, (None, -1, 2**70, "x", [], {}, [3], "F64", "BOOL", [0, 4])):
            text = json.dumps(header).encode()
            path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
            return True
    if path.name.startswith("latest"):
        path.write_text(random.choice(("..", "/etc", "../x", "", "x" * 5000, "a\nb", "\0")))
        return True
    return False


def changed(found: Any, random: Random, junk: tuple[Any, ...]) -> bool:
    """Change or remove one value inside."""
    inside = list(places(found))
    if not inside:
        return False
    holder, key = random.choice(inside)
    if random.random() < 0.3:
        del holder[key]
    else:
        holder[key] = random.choice(junk)
    return True


# Judging


@cache
def known(folder: Path) -> tuple[dict[tuple[str, str], torch.Tensor], Any]:
    """What was there before."""
    return contents(formats.read_checkpoint(folder))


def contents(hub: Hub) -> tuple[dict[tuple[str, str], torch.Tensor], Any]:
    """All tensors, and how far the run is."""
    return {(name, kind): held.whole() for name, kind, held in hub.tensors()}, (
        hub.where,
        hub.schedule,
        hub.scale,
        hub.groups,
    )


def same(one: Any, other: Any) -> bool:
    """Whether two checkpoints have the same bits, and are as far."""
    (mine, where), (theirs, there) = one, other
    alike = mine.keys() == theirs.keys() and all(
        value.dtype == theirs[key].dtype
        and torch.equal(value.view(-1).view(torch.uint8), theirs[key].view(-1).view(torch.uint8))
        for key, value in mine.items()
        if value.dim()
    )
    return alike and repr(where) == repr(there)


def tried(folder: Path, number: int, scratch: Path) -> str:
    """What reading and verifying come to: `accepted`, `named` if a finding says what is wrong, `unseen`, or the kind of error.

    Anything but a `BridgeError` is raised, and `AssertionError` for a wrong success: a payload that was executed or not seen, or
    another checkpoint than there was.
    """
    target = scratch / str(number)
    shutil.copytree(folder, target)
    kind = mutate(target, Random(number))
    try:
        format, place = formats.find_checkpoint(target)
        formats.verify_checkpoint(format, place)
        hub = formats.read_at(format, place)
        found, doubts = (
            contents(hub),
            formats.add_doubts(format, place, hub).findings[len(hub.findings) :],
        )
        plan(hub)
    except BridgeError as error:
        assert not (target / MARKER).exists(), "a payload was executed"
        assert kind != "payload" or any(word in str(error) for word in SEEN), (
            f"the payload is not named: {error}"
        )
        return type(error).__name__
    finally:
        shutil.rmtree(target)
        (scratch / f"{number}.elsewhere").unlink(missing_ok=True)
    assert kind != "payload", "a payload was not seen"
    bare = any(
        doubt.path == "checksums" for doubt in doubts
    )  # no SHA256SUMS, which conversions say
    if kind == "value" or same(found, known(folder)):
        return "accepted"
    if any(doubt.path.startswith("moments.") for doubt in doubts):
        return "named"
    assert bare and kind in UNSEEN[format.name], f"wrong success: {kind}"
    return "unseen"


UNSEEN = {
    "safetensors": ("byte",),
    "universal": ("swap", "double"),
    "deepspeed": ("swap", "double"),
}
"""What a format without checksums of its own does not show; it is counted apart."""


def plan(hub: Hub) -> None:
    """Plan it in every format; one that cannot hold it says so."""
    for name in (
        "native",
        "safetensors",
        "universal",
        "deepspeed",
        "dcp",
        "megatron",
        "megatron-ranks",
    ):
        with suppress(BridgeError):
            formats.plan_files(formats.format_of_name(name), hub, interface.Wanted())


SEEN = ("posix.system", "SHA256SUMS", "bytes of this file have changed")
"""What an error says of a payload: its name, or that the file is not the one that was written."""


def main() -> int:
    """Rounds by hand."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    for folder in options.folders:
        found: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as scratch:
            for number in range(options.count):
                try:
                    found[tried(folder, number, Path(scratch))] += 1
                except Exception as error:
                    failed += 1
                    print(f"{folder} {number}: {type(error).__name__}: {error}", flush=True)
        print(folder, dict(found), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
