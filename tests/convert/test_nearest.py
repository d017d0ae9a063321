"""The known name that an unknown one is compared with."""

from __future__ import annotations

import pytest

from bridge.errors import nearest

KNOWN = (
    "--enable-msc",
    "--tensor-model-parallel-size",
    "--micro-batch-size",
    "--batch-size",
    "--lr",
)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("--tensor-model-paralel-size", "--tensor-model-parallel-size"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
        ("--microbatch-size", "--micro-batch-size"),
        ("--enable-mcs", "--enable-msc"),
        ("--Micro-Batch-Size", "--micro-batch-size"),
    ],
)
def test_a_misspelled_name_is_recognised(name: str, meant: str) -> None:
    assert nearest(name, KNOWN) == f"; did you mean {meant}?"


@pytest.mark.parametrize("name", ["--enable-gpt-oss", "--autotp-size", "--sequence-sparsity"])
def test_a_part_that_both_names_have_proves_nothing(name: str) -> None:
    assert nearest(name, KNOWN) == ""
