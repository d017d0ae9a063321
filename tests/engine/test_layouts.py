"""Losses, gradients, bytes and calls of every layout are those of one process: a pairwise sample, and all of them on request.

`STAGEBRIDGE_ALL_LAYOUTS=1 pytest -s tests/engine/test_layouts.py` runs all and says the largest distance seen;
`python -m tests.engine.layouts` does so with progress.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

from tests.engine.layouts import OPTIMIZERS, Setting, distances, everything, pairwise


def furthest(run: Any, settings: Iterable[Setting], optimizer: str) -> float:
    """The largest distance from a plain run."""
    return max(found for _, found in distances(run, settings, optimizer))


ALL = bool(os.environ.get("STAGEBRIDGE_ALL_LAYOUTS"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_pair_of_settings_gives_the_numbers_of_one_process(run: Any, optimizer: str) -> None:
    """Each pair under one of the optimizers, in turns; under both of them on request."""
    settings = list(pairwise())
    turn = settings if ALL else settings[list(OPTIMIZERS).index(optimizer) :: len(OPTIMIZERS)]
    assert furthest(run, turn, optimizer) < OPTIMIZERS[optimizer][1]


@pytest.mark.skipif(not ALL, reason="takes minutes; set STAGEBRIDGE_ALL_LAYOUTS=1")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_layouts_give_the_numbers_of_one_process(run: Any, optimizer: str) -> None:
    found = furthest(run, list(everything()), optimizer)
    print(f"\n{optimizer}: {len(list(everything()))} layouts, largest distance {found:.2e}")
    assert found < OPTIMIZERS[optimizer][1]
