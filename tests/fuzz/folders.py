"""Mutations of folders: bytes, JSON values, links, pipes and payloads, and what may come of reading what they leave."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from bridge.errors import BridgeError
from tests.fuzz.exercise import Tally

LIMIT = 120
"""Seconds for one input: far more than any takes, so that a machine under load passes and a hang fails."""
NASTY: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        1,
        2,
        7,
        2**31,
        2**63,
        2**70,
        0.5,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "..",
        "../x",
        "/etc/passwd",
    ),
    *(
        [],
        {},
        [[]],
        [0] * 5,
        {"a": 1},
        "x" * 300,
        "\x1b[31m",
        "\udc80",
        [None],
        [2**62, 2**62],
        "F64",
        "[" * 50,
    ),
)


class Payload:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def mutated(content: bytes, random: Random, others: Mapping[str, bytes], marker: Path) -> bytes:
    """`content`, with something done to it."""
    return random.choice(WAYS)(content, random, others, marker)


def _bit(content: bytes, random: Random, others: Mapping[str, bytes], marker: Path) -> bytes:
    place = random.randrange(len(content) or 1)
    return (
        content[:place] + bytes([content[place] ^ 1 << random.randrange(8)]) + content[place + 1 :]
        if content
        else b"x"
    )


def _cut(content: bytes, random: Random, others: Mapping[str, bytes], marker: Path) -> bytes:
    start = random.randrange(len(content) + 1)
    return content[:start] + random.choice(
        (b"", content[random.randrange(start, len(content) + 1) :])
    )


def _insert(content: bytes, random: Random, others: Mapping[str, bytes], marker: Path) -> bytes:
    place, more = (
        random.randrange(len(content) + 1),
        random.choice((random.randbytes(random.randrange(1, 20)), content, b"\n")),
    )
    return content[:place] + more + content[place:]


def _other(content: bytes, random: Random, others: Mapping[str, bytes], marker: Path) -> bytes:
    return others[random.choice(sorted(others))]


def _payload(content: bytes, random: Random, others: Mapping[str, bytes], marker: Path) -> bytes:
    return pickle.dumps(Payload(marker), protocol=random.randrange(6)) + random.choice(
        (b"", content)
    )


def _value(content: bytes, random: Random, others: Mapping[str, bytes], marker: Path) -> bytes:
    """Another value in JSON: of the file, of one of its lines, or of the header of a safetensors file."""
    if content[8:9] == b"{":
        length = struct.unpack("<Q", content[:8])[0]
        header = changed(content[8 : 8 + length], random)
        return struct.pack("<Q", len(header)) + header + content[8 + length :]
    lines = content.split(b"\n")
    number = random.randrange(len(lines))
    whole = changed(content, random)
    return (
        whole
        if whole != content
        else b"\n".join((*lines[:number], changed(lines[number], random), *lines[number + 1 :]))
    )


def changed(text: bytes, random: Random) -> bytes:
    """`text` with another value somewhere, if it is JSON."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    place, holder, key = found, [found], 0
    while isinstance(place, dict | list) and place and random.random() < 0.9:
        holder, key = (
            place,
            random.choice(sorted(place) if isinstance(place, dict) else range(len(place))),
        )  # type: ignore[assignment]
        place = holder[key]
    if isinstance(holder, dict) and random.random() < 0.15:
        del holder[key]
    elif isinstance(holder, dict) and random.random() < 0.15:
        holder[random.choice(("x", "..", "weights/other", str(key) + "@0"))] = holder.pop(key)
    else:
        holder[key] = random.choice(NASTY)
    return json.dumps(
        found if holder is not found or isinstance(found, dict | list) else holder[0]
    ).encode()


WAYS: tuple[Callable[[bytes, Random, Mapping[str, bytes], Path], bytes], ...] = (
    *(_bit, _bit, _cut, _insert, _other, _payload, _value, _value, _value),
)


def replace(path: Path, random: Random, outside: Path) -> None:
    """Put something that is no file in its place: nothing, a folder, a pipe, a link out, or to nowhere, or to itself."""
    path.unlink()
    what = random.randrange(6)
    if what == 1:
        path.mkdir()
    elif what == 2:
        os.mkfifo(path)
    elif what == 3:
        path.symlink_to(outside)
    elif what == 4:
        path.symlink_to("/nowhere/at/all")
    elif what == 5:
        path.symlink_to(path.name)


class Folder:
    """A folder whose files are mutated and put back."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root, self.outside, self.marker = root, scratch / "outside", scratch / "executed"
        self.files = {
            str(path.relative_to(root)): path.read_bytes()
            for path in root.rglob("*")
            if path.is_file()
        }
        self.outside.write_bytes(self.files[max(self.files)])

    @contextmanager
    def mutated(self, random: Random, seal: Callable[[Path], None]) -> Iterator[bool]:
        """With one to three files changed; whether digests were made anew to hide it."""
        names = random.sample(
            sorted(self.files), min(random.choice((1, 1, 1, 2, 3)), len(self.files))
        )
        for name in names:
            path = self.root / name
            if random.random() < 0.1:
                replace(path, random, self.outside)
            else:
                path.write_bytes(mutated(self.files[name], random, self.files, self.marker))
        hidden = random.random() < 0.5
        if hidden:
            seal(self.root)
        try:
            with within(LIMIT):
                yield hidden
        finally:
            self._restore()
        assert not self.marker.exists(), "something in a file was executed"

    def reads(
        self, read: Callable[[], Any], same: Callable[[Any], bool], seal: Callable[[Path], None]
    ) -> Callable[[Random, Tally], None]:
        """Makes and tries one input: what is read is what was written, unless new digests hide the change, or it is refused."""

        def one(random: Random, tally: Tally) -> None:
            with self.mutated(random, seal) as hidden:
                start = time.process_time()
                try:
                    found = read()
                except BridgeError as error:
                    tally.refuse(error)
                    tally.took(start)
                    return
                equal = same(found)
                assert hidden or equal, "read as something else than was written"
                tally["accepted"] += 1
                tally["read as hidden by new digests"] += not equal
                tally.took(start)

        return one

    def _restore(self) -> None:
        for name, content in self.files.items():
            path = self.root / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif os.path.lexists(path):
                path.unlink()
            path.write_bytes(content)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` if it takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
