"""300 single edits of real files of each stack, and what came of them; ends with 1 if one passed in silence.

Usage: python benchmarks/single_edits.py [COUNT [STACK ...]]; STAGEBRIDGE_SHARED names the folder with real files, SEED the
draw, SHOW an outcome to list beside the silent ones.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import compat
from bridge.errors import BridgeError
from bridge.files import load
from bridge.stack.dialect import Reader
from bridge.testing.single_edits import KINDS, SILENT, Base, Edited, Source, edit_source, outcome

HOME = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("STAGEBRIDGE_SHARED", "."))
RANKS = (8, 64, 512, 4, 1, 128, 256, 1024)
FILES = {
    "deepspeed": ("corpus/deepspeed/*.json", "examples/deepspeed/*.json"),
    "automodel": ("corpus/automodel/*.yaml", "examples/automodel/*.yaml"),
    "fast_llm": (
        "corpus/fast_llm/*.yaml",
        "examples/fast_llm/*.yaml",
        "tests/stacks/fast_llm/*.yaml",
    ),
    "merak": ("examples/merak/*.args", "examples/merak/[!c]*.json"),
}


def sources(stack: str) -> Iterator[tuple[Source, Sequence[str | None]]]:
    """Real sources, each with the releases to try: the newest one (None), else the one it was written for."""
    if stack == "megatron":
        rows = map(
            json.loads,
            (HOME / "tests" / "megatron" / "sample.jsonl").read_text("utf-8").splitlines(),
        )
        yield from ((row["flags"], (row["version"],)) for row in rows)
    for pattern in FILES.get(stack, ()):
        for path in (path for folder in (SHARED, HOME) for path in sorted(folder.glob(pattern))):
            data = load(path).data
            yield (
                (dict(data) if isinstance(data, Mapping) else list(data)),
                (None, *reversed(compat.load(stack).versions)),
            )


def base(dialect: Reader, source: Source, versions: Sequence[str | None]) -> Base | None:
    """A source as the first release and number of ranks read it that accept it; None if none does."""
    for version, ranks in product(versions, RANKS):
        read = partial(dialect.read, version=version, world_size=ranks)
        try:
            found = Base(source, read(source), read)
            _ = found.plan
        except BridgeError:
            continue
        return found
    return None


def edits(bases: Sequence[Base], count: int, chance: Random) -> Iterator[tuple[Base, Edited]]:
    """Different edits of the bases, the kinds in turn."""
    seen, tries = set[tuple[Any, ...]](), 0
    while len(seen) < count and tries < 100 * count:
        tries, place = tries + 1, chance.randrange(len(bases))
        edit = edit_source(bases[place].source, chance, KINDS[tries % len(KINDS)])
        if (
            edit is not None
            and (mark := (place, edit.kind, edit.was, edit.key, repr(edit.value))) not in seen
        ):
            seen.add(mark)
            yield bases[place], edit


def main(count: int, stacks: Sequence[str], seed: int) -> int:
    """Print a line for each stack, and every edit that passed in silence; with SHOW set, all others of that outcome."""
    silent = 0
    for stack in stacks:
        found = [
            made
            for source, versions in sources(stack)
            if (made := base(compat.load(stack), source, versions))
        ]
        results = [(edit, outcome(base, edit)) for base, edit in edits(found, count, Random(seed))]
        counts = Counter(what for _, what in results)
        print(
            f"{stack}: {len(found)} files, {len(results)} edits: {dict(counts.most_common())}",
            flush=True,
        )
        silent += counts[SILENT]
        for edit, what in results:
            if what in (SILENT, os.environ.get("SHOW")):
                print(
                    f"  {what}: {edit.kind}: {'.'.join(edit.place) or edit.was} -> {edit.key} = {edit.value!r}"
                )
    return int(bool(silent))


if __name__ == "__main__":
    count, *stacks = sys.argv[1:] or ["300"]
    known = [stack for stack in compat.names() if stack == "megatron" or stack in FILES]
    sys.exit(main(int(count), stacks or known, int(os.environ.get("SEED", "0"))))
