"""Desync checks see every fault that makes ranks differ, say where, and are silent otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from bridge.trace.desync import Policy
from tests.engine.runs import Case
from tests.trace.traces import checked, failing, wavering

Ranks = Callable[..., list[Any]]

ADAMW = {
    "precision.compute": "fp64",
    "optimizer.name": "adamw",
    "optimizer.lr": 0.01,
    "optimizer.eps": 1e-4,
}
TENSOR = {**ADAMW, "parallel.tensor": 2, "batch.micro": 4, "batch.accumulation": 2}
FLAT = {**TENSOR, "optimizer.lr": 0.0}
DATA = {**ADAMW, "parallel.data": 2, "batch.micro": 2, "batch.accumulation": 2}
FOUR = {
    **ADAMW,
    "parallel.data": 2,
    "parallel.tensor": 2,
    "batch.micro": 2,
    "batch.accumulation": 2,
}

LAYOUTS = [
    (world, {**base, "zero.stage": stage, **extra})
    for (world, base), stage, extra in product(
        [(2, DATA), (2, TENSOR), (4, FOUR)],
        [0, 1, 3],
        [
            {},
            {
                "recompute.granularity": "full",
                "parallel.sequence": True,
                "precision.compute": "fp32",
            },
        ],
    )
]


@pytest.mark.parametrize(("world", "plan"), LAYOUTS, ids=str)
def test_no_false_alarm(world: int, plan: dict[str, Any], run: Ranks) -> None:
    assert run(world, checked, Case(plan, steps=2)) == [([], 2)] * world


@pytest.mark.parametrize("at", [0, 2, 3])
def test_more_than_two_replicas_vote(at: int, run: Ranks) -> None:
    for reports, _ in run(4, checked, Case({**FOUR, "zero.stage": 0}, steps=3), at):
        found = [
            report
            for report in reports
            if f"of ranks 0, 1, 2, 3, rank {at} differs from the others; 1 of" in report
        ]
        assert len(found) == 1
        assert "1 ulps" in found[0]


NAMED = "2/reduce/block0/weight/norm1.weight"


def test_a_dump_has_the_tensors_of_all_ranks(run: Ranks, tmp_path: Path) -> None:
    for reports, steps in run(2, checked, Case(TENSOR), 1, Policy(action="dump", folder=tmp_path)):
        assert steps == 1
        assert reports[-1] == (
            f"desync: the tensors that differ were written into {tmp_path}/step-00000002, one file for "
            "each rank"
        )
    first, second = (
        load_file(tmp_path / "step-00000002" / f"rank-0000{rank}.safetensors") for rank in (0, 1)
    )
    assert NAMED in first and set(first) == set(second)
    assert (first[NAMED] != second[NAMED]).nonzero().tolist() == [[2]]


def test_a_dump_that_cannot_be_written_still_names_the_mismatch(run: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for reports, _ in run(
        2, failing, Case(TENSOR), Policy(action="dump", folder=tmp_path / "file")
    ):
        assert any(NAMED in report for report in reports)
        assert "cannot be written" in reports[-1]


@pytest.mark.parametrize(("ulps", "steps"), [(0, 1), (2**40, 3)])
def test_units_in_the_last_place_that_are_tolerated(ulps: int, steps: int, run: Ranks) -> None:
    """One bit is one unit in the weight, and more where gradients cancel; without a learning rate it stays that."""
    for reports, done in run(2, checked, Case(FLAT), 1, Policy(ulps=ulps)):
        assert (bool(reports), done) == (ulps == 0, steps)


def test_a_check_every_other_step(run: Ranks) -> None:
    for reports, steps in run(2, checked, Case(TENSOR), 1, Policy(every=3)):
        assert steps == 2
        assert any(
            report.startswith("desync: 3/reduce/block0/weight/norm1.weight") for report in reports
        )


def test_a_forward_that_is_run_again_is_compared_with_the_first(run: Ranks) -> None:
    case = Case({**TENSOR, "recompute.granularity": "full"})
    said = [report for reports in run(2, wavering, case) for report in reports]
    named = re.compile(
        r"desync: 1/forward/block1/microbatch 0/output: two passes on rank \d differ; the recomputation"
    )
    assert any(map(named.match, said)), said
    assert not any("embedding" in line or "block0" in line for line in said)


def test_a_log_goes_on(run: Ranks) -> None:
    assert run(2, checked, Case(TENSOR), 1, Policy(action="log")) == [([], 3)] * 2
