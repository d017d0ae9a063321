"""Every legal layout of up to four ranks, a sample of them in which every pair of settings meets, and how far they are off.

`python -m tests.engine.layouts` runs all of them with progress; `2/6 adamw` the second of six parts with one optimizer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any

from tests.engine.runs import SHAPE, Case, Outcome, distance, plain, trained_all

BUFFERS = (1, 2, None)
MESHES = [(1, 1, False), (2, 1, False), (4, 1, False)] + [
    (data, tensor, sequence)
    for data, tensor in ((1, 2), (2, 2), (1, 4))
    for sequence in (False, True)
]
"""Data ranks, tensor ranks, and whether tokens are split."""
AXES: Mapping[str, Sequence[Any]] = {
    "mesh": MESHES,
    "level": (0, 1, 2, 3),
    "weight buffers": BUFFERS,
    "gradient buffers": BUFFERS,
    "accumulation": (1, 4),
    "recompute": (False, True),
}
"""All settings; a level of ZeRO says how many buffers there are where nothing else does (None)."""
OPTIMIZERS: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "sgd": ({"optimizer.name": "sgd", "optimizer.lr": 0.3}, 1e-9),
    "adamw": (
        {
            "optimizer.name": "adamw",
            "optimizer.lr": 0.01,
            "optimizer.eps": 1e-4,
            "optimizer.weight_decay": 0.1,
        },
        1e-7,
    ),
}
"""Plan values of each optimizer, and how far its runs may be from one process."""

Setting = tuple[Any, ...]


def everything() -> Iterator[Setting]:
    """All combinations."""
    yield from product(*AXES.values())


def pairwise() -> list[Setting]:
    """Few combinations, in which every two values of two axes occur together."""
    rest, missing = (
        list(everything()),
        {pair for setting in everything() for pair in _pairs(setting)},
    )
    found = []
    while missing:
        best = max(rest, key=lambda setting: len(missing & _pairs(setting)))
        missing -= _pairs(best)
        found.append(best)
    return found


def _pairs(setting: Setting) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    return set(combinations(enumerate(setting), 2))


def world_of(setting: Setting) -> int:
    """Ranks of a setting."""
    data, tensor, _ = setting[0]
    return int(data * tensor)


def values_of(setting: Setting, optimizer: str) -> dict[str, Any]:
    """Plan values of a setting, in float64."""
    (_, tensor, sequence), level, weights, grads, accumulation, recompute = setting
    return {
        "precision.compute": "fp64",
        **OPTIMIZERS[optimizer][0],
        "parallel.tensor": tensor,
        "parallel.sequence": sequence,
        "zero.stage": level,
        "zero.weight_buffers": weights,
        "zero.grad_buffers": grads,
        "batch.accumulation": accumulation,
        "recompute.granularity": "full" if recompute else "none",
    }


WORLDS = sorted({data * tensor for data, tensor, _ in MESHES})
TOKENS = 8
AT_ONCE = 12
"""Trainings in one call of the pool, which has a time limit."""


@cache
def reference(optimizer: str) -> Outcome:
    """One plain process."""
    return plain(case_of(OPTIMIZERS[optimizer][0]))


def case_of(values: Mapping[str, Any]) -> Case:
    """Tokens that four ranks can split."""
    return Case(values, replace(SHAPE, sequence=TOKENS), batch=16, tokens=TOKENS)


def distances(
    run: Callable[..., list[Any]], settings: Iterable[Setting], optimizer: str
) -> Iterator[tuple[int, float]]:
    """Train with each of `settings`: ranks and the largest distance of a loss, a norm or a tensor from the plain run's, some
    trainings at a time; bytes and calls are as predicted.
    """
    settings = list(settings)
    for world in WORLDS:
        cases = [
            case_of(values_of(setting, optimizer))
            for setting in settings
            if world_of(setting) == world
        ]
        for some in (cases[start : start + AT_ONCE] for start in range(0, len(cases), AT_ONCE)):
            results = (zip(some, found, strict=True) for found in run(world, trained_all, some))
            yield (
                world,
                max(far(case, outcome, optimizer) for pairs in results for case, outcome in pairs),
            )


def far(case: Case, found: Outcome, optimizer: str) -> float:
    """The largest relative distance of losses, of gradient norms, and of the weights' changes."""
    expected = reference(optimizer)
    assert found.traffic == found.predicted, case
    assert found.bytes == found.predicted_bytes, case
    numbers = zip((*found.losses, *found.norms), (*expected.losses, *expected.norms), strict=True)
    return max(
        *(abs(mine / theirs - 1) for mine, theirs in numbers),
        distance(found.change, expected.change),
    )


def main(part: str = "1/1", *optimizers: str) -> None:
    """Run a part of all layouts, with all optimizers unless some are named; exit with 1 if any is off."""
    from tests.engine.pool import Pool

    first, of = map(int, part.split("/"))
    chosen, start, bad = list(everything())[first - 1 :: of], time.perf_counter(), False
    pools = {world: Pool(world) for world in WORLDS if world > 1}

    def run(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        alone = world == 1
        return [function(0, 1, *arguments)] if alone else pools[world].run(function, *arguments)

    for optimizer in optimizers or OPTIMIZERS:
        worst, allowed = 0.0, OPTIMIZERS[optimizer][1]
        for calls, (world, found) in enumerate(distances(run, chosen, optimizer)):
            worst = max(worst, found)
            done = f"{optimizer}, part {part}: call {calls + 1}, on {world} ranks, {time.perf_counter() - start:.0f} s"
            print(f"{done}; largest distance {worst:.2e}", flush=True)
        print(
            f"{optimizer}, part {part}: {len(chosen)} layouts, largest distance {worst:.2e}",
            flush=True,
        )
        bad |= worst >= allowed
    for pool in pools.values():
        pool.close()
    sys.exit(bad)


if __name__ == "__main__":
    main(*sys.argv[1:])
