"""Exercise of one input: everything that a user can do with it ends in a value or in one `BridgeError`, within bounded time."""

from __future__ import annotations

import contextlib
import io
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import bridge
import compat
from bridge import limits
from bridge.cli import run
from bridge.cli.show import show as shown
from bridge.errors import BridgeError
from bridge.files import parse, secrets
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config, Dialect
from bridge.translation import sidecar
from bridge.translation.lift import lower
from bridge.translation.translate import Result
from tests.fuzz import mutants

MOST = 3 * limits.SECONDS
"""Processor seconds that no input may take; a machine of the slowest kind has room enough in it."""
RANKS = (None, None, 1, 2, 8, 64)
COMMANDS = (
    ["check", "FILE", "--json"],
    ["check", "FILE", "--lenient"],
    ["layout", "FILE", "--ranks", "8", "--vocab", "64", "--json"],
    ["layout", "FILE", "--model", "tiny"],
    ["schedule", "FILE", "--microbatches", "4"],
    ["schedule", "FILE", "--json"],
    ["drift", "FILE", "--json"],
    *(["convert", "FILE", "--to", name, "-o", "OUT"] for name in compat.names()),
    *(
        ["convert", "FILE", "--to", name, "--world-size", "8", "--json", "--lenient"]
        for name in compat.names()
    ),
)


class Slow(AssertionError):
    """An input took more processor time than any may."""


class Tally(Counter[str]):
    """Inputs accepted, refused by kind of error, and the slowest.

    `further`, `stacks` and `terminal`: shares of the accepted that are told as findings, text and plan, and that go to another
    stack and back, and of all inputs that are given to a command. All cost more than the reader, so long rounds take less.
    """

    slowest = 0.0

    def __init__(self, further: float = 1.0, stacks: float = 0.1, terminal: float = 0.02) -> None:
        super().__init__()
        self.further, self.stacks, self.terminal = further, stacks, terminal

    def refuse(self, error: BridgeError, later: bool = False) -> None:
        """Count a refusal, which says something; `later`: of what is done with a config that was accepted."""
        assert error.problems and all(line.strip() for line in error.problems), (
            "an error says something"
        )
        assert "Traceback" not in str(error)
        self[f"refused{' later' * later}: {type(error).__name__}"] += 1

    def took(self, start: float) -> None:
        """Count an input on which work began at `start`, in processor seconds."""
        spent = time.process_time() - start
        self["inputs"] += 1
        self.slowest = max(self.slowest, spent)
        if spent > MOST:
            raise Slow(f"{spent:.1f} s of processor time")

    def floor(self, share: float) -> None:
        """Hold that at least this share was accepted, and that not all were."""
        assert share * self["inputs"] <= self["accepted"] < self["inputs"], dict(self)


def exercise(random: Random, text: str, path: Path, dialect: Dialect, tally: Tally) -> None:
    """Read `text` as the file at `path` of `dialect`, take what is accepted further, and give some to a command."""
    start, before = time.process_time(), tally["accepted"]
    secrets.HIDDEN.forget()
    try:
        document = parse(text, path.name, path.suffix)
        version = random.choice((None, None, None, random.choice(dialect.versions)))
        config = dialect.read(
            document, version, random.choice(RANKS), lenient=random.random() < 0.3
        )
        tally["accepted"] += 1
        if random.random() < tally.further:
            _further(random, config, tally)
    except BridgeError as error:
        tally.refuse(error, later=tally["accepted"] > before)
    if random.random() < tally.terminal:
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        command(random, path, dialect)
        tally["commands"] += 1
    tally.took(start)


def _further(random: Random, config: Config, tally: Tally) -> None:
    """Findings, a text, the plan; for some a text in every format, another stack, and back with what was carried over."""
    assert all(finding.message for finding in config.findings)
    tally["told"] += 1
    thorough = random.random() < tally.stacks / tally.further
    for format in (None, *config.dialect.formats) if thorough else (None,):
        with contextlib.suppress(BridgeError):
            config.text(format)
    bridge.lift(config)
    if thorough:
        tally["translated"] += 1
        _back(config, bridge.translate(config, compat.load(random.choice(compat.names()))))


SUFFIXES = {"json": ".json", "yaml": ".yaml", "flags": ".args", "script": ".sh"}


def _back(config: Config, result: Result) -> None:
    written = result.written
    document = parse(written.text, "there", SUFFIXES[written.format])
    target = result.config.dialect.read(document, world_size=result.config.world_size)
    kept = sidecar.parse(result.carry.text(written.text), "the sidecar")
    with contextlib.suppress(BridgeError):
        bridge.translate(target, config.dialect, config.version, config.world_size, kept)


def command(random: Random, path: Path, dialect: Dialect) -> None:
    """One command on the file."""
    out = path.with_name(
        random.choice(("out.json", "out.yaml", "out.args", "out.sh", path.name + ".new"))
    )
    words = [
        {"FILE": str(path), "OUT": str(out)}.get(word, word) for word in random.choice(COMMANDS)
    ]
    words += ["--from", dialect.name] * (random.random() < 0.7)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert run(words) in (0, 1, 2)


def show(random: Random, tally: Tally) -> None:
    """`show` of a stack with a name that is nearly one of its fields."""
    start, dialect = time.process_time(), compat.load(random.choice(compat.names()))
    name = random.choice(sorted(dialect.defaults(dialect.versions[-1])))
    asked = random.choice(
        (
            name,
            name,
            name.partition(".")[0],
            mutants.text(random, name),
            "--" + name.replace("_", "-"),
        )
    )
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            assert shown(dialect.name, asked, random.random() < 0.5) == 0 and out.getvalue().strip()
            tally["accepted"] += 1
        except BridgeError as error:
            tally.refuse(error)
    tally.took(start)


def plan(random: Random, make: Callable[[Random], Any], tally: Tally) -> None:
    """A plan of values near real ones, or of odd ones, is one, or is refused; each stack says it, or refuses it."""
    start, data = time.process_time(), make(random)
    try:
        found = Plan.of(data if isinstance(data, dict) else {"": data})
        tally["accepted"] += 1
        assert Plan.of(found.values()) == found, "a plan is what it says"
        if random.random() < tally.stacks:
            tally["translated"] += 1
            lower(
                found, compat.load(random.choice(compat.names())), world_size=random.choice(RANKS)
            )
    except BridgeError as error:
        tally.refuse(error)
    tally.took(start)
