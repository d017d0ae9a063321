"""Megatron-Core itself trains what the engine trains: the same losses, norms and weights, on one rank and split in every way."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from pool import Pool

if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is not installed", allow_module_level=True)

from megatron_runs import GATED, LEARNED, Found, both, case_of
from runs import Case

INTERLEAVED = {"schedule__name": "interleaved_1f1b", "schedule__virtual": 2}
TWO = {
    "tensor": case_of(GATED, parallel__tensor=2),
    "tensor, odd vocabulary": case_of(LEARNED, parallel__tensor=2),
    "tensor and sequence": case_of(GATED, parallel__tensor=2, parallel__sequence=True),
    "tensor and sequence, odd vocabulary": case_of(LEARNED, parallel__tensor=2, parallel__sequence=True),
    "1f1b": case_of(GATED, parallel__pipeline=2),
    "1f1b, untied": case_of(LEARNED, parallel__pipeline=2),
    "1f1b, per token": case_of(LEARNED, parallel__pipeline=2, loss="per_token"),
    "interleaved": case_of(GATED, parallel__pipeline=2, **INTERLEAVED),
    "data": case_of(GATED, zero__stage=0),
    "distributed optimizer": case_of(GATED, zero__stage=1),
}
FOUR = {
    "tensor x pipeline": case_of(GATED, parallel__tensor=2, parallel__pipeline=2),
    "tensor x pipeline and sequence": case_of(LEARNED, parallel__tensor=2, parallel__pipeline=2, parallel__sequence=True),
    "tensor x data": case_of(GATED, parallel__tensor=2, zero__stage=1),
    "1f1b over four": case_of(GATED, parallel__pipeline=4),
    "interleaved x data": case_of(GATED, parallel__pipeline=2, zero__stage=1, **INTERLEAVED),
}
WORLDS = {**dict.fromkeys(TWO, 2), **dict.fromkeys(FOUR, 4)}
Ranks = list[list[tuple[Found, Found]]]


@pytest.fixture(scope="module")
def alone() -> dict[Any, tuple[Found, Found]]:
    """By shape, what Megatron-Core and the engine do on one rank."""
    cases = [case_of(GATED), case_of(LEARNED)]
    return dict(zip((GATED, LEARNED), both(0, 1, cases), strict=True))


@pytest.fixture(scope="module")
def found(pools: dict[int, Pool]) -> dict[str, list[tuple[Found, Found]]]:
    """By case, what each rank found on Megatron-Core and on the engine: all cases of a world size in one call."""
    results = {}
    for world, cases in ((2, TWO), (4, FOUR)):
        ranks: Ranks = pools.setdefault(world, Pool(world)).run(both, list(cases.values()))
        results.update(zip(cases, map(list, zip(*ranks, strict=True)), strict=True))
    return results


def close(one: Found, other: Found) -> None:
    """Equal up to rounding in fp32."""
    assert one.losses == pytest.approx(other.losses, rel=1e-5)
    assert one.norms == pytest.approx(other.norms, rel=1e-5)
    assert one.weights.keys() == other.weights.keys()
    for name, weight in one.weights.items():
        torch.testing.assert_close(weight, other.weights[name], rtol=1e-4, atol=1e-5)


def test_one_rank(alone: dict[Any, tuple[Found, Found]]) -> None:
    for megatron, engine in alone.values():
        close(megatron, engine)
        assert engine.losses[0] != pytest.approx(engine.losses[-1], rel=1e-3), "weights change"


@pytest.mark.parametrize("name", WORLDS)
def test_split(name: str, found: dict[str, list[tuple[Found, Found]]], alone: dict[Any, tuple[Found, Found]]) -> None:
    case: Case = {**TWO, **FOUR}[name]
    for megatron, engine in found[name]:
        assert megatron.losses == found[name][0][0].losses, "ranks agree"
        close(megatron, engine)
        close(megatron, alone[case.shape][0])


SPLIT = (*(f"linear_{name}.weight" for name in ("qkv", "proj", "fc1", "fc2")), "linear_qkv.bias", "linear_fc1.bias")


@pytest.mark.parametrize("name", ["tensor", "tensor and sequence", "tensor x data"])
def test_each_tensor_rank_holds_half_of_what_is_split(
    name: str, found: dict[str, list[tuple[Found, Found]]], alone: dict[Any, tuple[Found, Found]]
) -> None:
    whole = alone[GATED][0].elements
    for megatron, _ in found[name]:
        shares = {weight: size / whole[weight] for weight, size in megatron.elements.items()}
        assert shares.keys() == whole.keys()
        halves = {weight for weight in whole if weight.endswith((*SPLIT, "word_embeddings.weight"))}
        assert len(halves) == GATED.layers * len(SPLIT) + 1
        assert {weight for weight, share in shares.items() if share == 0.5} == halves
        assert {share for weight, share in shares.items() if weight not in halves} == {1.0}
