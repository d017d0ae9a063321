"""Generated scripts that the engine refuses, on DeepSpeed itself: what it can do of them.

`python -m tests.engine.on_deepspeed --first N --count N --world RANKS`, on CPUs and in fp32, which is what DeepSpeed asks for.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bridge.engine.comm import connect
from tests.engine.generated_scripts import (
    LEVELS,
    Engine,
    Played,
    Script,
    Side,
    drawn,
    kind_of,
    play,
    tried,
)
from tests.engine.oracles import real_deepspeed
from tests.engine.pool import Pool


class DeepSpeed(Engine):
    """DeepSpeed, on this rank."""

    def deepspeed(self) -> Any:
        return real_deepspeed()

    def state(self) -> dict[str, Tensor]:
        weights = list(self.model.parameters()) if self.level == 3 else []
        with real_deepspeed().zero.GatheredParameters(weights):
            return {name: value.clone() for name, value in self.model.state_dict().items()}

    def layers(self) -> int:
        return 1


def on_deepspeed(rank: int, world: int, script: Script, level: int) -> Played:
    """A script on one rank of DeepSpeed."""
    connect(rank, world, "", "gloo", alone=True)
    torch.nn.functional.linear = torch._C._nn.linear  # ZeRO 3 leaves its own here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return play(DeepSpeed(script, world, rank, level))
        except Exception as error:
            if world > 1:  # another rank may wait for this one: all are started anew
                raise
            return Played(refused=f"Error: {type(error).__name__}: {error}".splitlines()[0])


def main() -> None:
    """Print each pair of outcomes, with their number by level."""
    parser = argparse.ArgumentParser()
    for name, default in (("--first", 0), ("--count", 75), ("--world", 1)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--all", action="store_true", help="those that the engine runs, too")
    asked = parser.parse_args()
    ours, theirs = (Pool(asked.world, "deepspeed", "deepspeed.comm") for _ in range(2))
    counts = Counter[tuple[str, str, int]]()
    for number in range(asked.first, asked.first + asked.count):
        script = replace(drawn(number), dtype=torch.float32)
        try:
            play(Side(script, asked.world))
        except RuntimeError:  # no script
            continue
        for level in LEVELS:
            engine = tried(script, level, ours)
            if engine == "equal" and not asked.all:
                counts[engine, "not run", level] += 1
                continue
            other = tried(script, level, theirs, on_deepspeed)
            print(number, level, script.model, *script.features, engine, other, sep=" | ")
            kind = "ends in an error" if "Error" in other else other.replace("BUG", "wrong")
            counts[kind_of(engine), kind_of(kind), level] += 1
    for (engine, other, level), runs in sorted(counts.items()):
        print(f"{runs:6} ZeRO {level}: engine {engine}; DeepSpeed {other}")
    ours.close()
    theirs.close()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
