"""Fuzzers of the readers: mutants of real files are accepted or refused in one clear error, whatever is then done with them."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest

from tests.fuzz.every import EVERY
from tests.fuzz.exercise import Tally
from tests.fuzz.fuzzing import generators
from tests.fuzz.readers import READERS

OTHERS = (
    ("sidecar", 0.3),
    ("plan", 0.1),
    ("schedule CSV", 0.05),
    ("checkpoint", 0.1),
    ("trace log", 0.01),
    ("pickle", 0.1),
    ("contradicting config", 0.05),
    ("changing checkpoint", 0.1),
    ("checkpoint of another tool", 0.1),
)
LEAST = {name: reader.floor for name, reader in READERS.items()} | dict(
    (*OTHERS, ("show", 0.3), ("text", 0.1), ("bytes", 0.01))
)
"""Least share of inputs that is to be accepted: a fuzzer whose inputs are all refused at the door tries nothing."""

TORCH = {
    "checkpoint": 200,
    "trace log": 200,
    "pickle": 200,
    "contradicting config": 60,
    "changing checkpoint": 60,
    "checkpoint of another tool": 100,
}
"""Those that need torch, each with the most inputs that the suite tries of it."""


def test_every_fuzzer_has_a_share() -> None:
    assert LEAST.keys() == EVERY.keys()


@pytest.mark.parametrize("name", EVERY)
def test_a_mutant_is_accepted_or_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in TORCH and find_spec("torch") is None:
        pytest.skip("needs torch")
    monkeypatch.chdir(tmp_path)
    one, tally = EVERY[name](tmp_path), Tally()
    for random in islice(generators(name), TORCH.get(name)):
        one(random, tally)
    print(f"{name}: {dict(tally)}, slowest {tally.slowest:.2f} s")
    tally.floor(LEAST[name])
