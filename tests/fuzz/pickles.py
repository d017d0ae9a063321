"""Pickles made of operations: containers that stand in several places, as keys and in themselves, nested deeply, and cut."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from bridge.checkpoint import archive
from bridge.checkpoint.hub import as_plain
from bridge.checkpoint.unpickle import unpickle_value
from bridge.errors import SourceError
from tests.fuzz.exercise import Tally

LEAVES = (
    b"N",
    b"\x88",
    b"K\x07",
    b"X\x01\x00\x00\x00a",
    b"G?\xf0\x00\x00\x00\x00\x00\x00",
    b")",
    b"]",
    b"}",
)
SECONDS = 2.0
"""Processor seconds that no such pickle may take."""


def _operations(random: Random) -> bytes:
    """A value, built in some steps: each takes values that stand before it, often one of them several times."""
    made, hashed = bytearray(random.choice(LEAVES[:6]) + b"q\x000"), [True]
    mostly = random.choice((b"\x86", b"\x87", b"e", b"u", b"\x91", b"\x90"))
    for _ in range(random.choice((2, 8, 40, 60))):
        # Most often the newest: what is shared again and again unfolds without end.
        newest = len(hashed) - 1
        old = [newest if random.random() < 0.8 else random.randrange(len(hashed)) for _ in range(3)]
        get = [b"h" + bytes([number]) for number in old]
        keys = [number for number in old if hashed[number]] or [0]
        key = b"h" + bytes([random.choice(keys)])
        steps = {
            b"\x85": get[0] + b"\x85" * random.choice((1, 5, 30)),
            b"\x86": get[0] + get[1] + b"\x86",
            b"\x87": get[0] + get[1] + get[2] + b"\x87",
            b"e": b"](" + get[0] + get[1] + b"e",
            b"u": b"}(" + key + get[1] + b"u",
            b"\x91": b"(" + key + key + b"\x91",
            b"\x90": b"\x8f(" + key + b"\x90",
            b"R": b"ccollections\nOrderedDict\n](" + key + get[1] + b"\x86e\x85R",
        }
        kind = mostly if random.random() < 0.7 else random.choice(sorted(steps))
        whole = {b"\x85": old[:1], b"\x86": old[:2], b"\x87": old, b"\x91": keys}.get(kind)
        hashed.append(whole is not None and all(hashed[number] for number in whole))
        made += steps[kind] + b"q" + bytes([newest + 1])
        made += b"h" + bytes([newest + 1]) + b"a" if random.random() < 0.01 else b""  # into itself
        made += b"0"
    last = b"h" + bytes([len(hashed) - 1])
    wrapped = random.choice((b"", b"", b"\x85" * 3000))
    return bytes(made) + (b"}(" + last + wrapped + b"Nu" if hashed[-1] else last + wrapped)


def pickles(scratch: Path) -> Callable[[Random, Tally], None]:
    """A pickle is a value of bounded size, or is refused, within bounded time."""
    real = pickle.dumps({"a": [1, (2.5, None)], ("b", 1): {"c": frozenset({1})}, 3: {1, 2}}, 4)

    def one(random: Random, tally: Tally) -> None:
        start = time.process_time()
        data = b"\x80\x04" + _operations(random) + b"."
        if random.random() < 0.3:
            content = bytearray(real)
            for _ in range(random.randint(0, 3)):
                content[random.randrange(len(content))] = random.randrange(256)
            data = bytes(content)
        try:
            as_plain(unpickle_value(data, archive.KNOWN, "a.pt"), "a.pt")
            tally["accepted"] += 1
        except SourceError as error:
            tally.refuse(error)
        assert time.process_time() - start < SECONDS
        tally.took(start)

    return one
