"""Every field of a plan is honoured, which a run shows by something that it changes, or stands in the table of limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import bridge.engine
import bridge.plan.plan
from bridge.engine.fields import _SILENT, COURSE, DEFINED, LIMITS, check, remarks
from bridge.errors import ConfigError
from bridge.layout.traffic import AGREED
from bridge.plan.plan import Plan
from bridge.stack.rules import Effect
from tests.engine.counts import counted
from tests.engine.runs import Case, plain, trained

BASE = {
    "model.layers": 2,
    "model.hidden": 16,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.ffn": 24,
    "model.vocab": 256,
    "model.sequence": 8,
    "model.tied": False,
    "batch.micro": 2,
    "optimizer.lr": 0.01,
}
"""A model with four layers: embedding, two blocks, head."""
WEIGHTS = 11_600
"""Parameters of that model: embedding and logits 256 x 16 each, two blocks of 1,688, the last norm 32."""
FP16 = {"precision.compute": "fp16"}
OVERFLOW = {**FP16, "precision.loss_scale.initial": 2.0**40, "precision.loss_scale.hysteresis": 1}
WARMUP = {"optimizer.schedule.warmup_steps": 2}
WSD = {"optimizer.schedule.name": "wsd", "optimizer.schedule.total_steps": 3}
SGD = {"optimizer.name": "sgd"}
FULL = {"recompute.granularity": "full"}
TWO_STAGES = {"stages.layers_per_stage": 2}
BF16 = {"precision.compute": "bf16"}
TWO = {"batch.accumulation": 2}
FOUR = {"batch.accumulation": 4}
PIPED = {**FOUR, "parallel.pipeline": 2}
INTERLEAVED = {"schedule.name": "interleaved_1f1b", "schedule.virtual": 2}
REPLICATED = {"reduce gradients": 4, "agree": 1}
SHARDED = {**REPLICATED, "gather weights": 4}


@dataclass(frozen=True)
class Change:
    """Two values of a field, and what is counted with each; without `counts`, it is only known to differ.

    Both runs have `given` beside the base, and the second also `second`.
    """

    what: str
    values: tuple[Any, Any]
    counts: tuple[Any, Any] | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    world: int = 1
    steps: int = 1
    second: Mapping[str, Any] = field(default_factory=dict)


CHANGES = {
    "model.layers": Change("parameters", (2, 3), (WEIGHTS, WEIGHTS + 1_688)),
    "model.hidden": Change("parameters", (16, 32), (WEIGHTS, 26_224)),
    "model.heads": Change("parameters", (4, 8), (WEIGHTS, WEIGHTS - 2 * 2 * 4 * 17)),
    "model.kv_heads": Change("parameters", (2, 4), (WEIGHTS, WEIGHTS + 2 * 2 * 8 * 17)),
    "model.ffn": Change("parameters", (24, 25), (WEIGHTS, WEIGHTS + 2 * 33)),
    "model.vocab": Change("parameters", (256, 257), (WEIGHTS, WEIGHTS + 32)),
    "model.tied": Change("parameters", (False, True), (WEIGHTS, WEIGHTS - 256 * 16)),
    "model.sequence": Change("tokens", (8, 9), (16, 18)),
    "parallel.data": Change("data", (2, 1), ((0, 1), (0,)), world=2, second={"parallel.tensor": 2}),
    "parallel.tensor": Change("tensor", (1, 2), ((0,), (0, 1)), world=2),
    "parallel.sequence": Change(
        "norm_tokens", (False, True), (16, 8), {"parallel.tensor": 2}, world=2
    ),
    "parallel.pipeline": Change("line", (1, 2), ((0,), (0, 1)), TWO, world=2),
    "schedule.name": Change("actions", ("1f1b", "gpipe"), given=PIPED, world=2),
    "schedule.virtual": Change(
        "actions", (2, 4), given={**PIPED, **INTERLEAVED, "model.layers": 6}, world=2
    ),
    "schedule.group": Change("actions", (2, 4), given={**PIPED, **INTERLEAVED}, world=2),
    "schedule.depth_first": Change(
        "actions", (1, 2), given={**PIPED, "schedule.name": "looped_bfs"}, world=2
    ),
    "schedule.breadth_first": Change("actions", (1, 4), given=FOUR),
    "schedule.overlap": Change("actions", (True, False), given=PIPED, world=2),
    "parallel.order": Change(
        "tensor", ("tensor-data", "data-tensor"), ((0, 1), (0, 2)), {"parallel.tensor": 2}, world=4
    ),
    "stages.rule": Change("stages", ("carry", "even"), (3, 2), {"stages.layers_per_stage": 1.5}),
    "stages.layers_per_stage": Change("stages", (1, 3), (4, 2)),
    "stages.boundaries": Change("stages", ((0, 4), (0, 1, 4)), (1, 2)),
    "batch.micro": Change("tokens", (2, 3), (16, 24)),
    "batch.accumulation": Change("layer_calls", (1, 3), (4, 12)),
    "batch.global_": Change("microbatches", (2, 6), (1, 3)),
    "zero.stage": Change("traffic", (0, 1), (REPLICATED, SHARDED), world=2),
    "zero.weight_buffers": Change("bytes", (1, 2), world=2),
    "zero.grad_buffers": Change("bytes", (1, 2), world=2),
    "precision.compute": Change("bytes", ("fp32", "bf16")),
    "precision.master": Change("bytes", ("fp32", "bf16"), given=BF16),
    "precision.reduce": Change("bytes", ("fp32", "bf16"), given=BF16),
    "precision.communicate": Change(
        *("sent", ("fp32", "bf16")),
        (
            {"reduce gradients": 4 * WEIGHTS, "agree": 8 * AGREED},
            {"reduce gradients": 2 * WEIGHTS, "agree": 8 * AGREED},
        ),
        *(BF16, 2),
    ),
    "precision.loss_scale.static": Change("scales", (8.0, 32.0), ((8.0,), (32.0,)), FP16),
    "precision.loss_scale.initial": Change("scales", (8.0, 32.0), ((8.0,), (32.0,)), FP16),
    "precision.loss_scale.window": Change(
        "scales",
        (1, 2),
        ((16.0, 32.0), (8.0, 16.0)),
        {**FP16, "precision.loss_scale.initial": 8.0},
        steps=2,
    ),
    "precision.loss_scale.hysteresis": Change(
        "scales", (1, 2), ((2.0**39, 2.0**38), (2.0**40, 2.0**39)), OVERFLOW, steps=2
    ),
    "precision.loss_scale.minimum": Change(
        "scales", (1.0, 2.0**39), ((2.0**39, 2.0**38), (2.0**39, 2.0**39)), OVERFLOW, steps=2
    ),
    "precision.loss_scale.late": Change(
        *("scales", (False, True), ((16.0, 32.0), (8.0, 16.0))),
        *({**FP16, "precision.loss_scale.initial": 8.0, "precision.loss_scale.window": 1}, 1, 2),
    ),
    "optimizer.name": Change("bytes", ("adamw", "sgd")),
    "optimizer.lr": Change("lrs", (0.01, 0.02), ((0.01,), (0.02,))),
    "optimizer.betas": Change("moved", ((0.9, 0.99), (0.5, 0.99)), steps=2),
    "optimizer.eps": Change("moved", (1e-8, 1.0)),
    "optimizer.momentum": Change("bytes", (0.0, 0.9), given=SGD),
    "optimizer.weight_decay": Change("moved", (0.0, 0.5)),
    "optimizer.decay_scope": Change(
        "moved", ("all", "matrices"), given={"optimizer.weight_decay": 0.5}
    ),
    "optimizer.decay_ramp.shape": Change(
        "moved",
        ("linear", "cosine"),
        given={"optimizer.decay_ramp.end": 0.9, "optimizer.decay_ramp.steps": 4},
        steps=2,
    ),
    "optimizer.clip": Change("moved", (0.0, 0.01), given=SGD),
    "optimizer.schedule.name": Change(
        "lrs",
        ("constant", "linear"),
        ((0.01, 0.01), (0.01, 0.005)),
        {"optimizer.schedule.total_steps": 2},
        steps=2,
    ),
    "optimizer.schedule.warmup_steps": Change("lrs", (0, 2), ((0.01, 0.01), (0.0, 0.005)), steps=2),
    "optimizer.schedule.warmup_from": Change(
        "lrs", (0.0, 0.002), ((0.0, 0.005), (0.002, 0.006)), WARMUP, steps=2
    ),
    "optimizer.schedule.total_steps": Change(
        "lrs",
        (2, 4),
        ((0.01, 0.005), (0.01, 0.0075)),
        {"optimizer.schedule.name": "linear"},
        steps=2,
    ),
    "optimizer.schedule.minimum": Change(
        "lrs",
        (0.0, 0.004),
        ((0.01, 0.005), (0.01, 0.007)),
        {"optimizer.schedule.name": "linear", "optimizer.schedule.total_steps": 2},
        steps=2,
    ),
    "optimizer.schedule.decay_steps": Change(
        "lrs", (1, 2), ((0.01, 0.01, 0.01), (0.01, 0.01, 0.005)), WSD, steps=3
    ),
    "optimizer.schedule.decay_shape": Change(
        "lrs",
        ("linear", "exponential"),
        ((0.01, 0.01, 0.005), (0.01, 0.01, 0.01 * (2 * 0.5**0.5 - 1))),
        {**WSD, "optimizer.schedule.decay_steps": 2},
        steps=3,
    ),
    "recompute.granularity": Change("layer_calls", ("none", "full"), (4, 8)),
    "recompute.method": Change("layer_calls", ("uniform", "block"), (8, 6), {**FULL, **TWO_STAGES}),
    "recompute.layers": Change(
        "layer_calls", (1, 2), (6, 8), {**FULL, **TWO_STAGES, "recompute.method": "block"}
    ),
    "recompute.kept_microbatches": Change(
        "layer_calls", (0, 1), (16, 12), {**PIPED, **FULL}, world=2
    ),
    "recompute.ratio": Change("layer_calls", (0.25, 0.75), (5, 7)),
}


@pytest.mark.parametrize("path", CHANGES)
def test_an_honoured_field_changes_something_that_counts(run: Any, path: str) -> None:
    change = CHANGES[path]
    plans = [{**BASE, **change.given, path: value} for value in change.values]
    plans[1] |= change.second
    first, second = (
        getattr(run(change.world, counted, plan, change.steps)[0], change.what) for plan in plans
    )
    assert first != second
    assert change.counts is None or (first, second) == change.counts


def test_selective_recompute_runs_the_core_of_attention_again_and_nothing_else(run: Any) -> None:
    kept, selective, full = (
        run(1, counted, {**BASE, "recompute.granularity": granularity}, 1)[0]
        for granularity in ("none", "selective", "full")
    )
    assert (kept.core_calls, kept.layer_calls) == (2, 4)
    assert (selective.core_calls, selective.layer_calls) == (4, 4)
    assert (full.core_calls, full.layer_calls) == (4, 8)
    assert kept.moved == selective.moved


def test_a_model_without_parts_to_compute_again_is_said() -> None:
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)]
    engine = bridge.engine.initialize(
        layers, Plan.of({"recompute.granularity": "selective"}), nn.functional.mse_loss
    )
    (finding,) = engine.findings
    assert (finding.path, finding.effect) == ("recompute.granularity", Effect.COST)
    assert "no module of the model has a method `compute_again`" in finding.message


REDUCED = {"gather weights": 4, "reduce gradients": 12, "agree": 1}
MEET = {
    "counts win over a lower level": (
        2,
        {"zero.stage": 0, "zero.grad_buffers": 4, "zero.weight_buffers": 4},
        "traffic",
        SHARDED,
    ),
    "counts win over a higher level": (
        2,
        {"zero.stage": 3, "zero.grad_buffers": 4, "zero.weight_buffers": 4},
        "traffic",
        SHARDED,
    ),
    "shared gradients, microbatches": (
        2,
        {"zero.stage": 2, "batch.accumulation": 3},
        "traffic",
        REDUCED,
    ),
    "fewer stages, level": (
        2,
        {"zero.stage": 3, "stages.layers_per_stage": 2},
        "traffic",
        {**REPLICATED, "gather weights": 2, "reduce gradients": 2},
    ),
    "global batch, tensor ranks": (
        2,
        {"batch.micro": 1, "batch.global_": 8, "parallel.tensor": 2},
        "microbatches",
        8,
    ),
    "global batch, data ranks": (2, {"batch.micro": 1, "batch.global_": 8}, "microbatches", 4),
    "tokens, more tensor ranks": (
        4,
        {"parallel.tensor": 4, "parallel.sequence": True},
        "norm_tokens",
        4,
    ),
    "a constant scale and a first one": (
        1,
        {**FP16, "precision.loss_scale.static": 4.0, "precision.loss_scale.initial": 8.0},
        "scales",
        (4.0,),
    ),
    "every format": (
        1,
        {**BF16, "precision.master": "bf16", "precision.reduce": "bf16"},
        "bytes",
        {"weights": 2 * WEIGHTS, "gradients": 2 * WEIGHTS, "master": 0, "moments": 4 * WEIGHTS},
    ),
    "formats, optimizer": (
        1,
        {**BF16, **SGD, "optimizer.momentum": 0.9},
        "bytes",
        {
            "weights": 2 * WEIGHTS,
            "gradients": 4 * WEIGHTS,
            "master": 4 * WEIGHTS,
            "moments": 4 * WEIGHTS,
        },
    ),
    "warmup, decay": (
        1,
        {**WARMUP, "optimizer.schedule.name": "linear", "optimizer.schedule.total_steps": 4},
        "lrs",
        (0.0, 0.005, 0.01, 0.005),
    ),
    "block, layers beyond a stage": (
        1,
        {**FULL, **TWO_STAGES, "recompute.method": "block", "recompute.layers": 9},
        "layer_calls",
        8,
    ),
    "ratio, granularity none": (
        1,
        {"recompute.granularity": "none", "recompute.ratio": 1.0},
        "layer_calls",
        4,
    ),
    "no rate, decay": (1, {"optimizer.lr": 0.0, "optimizer.weight_decay": 0.5}, "moved", 0.0),
}
"""Ranks, fields that meet, and what is then counted."""


@pytest.mark.parametrize("name", MEET)
def test_where_fields_meet(run: Any, name: str) -> None:
    world, values, what, expected = MEET[name]
    steps = len(expected) if isinstance(expected, tuple) else 1
    for found in run(world, counted, {**BASE, **values}, steps):
        assert getattr(found, what) == expected


def test_clipping_sees_gradients_without_their_scale(run: Any) -> None:
    given = {**BASE, **FP16, **SGD, "optimizer.clip": 0.01}
    small, large = (
        run(1, counted, {**given, "precision.loss_scale.static": scale}, 1)[0].moved
        for scale in (8.0, 512.0)
    )
    assert small == pytest.approx(large, rel=1e-2) and small == pytest.approx(0.01 * 0.01, rel=1e-2)


CONSTANT = {"optimizer.schedule.name": "constant"}
RAMP = {
    "optimizer.decay_ramp.shape": "linear",
    "optimizer.decay_ramp.end": 0.9,
    "optimizer.decay_ramp.steps": 2,
}
SILENT: dict[str, tuple[Any, Mapping[str, Any], Mapping[str, Any] | None]] = {
    "parallel.sequence": (True, {}, {"parallel.tensor": 2}),
    "optimizer.momentum": (0.9, {}, SGD),
    "optimizer.betas": ((0.5, 0.6), SGD, {}),
    "optimizer.eps": (1.0, SGD, {}),
    **{f"optimizer.decay_ramp.{name}": (0.3, {}, RAMP) for name in ("start", "end")},
    "optimizer.decay_ramp.steps": (5, {}, RAMP),
    "optimizer.schedule.total_steps": (3, CONSTANT, {"optimizer.schedule.name": "linear"}),
    "optimizer.schedule.minimum": (0.005, CONSTANT, {"optimizer.schedule.name": "inverse_sqrt"}),
    "optimizer.schedule.decay_steps": (1, CONSTANT, WSD),
    "optimizer.schedule.decay_shape": ("cosine", CONSTANT, WSD),
    "optimizer.schedule.warmup_from": (0.005, {}, WARMUP),
    "precision.loss_scale.static": (4.0, BF16, FP16),
    "precision.loss_scale.initial": (4.0, {**FP16, "precision.loss_scale.static": 8.0}, FP16),
    "precision.loss_scale.window": (1, BF16, FP16),
    "precision.loss_scale.hysteresis": (3, {**FP16, "precision.loss_scale.static": 8.0}, FP16),
    "precision.loss_scale.minimum": (2.0**20, {**FP16, "precision.loss_scale.static": 8.0}, FP16),
    "precision.loss_scale.late": (True, {**FP16, "precision.loss_scale.static": 8.0}, FP16),
    "precision.loss_scale.final": (True, {**FP16, "precision.loss_scale.static": 8.0}, FP16),
    "recompute.method": ("block", {}, FULL),
    "recompute.layers": (2, {"recompute.granularity": "none"}, {"recompute.ratio": 0.5}),
    "recompute.kept_microbatches": (1, PIPED, {**PIPED, **FULL}),
    "recompute.ratio": (0.5, {"recompute.granularity": "none"}, FULL),
    "schedule.name": ("gpipe", {}, PIPED),
    "schedule.group": (2, {}, {**PIPED, **INTERLEAVED}),
    "schedule.virtual": (2, {}, {**PIPED, "schedule.name": "interleaved_1f1b"}),
    "schedule.csv": ("none.csv", {}, {**PIPED, "schedule.name": "csv"}),
    "schedule.overlap": (True, {}, PIPED),
    "schedule.depth_first": (
        2,
        {**PIPED, "schedule.name": "1f1b"},
        {**PIPED, "schedule.name": "looped_bfs"},
    ),
    "schedule.breadth_first": (2, {**PIPED, "schedule.name": "1f1b"}, {"batch.accumulation": 2}),
    "stages.boundaries": ((0, 1, 4), {"stages.rule": "even"}, {}),
    "stages.layers_per_stage": (3, {"stages.boundaries": (0, 4)}, {"stages.rule": "carry"}),
}
"""A value of a field, the others beside which it says nothing, and those beside which it does; None: the engine refuses these."""


@pytest.mark.parametrize("path", SILENT)
def test_a_field_that_says_nothing_beside_the_others_is_said_and_changes_nothing(
    run: Any, path: str
) -> None:
    value, silent, speaking = SILENT[path]
    world = silent.get("parallel.pipeline", 1)
    (finding,) = check(Plan.of({**silent, path: value}), world)[1]
    assert finding.path == path and finding.effect is not Effect.NUMBERS
    assert speaking is None or check(Plan.of({**speaking, path: value}), 2)[1] == ()
    without, with_it = (
        run(world, counted, {**BASE, **silent, **given}, 2)[0] for given in ({}, {path: value})
    )
    assert without == with_it


def test_a_schedule_without_its_length_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"total_steps: not set, but schedule cosine needs the number of steps"
    ):
        check(Plan.of({"optimizer.schedule.name": "cosine"}), 1)


def test_every_field_that_can_be_silent_is_tested() -> None:
    assert {path for paths in _SILENT for path in paths} == set(SILENT)


def test_loss_counts_tokens_or_microbatches_alike() -> None:
    base = {"precision.compute": "fp64", **SGD, "optimizer.lr": 0.1, "batch.accumulation": 4}
    tokens, microbatches = (
        trained(0, 1, Case({**base, "loss": loss}, padded=True)).losses
        for loss in ("per_token", "mean_of_microbatches")
    )
    assert tokens[0] == pytest.approx(plain(Case(base, padded=True)).losses[0], rel=1e-12)
    assert abs(tokens[0] - microbatches[0]) > 1e-4


FROZEN = ("block1", "block2")
ONE_BUFFER = {"zero.weight_buffers": 1}
"""All frozen stages take turns in it, so that their slices lie beside it in either format."""


@pytest.mark.parametrize(
    ("world", "zero", "more"), [(1, {}, 4), (2, {"zero.stage": 1}, 2), (2, ONE_BUFFER, 1)]
)
def test_frozen_weights_are_kept_in_the_format_asked_for(
    run: Any, world: int, zero: dict[str, int], more: int
) -> None:
    """`more`: bytes that a frozen element takes on each rank in the master format, beside what it takes in the other."""
    given = {**BF16, **zero, "batch.accumulation": 2}
    found = {
        kept: run(
            world,
            trained,
            Case({**given, "precision.frozen": kept}, frozen=FROZEN, dtype=torch.float32),
        )
        for kept in ("compute", "master")
    }
    for compute, master in zip(*found.values(), strict=True):
        assert master.losses == compute.losses and master.bytes == master.predicted_bytes
        frozen = {name: change for name, change in master.change.items() if name.startswith(FROZEN)}
        assert not any(change.any() for change in frozen.values()), (
            "the whole of each weight came through"
        )
        assert any(compute.change[name].any() for name in frozen), (
            "what bf16 cannot hold was rounded away"
        )
        elements = sum(change.numel() for change in frozen.values())
        assert sum(master.bytes.values()) - sum(compute.bytes.values()) == elements * more


BEYOND = {
    "parallel.context": 2,
    "parallel.expert": 2,
    "parallel.expert_tensor": 2,
    "model.experts": 4,
    "optimizer.name": "lamb",
    "precision.fp8": "hybrid",
    "zero.replicas": 2,
    "zero.bucket": 1000,
    "zero.overlap": False,
    "zero.overlap_gather": False,
    "zero.offload.optimizer": "cpu",
    "zero.offload.optimizer_ratio": 0.5,
    "zero.offload.parameters": "cpu",
    "recompute.partition": True,
    "recompute.offload": True,
    "parallel.tensor_overlap": True,
    "zero.gather_bucket": 1000,
    "zero.prescale": True,
    "zero.predivide": 2.0,
    "optimizer.nesterov": True,
    "optimizer.update_scale": "spectral",
    "optimizer.amsgrad": True,
    "optimizer.bias_correction": False,
    "optimizer.embedding_lr": 0.5,
    "optimizer.output_lr": 0.5,
    "adapters.rank": 8,
    "adapters.alpha": 16.0,
    "adapters.dropout": 0.1,
    "adapters.targets": ("query",),
    "precision.fp8_recipe": "delayed",
    "precision.fp8_weights": True,
    "precision.autocast": "bf16",
    "precision.residual": "fp32",
    "precision.router": "fp32",
    "precision.moments": ("bf16", "bf16"),
    "parallel.vocabulary": False,
    "parallel.context_method": "p2p",
    "parallel.dispatcher": "deepep",
    "zero.average_in_collective": True,
    "zero.double_buffer": True,
    "zero.registered": True,
    "zero.fp8_transposes": True,
    "zero.meta_init": True,
    "zero.offload.pinned": True,
    "recompute.modules": ("mlp",),
}
"""A value beyond each limit."""
EXPERTS = {"model.experts": 4}


LOGS = {path for path in bridge.plan.paths() if path.startswith("debug.")}
"""What these do is read from logs: test_debug_settings.py has a test for each."""


def test_moments_in_the_format_of_the_masters_are_what_the_engine_has() -> None:
    values = {"precision.master": "bf16", "precision.moments": ("bf16", "bf16")}
    assert not remarks(values)
    assert [one.path for one in remarks({**values, "precision.master": "fp32"})] == [
        "precision.moments"
    ]


def test_every_field_is_honoured_or_limited() -> None:
    silent = {path for paths in _SILENT for path in paths}
    honoured = {*CHANGES, "loss", "schedule.csv", "precision.frozen", *LOGS}
    assert {*honoured, *LIMITS, *COURSE, *DEFINED, *silent} == set(bridge.plan.paths())
    assert not {*COURSE, *DEFINED} & {*honoured, *LIMITS, *silent}
    assert set(BEYOND) == set(LIMITS)
    assert all(limit.reason for limit in LIMITS.values())


@pytest.mark.parametrize("path", LIMITS)
def test_beyond_a_limit_a_field_is_refused_or_said(path: str) -> None:
    limit, given = (
        LIMITS[path],
        Plan.of({**(EXPERTS if path.startswith("parallel.expert") else {}), path: BEYOND[path]}),
    )
    if limit.effect is Effect.NUMBERS:
        with pytest.raises(
            ConfigError, match=re.escape(f"{path}: found {BEYOND[path]!r}; {limit.reason}")
        ):
            check(given, 1)
    else:
        (finding,) = check(given, 1)[1]
        assert (finding.path, finding.message, finding.effect) == (path, limit.reason, limit.effect)


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, limit in LIMITS.items() for value in limit.runs]
)
def test_within_its_limit_a_field_runs_without_a_word(path: str, value: Any) -> None:
    assert check(Plan.of({path: type(BEYOND[path])(value)}), 1)[1] == ()


def test_axes_of_experts_are_idle_in_a_model_without_them() -> None:
    (finding,) = check(Plan.of({"parallel.expert": 2}), 1)[1]
    assert (finding.path, finding.effect) == ("parallel.expert", Effect.NONE)
