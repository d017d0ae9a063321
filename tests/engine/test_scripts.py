"""Scripts of people's kinds give plain torch's numbers once their import is changed: a sample; `scripts.py` runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.pool import Pool
from tests.engine.scripts import RANKS, TOLERANCE, compared, expected_of, good, names

SAMPLE = (
    "accumulation",
    "autocast",
    "by_batches",
    "compiled",
    "dropout",
    "ema",
    "frozen_and_tied",
    "gradient_hooks",
    "hand_edits",
    "pictures_and_words",
    "resuming",
    "several_optimizers",
    "short_epoch",
    "weight_norm",
)
NUMBER, REFUSED = 40, 4
LEVELS = (0, 3)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_script_gives_the_numbers_of_plain_torch(pools: dict[int, Pool], name: str) -> None:
    pytest.importorskip("transformers")
    outcomes = dict(compared(pools.setdefault(RANKS, Pool(RANKS)), name, LEVELS))
    assert set(outcomes) == set(LEVELS)
    assert all(good(name, outcome) for outcome in outcomes.values()), outcomes


def test_there_are_forty_scripts_of_which_few_are_refused() -> None:
    texts = {
        name: (Path(__file__).parent / "scripts" / f"{name}.py").read_text(encoding="utf-8")
        for name in names()
    }
    assert len(texts) >= NUMBER
    assert sum("\nREFUSED = " in text for text in texts.values()) <= REFUSED
    assert [name for name, text in texts.items() if "\nTOLERANCE = " in text] == ["autocast"]
    assert expected_of("autocast")[1] != TOLERANCE
