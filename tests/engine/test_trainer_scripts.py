"""Scripts of the Trainer, accelerate, peft and trl give DeepSpeed's own numbers on the drop-in, or are refused with what to do: a
sample; STAGEBRIDGE_EVERY=1 tries all of `trainer_scripts.py` at all levels of ZeRO.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")

from tests.engine.trainer_scripts import LEVELS, NEEDS, SCRIPTS, available, compared

EVERY = bool(os.environ.get("STAGEBRIDGE_EVERY"))
SAMPLE = (
    "callbacks",
    "iterable_data",
    "save_and_resume",
    "accumulate",
    "dummies_of_a_file",
    "dropout",
    "reentrant_checkpointing",
)
REFUSED = {
    **{("adafactor", level): r"use torch\.optim\.AdamW, Adam or SGD" for level in (2, 3)},
    **{
        ("in_eval_mode", level): r"call engine\(\.\.\.\) in training mode first" for level in LEVELS
    },
}
"""Scripts that are refused at a level, and what the error says to do."""
NAMED = {
    ("bf16", 0): "use stage 1",
    ("bf16_loop", 0): "use stage 1",
    ("adafactor", 1): "Both agree at stage 0",
}
"""Scripts whose numbers are not DeepSpeed's at a level, and what a warning says of it."""
STOPS = {"schedule_of_defaults"}
"""Scripts that DeepSpeed itself stops under ZeRO."""


def test_scripts_of_libraries_give_deepspeeds_numbers(tmp_path: Path) -> None:
    names = available() if EVERY else SAMPLE
    cases = [(level, name) for name in names for level in (LEVELS if EVERY else (3,))]
    outcomes = list(compared(cases, tmp_path))
    assert [(level, name) for level, name, *_ in outcomes] == cases
    wrong = []
    for level, name, kind, apart, said in outcomes:
        expected, pattern = "equal", ""
        if (name, level) in REFUSED:
            expected, pattern = "refused", REFUSED[name, level]
        elif (name, level) in NAMED:
            expected, pattern = "named", NAMED[name, level]
        elif name in STOPS and level:
            expected = "DeepSpeed stops"
        if kind != expected or not re.search(pattern, said):
            wrong.append((level, name, kind, apart, said))
    assert not wrong, wrong


def test_scripts_are_of_thirty_kinds_and_more() -> None:
    assert len([name for name in SCRIPTS if not NEEDS[name]]) >= 30
    assert {*SAMPLE, *STOPS, *(name for name, _ in (*REFUSED, *NAMED))} <= set(SCRIPTS)
