"""How many inputs a fuzzer tries, and the same ones on every run: 200 in the suite, as many as STAGEBRIDGE_FUZZ says by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from random import Random

from hypothesis import HealthCheck, settings

COUNT = int(os.environ.get("STAGEBRIDGE_FUZZ", "200"))
FIRST = int(os.environ.get("STAGEBRIDGE_FUZZ_FROM", "0"))
"""Number of the first input, for further rounds by hand."""
MANY = settings(
    max_examples=COUNT,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
"""For fuzzers that draw with Hypothesis: `@MANY` above `@given`."""


def generators(name: str) -> Iterator[Random]:
    """One generator of random numbers for each input of the fuzzer of this name: `for random in generators("shell")`."""
    return (Random(f"{name} {number}") for number in range(FIRST, FIRST + COUNT))
