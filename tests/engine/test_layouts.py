"""Losses, gradients, bytes and calls of every layout are those of one process: a pairwise sample, and all of them on request.

`STAGEBRIDGE_ALL_LAYOUTS=1 pytest -s tests/engine/test_layouts.py` runs all and says the largest distance seen.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from layouts import MESHES, OPTIMIZERS, Setting, everything, pairwise, values_of, world_of
from runs import SHAPE, Case, Outcome, distance, plain, trained_all

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


def furthest(run: Any, settings: Iterable[Setting], optimizer: str) -> float:
    """Train with each of `settings`; the largest distance of a loss, a norm or a tensor from the plain run's."""
    return max(max(found) for world in WORLDS for found in distances(run, world, settings, optimizer))


def distances(run: Any, world: int, settings: Iterable[Setting], optimizer: str) -> Iterator[tuple[float, float, float]]:
    """Distances on each rank; bytes and calls are as predicted."""
    cases = [case_of(values_of(setting, optimizer)) for setting in settings if world_of(setting) == world]
    for some in (cases[start : start + AT_ONCE] for start in range(0, len(cases), AT_ONCE)):
        for outcomes in run(world, trained_all, some):
            for case, outcome in zip(some, outcomes, strict=True):
                assert outcome.traffic == outcome.predicted, case
                assert outcome.bytes == outcome.predicted_bytes, case
                yield far(outcome, reference(optimizer))


def far(found: Outcome, expected: Outcome) -> tuple[float, float, float]:
    """The largest relative distance of losses, of gradient norms, and of the weights' changes."""
    losses = max(abs(mine / theirs - 1) for mine, theirs in zip(found.losses, expected.losses, strict=True))
    norms = max(abs(mine / theirs - 1) for mine, theirs in zip(found.norms, expected.norms, strict=True))
    return losses, norms, distance(found.change, expected.change)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_pair_of_settings_gives_the_numbers_of_one_process(run: Any, optimizer: str) -> None:
    assert furthest(run, pairwise(), optimizer) < OPTIMIZERS[optimizer][1]


@pytest.mark.skipif(not os.environ.get("STAGEBRIDGE_ALL_LAYOUTS"), reason="takes minutes; set STAGEBRIDGE_ALL_LAYOUTS=1")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_layouts_give_the_numbers_of_one_process(run: Any, optimizer: str) -> None:
    found = furthest(run, list(everything()), optimizer)
    print(f"\n{optimizer}: {len(list(everything()))} layouts, largest distance {found:.2e}")
    assert found < OPTIMIZERS[optimizer][1]
