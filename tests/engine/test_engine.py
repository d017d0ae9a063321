"""The engine's traps: overflow, random numbers, evaluation, overlap, live memory, misuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import bridge.engine
from bridge.engine.layers import chain_of, facts
from bridge.engine.models.gpt import GPT, Architecture, mean_cross_entropy, sum_cross_entropy
from bridge.errors import BridgeError, ConfigError
from bridge.layout import partition
from bridge.layout.pipeline import Pipeline
from bridge.plan.plan import Model, Plan
from tests.engine.runs import (
    SHAPE,
    Case,
    determined,
    distance,
    events,
    fed,
    live_bytes,
    model_of,
    overflowing,
    plain,
    trained,
)

SGD = {"precision.compute": "fp64", "optimizer.name": "sgd", "optimizer.lr": 0.3}
ADAMW = {
    "optimizer.name": "adamw",
    "optimizer.lr": 0.01,
    "optimizer.eps": 1e-4,
    "optimizer.weight_decay": 0.0,
}


@pytest.mark.parametrize(
    "layout", [{"zero.stage": level} for level in range(4)] + [{"parallel.tensor": 2}], ids=str
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(run: Any, layout: dict[str, Any]) -> None:
    values = {**ADAMW, "precision.compute": "fp16", **layout, "precision.loss_scale.initial": 64.0}
    case = Case({**values, "precision.loss_scale.hysteresis": 1}, dtype=torch.float32)
    for rank, (updated, changed, scale, skipped) in enumerate(run(2, overflowing, case)):
        assert updated == [True, False, True], rank
        assert changed == [True, False, True], rank
        assert scale == 32.0 and skipped == 1


ROUNDED: dict[str, dict[str, Any]] = {
    **{f"zero {level}": {"zero.stage": level} for level in range(4)},
    "tensor": {"parallel.tensor": 2},
    "tensor and sequence": {"parallel.tensor": 2, "parallel.sequence": True},
}
"""Layouts of two ranks in which rounding is looked at."""


@pytest.mark.parametrize("values", ROUNDED.values(), ids=ROUNDED)
def test_bf16_stays_as_close_to_fp32_as_plain_bf16_does(run: Any, values: dict[str, Any]) -> None:
    exact = plain(Case({**ADAMW}, dtype=torch.float32, steps=5))
    rough = plain(Case({**ADAMW, "precision.compute": "bf16"}, dtype=torch.bfloat16, steps=5))
    allowed = max(
        abs(found - wanted) for found, wanted in zip(rough.losses, exact.losses, strict=True)
    )
    for outcome in run(
        2,
        trained,
        Case({**ADAMW, "precision.compute": "bf16", **values}, dtype=torch.float32, steps=5),
    ):
        assert (
            max(
                abs(found - wanted)
                for found, wanted in zip(outcome.losses, exact.losses, strict=True)
            )
            <= 2 * allowed
        )
        assert outcome.bytes == outcome.predicted_bytes and outcome.traffic == outcome.predicted


@pytest.mark.parametrize("values", ROUNDED.values(), ids=ROUNDED)
def test_fp32_is_exact_to_rounding(run: Any, values: dict[str, Any]) -> None:
    case = Case({**ADAMW, **values, "batch.accumulation": 2}, dtype=torch.float32, steps=5)
    for outcome in run(2, trained, case):
        assert outcome.losses == pytest.approx(plain(case).losses, abs=1e-5)
        assert outcome.norms[0] == pytest.approx(plain(case).norms[0], rel=1e-5)


MANY = replace(SHAPE, layers=partition.FEW)


def of_many(rank: int, world: int, case: Case, small: int) -> tuple[Any, int]:
    """A training whose stages have at least so many elements, and how many stages there are."""
    usual, partition.SMALL = partition.SMALL, small
    try:
        stages = Pipeline.of(
            Plan.of(case.plan), facts(chain_of(model_of(case))), case.batch
        ).schedule.stages
        return trained(rank, world, case), stages
    finally:
        partition.SMALL = usual


@pytest.mark.parametrize(
    "values",
    [*({"zero.stage": level} for level in range(4)), {"parallel.pipeline": 2, "zero.stage": 3}],
    ids=str,
)
def test_many_small_layers_share_stages_and_change_no_number(
    run: Any, values: dict[str, Any]
) -> None:
    case = Case({**SGD, **values, "batch.accumulation": 2}, MANY, steps=2)
    for outcome, stages in run(2, of_many, case, 12_000):
        assert 2 < stages < MANY.layers // 2
        assert outcome.losses == pytest.approx(plain(case).losses, rel=1e-9)
        assert distance(outcome.change, plain(case).change) < 1e-9
        assert outcome.bytes == outcome.predicted_bytes and outcome.traffic == outcome.predicted


def test_dropout_does_not_depend_on_layout_recompute_or_accumulation_order(run: Any) -> None:
    shape = replace(SHAPE, dropout=0.3)
    base = trained(0, 1, Case({**SGD, "batch.accumulation": 4}, shape))
    without = trained(0, 1, Case({**SGD, "batch.accumulation": 4}))
    assert distance(base.change, without.change) > 0.1
    others: list[tuple[int, dict[str, Any]]] = [
        (1, {"batch.accumulation": 4, "recompute.granularity": "full", "zero.stage": 3}),
        (2, {"batch.accumulation": 2, "zero.stage": 3}),
        (2, {"batch.accumulation": 2, "recompute.granularity": "full", "recompute.layers": 2}),
        (4, {"batch.accumulation": 1, "zero.stage": 2}),
    ]
    for world, values in others:
        for outcome in run(world, trained, Case({**SGD, **values}, shape)):
            assert distance(outcome.change, base.change) < 1e-9


SHARED = [
    ("bf16", 1, 1, False),
    ("bf16", 2, 1, False),
    ("bf16", 2, 2, False),
    ("bf16", 2, 2, True),
    ("fp32", 2, 1, False),
]
"""Number format, ranks, tensor ranks, and whether tokens are split."""


@pytest.mark.parametrize(("compute", "world", "tensor", "sequence"), SHARED)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_every_live_byte_is_predicted(
    run: Any, world: int, tensor: int, sequence: bool, level: int, compute: str
) -> None:
    values = {
        "precision.compute": compute,
        "zero.stage": level,
        "parallel.tensor": tensor,
        "parallel.sequence": sequence,
    }
    case = Case({**ADAMW, **values, "batch.accumulation": 2}, dtype=torch.float32)
    for found, predicted, (reduced, kept) in run(world, live_bytes, case):
        # Gradients that are shards have memory from backward to the update alone; those of the tie stay.
        assert reduced == predicted["gradients"]
        assert kept < reduced / 8 if level > 1 and world > tensor else kept == reduced
        assert found == sum(predicted.values()) - reduced + kept


@pytest.mark.parametrize("level", [0, 3])
def test_deterministic_runs_give_the_same_bits(run: Any, level: int) -> None:
    values = {
        **ADAMW,
        "precision.compute": "bf16",
        "zero.stage": level,
        "batch.accumulation": 2,
        "optimizer.clip": 0.5,
    }
    for weights, losses, told in run(
        2, determined, Case(values, replace(SHAPE, dropout=0.2), dtype=torch.float32)
    ):
        assert told and losses[0] == losses[1] and weights[0].keys() == weights[1].keys()
        assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


STAGES = 5
"""Of the model whose events are recorded: embedding, three blocks, head."""


def places(run: Any, **zero: int) -> Iterator[dict[str, list[int]]]:
    """For each rank, where each event stands in what the second step recorded."""
    values = {f"zero.{name}": value for name, value in zero.items()}
    for found in run(2, events, Case({**SGD, **values}, replace(SHAPE, tied=False))):
        order: dict[str, list[int]] = {}
        for index, event in enumerate(found):
            order.setdefault(event, []).append(index)
        yield order


@pytest.mark.parametrize("buffers", [1, 2, 3, 4])
def test_a_gather_starts_as_soon_as_its_buffer_is_free(run: Any, buffers: int) -> None:
    for found in places(run, stage=3, weight_buffers=buffers):
        for stage in range(buffers, STAGES):
            gathered, left = found[f"gather {stage} starts"][0], stage - buffers
            assert found[f"forward {left} ends"][0] < gathered < found[f"forward {stage} starts"][0]
            if buffers > 1:
                assert gathered < found[f"forward {left + 1} starts"][0]
                assert found[f"gather {stage} ends"][0] > found[f"forward {stage - 1} ends"][0]
        for stage in range(STAGES - buffers):
            gathered, left = found[f"gather {stage} starts"][-1], stage + buffers
            assert (
                found[f"backward {left} ends"][0] < gathered < found[f"backward {stage} starts"][0]
            )
            if buffers > 1:
                assert gathered < found[f"backward {left - 1} starts"][0]


def test_with_a_buffer_for_each_stage_all_gathers_follow_the_update(run: Any) -> None:
    for found in places(run, stage=1):
        assert found["gather 0 ends"][0] < found["forward 0 starts"][0]
        for stage in range(1, STAGES):
            assert (
                found[f"forward {stage - 1} ends"][0]
                < found[f"gather {stage} ends"][0]
                < found[f"forward {stage} starts"][0]
            )
        starts = [found[f"gather {stage} starts"] for stage in range(STAGES)]
        assert all(
            len(places) == 1 and places[0] > found["backward 0 ends"][0] for places in starts
        )


@pytest.mark.parametrize("buffers", [1, 2, 3, 5])
def test_a_reduction_is_waited_for_only_by_the_next_writer_of_its_buffer(
    run: Any, buffers: int
) -> None:
    for found in places(run, stage=2, grad_buffers=buffers):
        for stage in range(STAGES):
            (started,), (ended,) = found[f"reduce {stage} starts"], found[f"reduce {stage} ends"]
            assert found[f"backward {stage} ends"][0] < started
            if stage:
                assert started < found[f"backward {stage - 1} starts"][0]
            if stage >= buffers:
                assert ended < found[f"backward {stage - buffers} starts"][0]
                assert buffers == 1 or ended > found[f"backward {stage - buffers + 1} ends"][0]
            else:
                assert ended > found["backward 0 ends"][0]


@pytest.mark.parametrize("level", [0, 3])
def test_evaluation_moves_nothing(run: Any, level: int) -> None:
    case = Case({**SGD, "zero.stage": level, "batch.accumulation": 2}, replace(SHAPE, dropout=0.2))
    plain_runs, disturbed = run(2, fed, case, False), run(2, fed, case, True)
    for (losses, evaluated, state), (others, _, after) in zip(disturbed, plain_runs, strict=True):
        assert losses == others and torch.equal(state, after)
        assert evaluated[0] == evaluated[1]


def test_deepspeeds_loop_and_train_batch_are_the_same(run: Any) -> None:
    case = Case({**SGD, "zero.stage": 2, "batch.accumulation": 2})
    for losses, _, _ in run(2, fed, case, False):
        assert losses == pytest.approx(trained_losses(run, case), rel=1e-12)


def trained_losses(run: Any, case: Case) -> list[float]:
    """Losses of `train_batch`."""
    losses: list[float] = run(2, trained, case)[0].losses
    return losses


def engine(loss_fn: Any = mean_cross_entropy, **values: Any) -> Any:
    """An engine in this process."""
    plan = Plan.of({**SGD, **{path.replace("__", "."): value for path, value in values.items()}})
    return bridge.engine.initialize(model_of(Case({})), plan, loss_fn)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(SHAPE.vocab, (2, 7), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1], tokens[:, 1:]


def test_a_list_of_layers_and_a_single_module_train() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(8, 4), torch.randn(8, 2)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)]
    for model, given in (
        (layers, (inputs, targets)),
        (nn.Bilinear(4, 4, 2), (inputs, inputs, targets)),
    ):
        found = bridge.engine.initialize(
            model, Plan.of({"optimizer.lr": 0.05}), nn.functional.mse_loss
        )
        losses = [found.train_batch([given]) for _ in range(20)]
        assert losses[-1] < 0.8 * losses[0]
        assert (found.progress.steps, found.progress.samples) == (20, 160)


def test_a_loss_outside_the_engine_gives_the_same_update() -> None:
    inside, outside = engine(), bridge.engine.initialize(model_of(Case({})), Plan.of(SGD))
    tokens, targets = batch()
    inside.train_batch([(tokens, targets)])
    outside.backward(mean_cross_entropy(outside(tokens), targets))
    assert outside.step()
    assert distance(dict(outside.state_dict()), dict(inside.state_dict())) < 1e-12


def test_misuse_is_said() -> None:
    found = engine(batch__accumulation=2)
    with pytest.raises(BridgeError, match="no forward pass waits for backward"):
        found.backward(torch.zeros(()))
    with pytest.raises(BridgeError, match="data ended after 1 microbatches of a step, expected 2"):
        found.train_batch([batch()])
    assert not found.step() and found.microbatch == 0, "the step was left, as it is on all ranks"
    found.backward(found(*batch()))
    assert not found.step()
    found.backward(found(*batch()))
    with pytest.raises(
        BridgeError, match=r"all 2 microbatches of this step have run; call engine.step\(\)"
    ):
        found.backward(found(*batch()))
    with pytest.raises(
        BridgeError,
        match=r"engine\(mask=...\): a model that is a list of layers takes no named inputs",
    ):
        found(*batch(), mask=None)
    tokens = engine(loss="per_token", loss_fn=sum_cross_entropy)
    losses = [tokens(*batch()) for _ in range(2)]
    with pytest.raises(
        BridgeError,
        match=r"backward: 2 forward passes wait for backward, but with plan.loss per_token only one",
    ):
        tokens.backward(losses[1])
    with pytest.raises(
        BridgeError,
        match=r"plan.loss is per_token; return the sum of losses and the number of tokens",
    ):
        engine(loss="per_token")(*batch())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"parallel__pipeline": 2}, r"parallel: pipeline \(2\) does not divide world size \(1\)"),
        (
            {"schedule__breadth_first": 2, "schedule__depth_first": 3},
            "schedule.depth_first: found 3, which does not divide the 1 microbatches",
        ),
        ({"optimizer__name": "lamb"}, "optimizer.name: found 'lamb'; use adam, adamw, sgd or lion"),
        (
            {"precision__fp8": "hybrid"},
            "precision.fp8: found 'hybrid'; the engine has no matrix products in 8 bits",
        ),
        (
            {"parallel__data": 2},
            r"parallel: data \(2\) does not divide world size \(1\); use 2 ranks, or data=1",
        ),
        ({"batch__micro": 3, "batch__global_": 4}, "batch: .* does not hold"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(**values)


def test_what_costs_only_memory_or_speed_is_said() -> None:
    found = engine(zero__bucket=1000, zero__offload__optimizer="cpu", zero__overlap=True)
    assert {finding.path: finding.effect.value for finding in found.findings} == {
        "zero.bucket": "memory or speed",
        "zero.offload.optimizer": "memory or speed",
    }


@pytest.mark.parametrize(
    ("shape", "message"),
    [({"heads": 3}, "3 does not divide hidden"), ({"kv_heads": 3}, "3 does not divide heads")],
)
def test_shapes_that_do_not_fit_are_refused(shape: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPT(replace(Architecture(), **shape))


def test_a_plan_states_the_shape() -> None:
    shape = Architecture.of(Model(layers=2, hidden=64, heads=8, kv_heads=2))
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.ffn) == (
        2,
        64,
        8,
        2,
        256,
    )


def test_initial_weights_depend_on_names_only() -> None:
    small, large = GPT(replace(SHAPE, layers=1)), GPT(SHAPE)
    weights = dict(large.named_parameters())
    same = [
        torch.equal(weight, weights[name])
        for name, weight in small.named_parameters()
        if "out." not in name and "down." not in name
    ]
    assert all(same) and not torch.equal(
        weights["block0.mlp.up.weight"], weights["block1.mlp.up.weight"]
    )
