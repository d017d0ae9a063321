"""Tensor and sequence parallelism: the numbers of one plain process, on our GPT and on a user's model, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from bridge.engine.randomness import Keyed, draw_apart, draw_together, scope, seed_generators
from bridge.errors import ConfigError
from bridge.layout.tensor import TensorPlan, cut_range
from tests.engine.runs import (
    SHAPE,
    Case,
    Outcome,
    distance,
    events,
    masks,
    plain,
    split_by_names,
    trained,
    trained_all,
    whole_logits,
)

SGD = {
    "precision.compute": "fp64",
    "optimizer.name": "sgd",
    "optimizer.lr": 0.3,
    "optimizer.clip": 0.9,
}
FULL = {"recompute.granularity": "full"}
SHAPES = {
    "grouped, tied": SHAPE,
    "one key head, gated, rms, learned positions": replace(
        SHAPE, kv_heads=1, gated=True, norm="rms", rotary=False, bias=False, tied=False
    ),
    "even vocabulary": replace(SHAPE, kv_heads=4, vocab=32, ffn=26),
}


@cache
def reference(shape: str) -> Outcome:
    """One plain process."""
    return plain(Case(SGD, SHAPES[shape]))


def assert_agree(found: Outcome, expected: Outcome) -> None:
    """Losses, norms and changes agree to 1e-9; bytes and calls are as predicted."""
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    assert found.norms == pytest.approx(expected.norms, rel=1e-9)
    assert distance(found.change, expected.change) < 1e-9
    assert found.traffic == found.predicted
    assert found.bytes == found.predicted_bytes


MESHES = ((2, 2, False), (2, 2, True), (4, 2, False), (4, 2, True), (4, 4, False))
"""Ranks, tensor ranks, and whether tokens are split."""


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "grouped, tied"])
@pytest.mark.parametrize(("world", "tensor", "sequence"), MESHES)
def test_other_shapes(run: Any, shape: str, world: int, tensor: int, sequence: bool) -> None:
    """What `test_layouts.py` does with the first shape."""
    base = {**SGD, "parallel.tensor": tensor, "parallel.sequence": sequence}
    cases = [
        Case({**base, "zero.stage": 0, "batch.accumulation": 4}, SHAPES[shape]),
        Case({**base, "zero.stage": 3, "batch.accumulation": 2, **FULL}, SHAPES[shape]),
        Case({**base, "zero.stage": 1, "zero.grad_buffers": 1}, SHAPES[shape]),
    ]
    for outcomes in run(world, trained_all, cases):
        for outcome in outcomes:
            assert_agree(outcome, reference(shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_four_ranks_split_by_tokens(run: Any, shape: str) -> None:
    base = {**SGD, "parallel.tensor": 4, "parallel.sequence": True}
    long = replace(SHAPES[shape], sequence=8)
    cases = [
        Case({**base, **more}, long, tokens=8)
        for more in ({}, {"batch.accumulation": 4, "zero.stage": 3, **FULL})
    ]
    for outcomes in run(4, trained_all, cases):
        for outcome in outcomes:
            assert_agree(outcome, plain(cases[0]))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recompute", [{}, FULL], ids=["kept", "again"])
def test_weight_gradients_are_computed_while_input_gradients_are_summed(
    run: Any, sequence: bool, recompute: Any
) -> None:
    values = {**SGD, **recompute, "parallel.tensor": 2, "parallel.sequence": sequence}
    start, weight, end = "sum input gradients starts", "weight gradient", "sum input gradients ends"
    attention, alone = [start, weight, weight, weight, end], [start, weight, end]
    for found in run(2, events, Case(values)):
        order = [event for event in found if event in (start, weight, end)]
        assert order == alone + (alone + attention) * SHAPE.layers


@pytest.mark.parametrize("order", ["tensor-data", "data-tensor"])
def test_either_order_of_ranks(run: Any, order: str) -> None:
    values = {
        **SGD,
        "parallel.tensor": 2,
        "parallel.order": order,
        "zero.stage": 2,
        "batch.accumulation": 2,
    }
    for outcome in run(4, trained, Case(values)):
        assert_agree(outcome, reference("grouped, tied"))


@pytest.mark.parametrize("sequence", [False, True])
def test_unequal_sequences_count_by_token(run: Any, sequence: bool) -> None:
    values = {
        **SGD,
        "parallel.tensor": 2,
        "parallel.sequence": sequence,
        "loss": "per_token",
        "batch.accumulation": 2,
    }
    case = Case(values, padded=True)
    for outcome in run(4, trained, case):
        assert_agree(outcome, plain(case))


@pytest.mark.parametrize("sequence", [False, True])
def test_dropout_masks_do_not_depend_on_the_split(run: Any, sequence: bool) -> None:
    shape = replace(SHAPE, dropout=0.3)
    expected = trained(0, 1, Case({**SGD, "batch.accumulation": 2}, shape))
    values = {
        **SGD,
        "batch.accumulation": 2,
        "parallel.tensor": 2,
        "parallel.sequence": sequence,
        **FULL,
    }
    for outcome in run(2, trained, Case(values, shape)):
        assert distance(outcome.change, expected.change) < 1e-9


@pytest.mark.parametrize("values", [{}, FULL], ids=["kept", "again"])
def test_ranks_drop_their_own_features_and_the_same_whole_ones(
    run: Any, values: dict[str, Any]
) -> None:
    (inner, outer), (other, same) = run(2, masks, values)
    for mask, theirs in zip(inner, other, strict=True):
        assert 10 < int(((mask == 0) & (theirs == 0)).sum()) < 30 and not torch.equal(mask, theirs)
    # What is drawn behind the split is what one process draws, unless it has drawn in the split before.
    assert all(torch.equal(mask, theirs) for mask, theirs in zip(outer, same, strict=True))
    drawn = {tuple(mask.tolist()) for mask in (*inner, *other, *outer)}
    assert len(drawn) == (len(inner) + len(other) + len(outer)) // (2 if values else 1)


@pytest.mark.parametrize("keyed", [False, True])
def test_what_is_drawn_apart_is_of_one_rank_and_leaves_the_rest_as_it_is(keyed: bool) -> None:
    device, layer = torch.device("cpu"), torch.nn.Identity()

    def draws(rank: int | None) -> list[list[float]]:
        """What a layer draws before a split, in two of them and behind each."""
        outcome = []
        with scope(device):
            seed_generators(5, device)
            with Keyed(device, 5, {id(layer): ""}) if keyed else nullcontext():
                outcome.append(torch.rand(4).tolist())
                for _ in range(2):
                    if rank is not None:
                        draw_apart(rank, device)
                        outcome.append(torch.rand(4).tolist())
                        draw_together()
                    outcome.append(torch.rand(4).tolist())
        return outcome

    first, other = draws(0), draws(1)
    assert first[::2] == other[::2] and first == draws(0)
    inner = [tuple(found) for outcome in (first, other) for found in outcome[1::2]]
    assert len({*inner, *map(tuple, first[::2])}) == 4 + 3
    assert keyed or first[::2] == draws(None)


@pytest.mark.parametrize("frozen", [("embedding",), ("norm", "bias")], ids="-".join)
@pytest.mark.parametrize("sequence", [False, True])
def test_frozen_parameters(run: Any, frozen: tuple[str, ...], sequence: bool) -> None:
    values = {**SGD, "parallel.tensor": 2, "parallel.sequence": sequence, "zero.stage": 3}
    case = Case(values, replace(SHAPE, tied=False), frozen=frozen)
    expected = plain(case)
    for outcome in run(4, trained, case):
        assert outcome.norms == pytest.approx(expected.norms, rel=1e-9)
        for name, change in expected.change.items():
            assert torch.allclose(outcome.change[name], change, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("row", [0, SHAPE.vocab - 1])
def test_the_row_of_the_padding_token_gets_no_gradient_as_an_input(
    run: Any, row: int, tied: bool
) -> None:
    case = Case({**SGD, "parallel.tensor": 2}, replace(SHAPE, tied=tied), padding=row)
    expected = plain(case)
    for outcome in run(2, trained, case):
        assert_agree(outcome, expected)
        # A tied row has a gradient as an output.
        assert bool(outcome.change["embedding.tokens.weight"][row].any()) == tied


# Each list of names alone, and together; every one of them must reproduce the unsplit model.
NAMES = {
    "columns and rows": TensorPlan(columns=("up",), rows=("down",)),
    "shapes": TensorPlan(shapes=((1, 3, "column"), (3, 1, "row"))),
    "weights": TensorPlan(weights=(("scale", 0),), columns=("widen",), rows=("narrow",)),
    "attributes": TensorPlan(
        columns=("query", "key", "value"),
        rows=("out",),
        attributes=("num_heads", "num_key_value_heads", "inner"),
    ),
    "vocabulary": TensorPlan(vocabulary=("tokens",)),
    "all": TensorPlan(
        columns=("query", "key", "value", "widen"),
        rows=("out", "narrow"),
        shapes=((1, 3, "column"), (3, 1, "row")),
        weights=(("scale", 0),),
        attributes=("num_heads", "num_key_value_heads", "inner"),
        vocabulary=("tokens",),
    ),
}


@pytest.mark.parametrize("names", NAMES)
def test_a_users_model_by_names(run: Any, names: str) -> None:
    for losses, expected, split in run(2, split_by_names, NAMES[names]):
        assert split and losses == pytest.approx(expected, rel=1e-9)


def test_logits_can_be_put_together(run: Any) -> None:
    for found, expected in run(2, whole_logits, Case({**SGD, "parallel.tensor": 2})):
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("values", "shape", "message"),
    [
        (
            {"parallel.tensor": 2},
            replace(SHAPE, heads=1, kv_heads=1),
            r"parallel.tensor: 2 ranks do not divide heads \(1\)",
        ),
        (
            {"parallel.tensor": 2, "parallel.sequence": True},
            SHAPE,
            "parallel.sequence: 5 tokens do not divide evenly over 2 tensor ranks",
        ),
    ],
)
def test_what_does_not_divide_is_refused(
    run: Any, values: dict[str, Any], shape: Any, message: str
) -> None:
    with pytest.raises(Exception, match=message):
        run(2, trained, Case({**SGD, **values}, shape, tokens=5))


def test_empty_and_contradictory_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="splits nothing; name modules in `columns`"):
        TensorPlan(attributes=("heads",))
    with pytest.raises(
        ConfigError,
        match="'up' is listed both as a column and as a row layer; remove one of the entries",
    ):
        TensorPlan(columns=("up",), rows=("up",))


def test_names_that_fit_nothing_are_refused(run: Any) -> None:
    for names, message in (
        (
            TensorPlan(columns=("upp",)),
            "no module of the model has 'upp' in its name; correct or remove this entry",
        ),
        (TensorPlan(weights=(("scala", 0),)), "no parameter of the model has 'scala' in its name"),
        (
            TensorPlan(rows=("out",), attributes=("inner", "widths")),
            "no module of the model has an integer 'widths'",
        ),
        (
            TensorPlan(rows=("out",), attributes=("odd",)),
            r"1.odd \(3\) does not divide evenly over 2 ranks; use a divisor of 3",
        ),
    ):
        with pytest.raises(Exception, match=message):
            run(2, split_by_names, names)


@pytest.mark.parametrize("size", [1, 5, 8, 29])
def test_cuts_cover_a_dimension(size: int) -> None:
    assert [place for rank in range(4) for place in cut_range(size, 4, rank)] == list(range(size))
