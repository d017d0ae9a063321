"""Every fuzzer by the name of what it fuzzes: what makes and tries one input, with all that inputs share made once."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import bridge
import compat
from bridge.errors import BridgeError
from bridge.files import parse
from bridge.layout.schedule import SCHEDULES, ScheduleShape, generate_schedule, make_timeline
from bridge.layout.schedule.table import read_schedule, schedule_to_csv
from bridge.stack.dialect import Config
from bridge.translation import sidecar
from compat.automodel.schedules import table
from tests.fuzz import mutants
from tests.fuzz.exercise import Tally, exercise, plan, show
from tests.fuzz.readers import READERS, ROOT, plans

One = Callable[[Random, Tally], None]
"""Makes an input of a generator of random numbers, tries it, and counts what came of it."""


def reader(name: str, scratch: Path) -> One:
    """Mutants of a stack's files in one format."""
    found = READERS[name]
    make, dialect, path = found.maker(), compat.load(found.dialect), scratch / f"x{found.suffix}"
    return lambda random, tally: exercise(random, make(random), path, dialect, tally)


def sidecars(scratch: Path) -> One:
    """A sidecar that was changed restores what it can, or is refused by its name."""
    launch = (ROOT / "examples/megatron/tiny.args").read_text()
    result = bridge.translate(
        compat.load("megatron").read(launch, world_size=4), compat.load("deepspeed")
    )
    record = json.loads(result.carry.text(result.written.text))
    record["original"] = {"text": launch, "suffix": ".args", "outside": {}, "chosen": None}
    target = compat.load("deepspeed").read(result.written)

    def one(random: Random, tally: Tally) -> None:
        text = (
            json.dumps(mutants.tree(random, record))
            if random.random() < 0.8
            else mutants.text(random, json.dumps(record))
        )
        _tried(lambda: _restored(target, text, random.random() < tally.further), tally)

    return one


def _restored(target: Config, text: str, further: bool) -> None:
    kept = sidecar.parse(text, "x.carry.json")
    if not further:
        return
    back = bridge.translate(target, compat.load("megatron"), carry=kept)
    if kept.original is not None:
        back.config.dialect.rewritten(back.config, kept.original, kept.version, Path("x.args"))


def _tried(work: Callable[[], Any], tally: Tally) -> None:
    start = time.process_time()
    try:
        work()
        tally["accepted"] += 1
    except BridgeError as error:
        tally.refuse(error)
    tally.took(start)


def tables(scratch: Path) -> One:
    """A schedule's table is read by both readers, or refused; what is read can be timed and written again."""
    shapes = [(name, ScheduleShape(2, 2 * SCHEDULES[name].least, 4)) for name in SCHEDULES]
    seeds = [schedule_to_csv(generate_schedule(name, shape)) for name, shape in shapes]

    def one(random: Random, tally: Tally) -> None:
        text = _table(random, random.choice(seeds))
        _tried(lambda: table(text) if random.random() < 0.5 else _timed(text), tally)

    return one


def _timed(text: str) -> None:
    actions = read_schedule(text)
    assert make_timeline(actions).length >= 0 and read_schedule(schedule_to_csv(actions)) == actions


def _table(random: Random, source: str) -> str:
    """Cells swapped, dropped, doubled or replaced."""
    rows = list(csv.reader(io.StringIO(source)))
    for _ in range(random.randint(0, 3)):
        row = random.choice(rows)
        place, other = random.randrange(len(row)), random.randrange(len(row))
        row[place], row[other] = row[other], row[place]
        row[place] = random.choice(
            (
                row[place],
                row[place],
                "",
                "400000000F1",
                "0F99999999999999999999",
                "99F0",
                "0X0",
                "1W1",
            )
        )
    text = "\n".join(",".join(row) for row in rows)
    return mutants.text(random, text) if random.random() < 0.4 else text


def texts(scratch: Path) -> One:
    """Any text in any format."""

    def one(random: Random, tally: Tally) -> None:
        text = mutants.text(random, random.choice(list(READERS.values())).maker()(random), 8)
        _tried(
            lambda: parse(
                text, suffix=random.choice(("", ".json", ".hjson", ".yaml", ".args", ".sh"))
            ),
            tally,
        )

    return one


def contents(scratch: Path) -> One:
    """Bytes of any kind in a file of any name, read by any stack."""

    def one(random: Random, tally: Tally) -> None:
        reader = random.choice(list(READERS.values()))
        content = bytearray(reader.maker()(random).encode("utf-8", "surrogatepass")) or bytearray(
            b"x"
        )
        for _ in range(random.randint(0, 3)):
            content[random.randrange(len(content))] = random.randrange(256)
        path = (
            scratch
            / f"x{random.choice((reader.suffix, reader.suffix, '', '.json', '.yaml', '.args'))}"
        )
        path.write_bytes(random.choice((b"", b"\xef\xbb\xbf", b"\xff\xfe")) + content)
        _tried(lambda: compat.load(reader.dialect).read(path), tally)

    return one


def checkpoints(scratch: Path) -> One:
    """Files of a checkpoint changed; needs torch."""
    from tests.fuzz.checkpoints import prepared

    return prepared(scratch)


def traces(scratch: Path) -> One:
    """Files of a trace log changed; needs torch."""
    from tests.fuzz.traces import prepared

    return prepared(scratch)


def pickles(scratch: Path) -> One:
    """Pickles whose containers stand in several places; needs torch."""
    from tests.fuzz.pickles import pickles

    return pickles(scratch)


def contradictions(scratch: Path) -> One:
    """Configs that contradict the checkpoint that is converted; needs torch."""
    from tests.fuzz.converted import contradictions

    return contradictions(scratch)


def changing(scratch: Path) -> One:
    """Checkpoints of which a file changes while they are converted; needs torch."""
    from tests.fuzz.converted import changing

    return changing(scratch)


def tools(scratch: Path) -> One:
    """Checkpoints of other tools with changed files; needs torch."""
    from tests.fuzz.tools import tools

    return tools(scratch)


EVERY: dict[str, Callable[[Path], One]] = {
    **{name: partial(reader, name) for name in READERS},
    "sidecar": sidecars,
    "plan": lambda scratch: lambda random, tally: plan(random, plans(), tally),
    "schedule CSV": tables,
    "checkpoint": checkpoints,
    "trace log": traces,
    "pickle": pickles,
    "contradicting config": contradictions,
    "changing checkpoint": changing,
    "checkpoint of another tool": tools,
    "show": lambda scratch: show,
    "text": texts,
    "bytes": contents,
}
"""By name, each with what prepares it in a folder of its own."""
