"""Layers that tensor ranks split one by one, and stacks of experts of which each rank keeps some."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from bridge.engine import initialize
from bridge.engine.models.splitting import tensor_plan
from bridge.engine.models.stacks import stacks_of
from bridge.plan.plan import Plan
from tests.engine.blocks import (
    TENSOR,
    VOCAB,
    Steps,
    batches,
    errors,
    need_parts_of_stacks,
    plain,
    small,
)
from tests.engine.pool import Run

pytest.importorskip("transformers")

FP64 = {
    **TENSOR,
    "precision.compute": "fp64",
    "optimizer.name": "sgd",
    "optimizer.lr": 0.1,
    "batch.accumulation": 4,
}
EXPERTS = ["model.layers.0.mlp.experts"]


def to_the_first_experts() -> nn.Module:
    """A Mixtral whose router sends every token to the experts of the first rank."""
    model = small("mixtral")
    for layer in model.model.layers:
        layer.mlp.gate.weight.data.zero_()  # equal scores: the first experts are taken
    return model


def odd() -> nn.Module:
    """A model with an odd vocabulary, whose plan splits the head alone."""
    return small("bamba", vocab_size=VOCAB + 1)


def a_step(rank: int, world: int, make: Callable[[], nn.Module]) -> Steps:
    """The loss and the gradients of one step over tensor ranks."""
    engine = initialize(make(), Plan.of(FP64), seed=5)
    before = {key: weight.clone() for key, weight in engine.state_dict()}
    loss = engine.train_batch(batches(0))
    return [(loss, {key: (before[key] - weight) / 0.1 for key, weight in engine.state_dict()})]


def test_a_rank_whose_experts_get_no_token_takes_part(run: Run) -> None:
    assert (
        errors(run(2, a_step, to_the_first_experts)[0], plain(to_the_first_experts(), steps=1))[0]
        < 1e-6
    )


def in_16_bits(rank: int, world: int) -> tuple[bool, float]:
    """Whether a second step in bf16 moves what is predicted, and this rank's part of all weights."""
    model = small("mixtral").float()
    elements = sum(weight.numel() for weight in model.parameters())
    plan = {**TENSOR, "precision.compute": "bf16", "optimizer.lr": 0.1, "batch.accumulation": 4}
    engine = initialize(model, Plan.of(plan), seed=5)
    engine.train_batch(batches(0))
    engine.comm.ledger.clear()
    engine.train_batch(batches(1))
    tokens = batches(1)[0]["input_ids"].numel()
    own = sum(weight.numel() for weight in engine.module.parameters())
    return engine.comm.ledger.totals == engine.traffic(tokens), own / elements


@need_parts_of_stacks()
def test_routing_in_fp32_is_counted_in_16_bit_training(run: Run) -> None:
    for equal, share in run(2, in_16_bits):
        assert equal
        assert share < 0.6, "the experts, most of the weights, are shared"


def test_a_head_is_split_by_an_odd_vocabulary(run: Run) -> None:
    assert errors(run(2, a_step, odd)[0], plain(odd(), steps=1))[0] < 1e-6


def test_a_head_that_is_no_plain_linear_layer_stays_whole() -> None:
    model = small("llama")
    model.lm_head = nn.Identity()
    assert tensor_plan(model, Plan.of({}), 2).gathered == ()


def test_a_tied_head_stays_whole() -> None:
    assert tensor_plan(small("llama"), Plan.of({}), 2).gathered == ("lm_head",)
    assert tensor_plan(small("llama", tie_word_embeddings=True), Plan.of({}), 2).gathered == ()


@need_parts_of_stacks()
def test_what_does_not_run_in_parts_is_not_split() -> None:
    model = small("mixtral")
    assert [stack.name for stack in stacks_of(model, EXPERTS, 2)] == EXPERTS
    assert not list(stacks_of(model, EXPERTS, 5)), "more ranks than experts"
    experts = model.get_submodule(EXPERTS[0])
    experts.register_forward_hook(lambda module, given, output: output + 1)
    assert not list(stacks_of(model, EXPERTS, 2)), "a sum that is not one over experts"
