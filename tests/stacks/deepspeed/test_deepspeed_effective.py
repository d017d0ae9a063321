"""Effective values: batch, ranks, derived values, constructors' defaults, and refusals by release."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.errors import ConfigError
from bridge.stack.dialect import Dialect
from compat.deepspeed.effective import effective
from compat.deepspeed.refusals import REFUSALS

MICRO, STEPS, TOTAL = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
BASE = {MICRO: 2}


def _batch(
    given: dict[str, Any], world: int | None, version: str = "0.19.8"
) -> tuple[int, int, int]:
    values = effective(given, version, world)
    return values[TOTAL], values[MICRO], values[STEPS]


BATCHES: list[tuple[dict[str, Any], int | None, tuple[int, int, int]]] = [
    ({TOTAL: 16}, 4, (16, 4, 1)),
    ({MICRO: 4}, 4, (16, 4, 1)),
    ({MICRO: 4, STEPS: 2}, 4, (32, 4, 2)),
    ({TOTAL: 32, STEPS: 2}, 4, (32, 4, 2)),
    ({TOTAL: 32, MICRO: 2}, 4, (32, 2, 4)),
    ({TOTAL: 32, MICRO: 2, STEPS: 4}, None, (32, 2, 4)),
    ({TOTAL: 32}, None, (32, 32, 1)),
    ({TOTAL: 32, "code.pipeline_stages": 2, "code.tensor_parallel": 2}, 8, (32, 16, 1)),
    ({TOTAL: 32, "code.context_parallel": 4}, 8, (32, 16, 1)),
    ({TOTAL: 32, "sequence_parallel_size": 4}, 8, (32, 16, 1)),
    ({TOTAL: 32, "sequence_parallel_size": 4, "data_parallel_size": 2}, 8, (32, 16, 1)),
    ({MICRO: 4, "tensor_parallel.autotp_size": 2}, 2, (8, 4, 1)),
]


@pytest.mark.parametrize(("given", "world", "solved"), BATCHES)
def test_batch(given: dict[str, Any], world: int | None, solved: tuple[int, int, int]) -> None:
    assert _batch(given, world) == solved


REFUSED_BATCHES: list[tuple[dict[str, Any], int | None, str]] = [
    ({}, 1, f"{MICRO}: missing"),
    ({STEPS: 2}, 1, f"{MICRO}: missing"),
    (
        {TOTAL: 8, MICRO: 2, STEPS: 2},
        1,
        rf"{TOTAL}: found 8, expected {MICRO} \(2\) x {STEPS} \(2\) x data-parallel ranks \(1\) = 4",
    ),
    ({TOTAL: 2, MICRO: 4}, 1, rf"{STEPS} \(0\)"),
    ({TOTAL: 7}, 2, "found 7"),
    (
        {MICRO: 1, "code.tensor_parallel": 4, "code.pipeline_stages": 2},
        6,
        r"^code.tensor_parallel \(4\) x code.pipeline_stages \(2\) does not divide world size \(6\)",
    ),
    (
        {MICRO: 1, "sequence_parallel_size": 2},
        3,
        r"^sequence_parallel_size \(2\) does not divide world size \(3\)",
    ),
    (
        {MICRO: 1, "sequence_parallel_size": 2, "data_parallel_size": 2},
        8,
        r"is not the world size \(8\)",
    ),
    (
        {MICRO: 1, "code.context_parallel": 2, "code.pipeline_stages": 2},
        4,
        "no groups of sequence-parallel ranks",
    ),
    ({TOTAL: 4, MICRO: 4, STEPS: 1, "tensor_parallel.autotp_size": 2}, 2, r"expected .* = 8"),
]


@pytest.mark.parametrize(("given", "world", "problem"), REFUSED_BATCHES)
def test_refused_batches(given: dict[str, Any], world: int | None, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        effective(given, "0.19.8", world)


def test_sequence_parallel_size_counts_since_0_17_0() -> None:
    given = {MICRO: 1, "sequence_parallel_size": 2}
    assert _batch(given, 8, "0.16.9") == (8, 1, 1)
    assert _batch(given, 8, "0.17.0") == (4, 1, 1)


def test_derived_values() -> None:
    for stage in range(4):
        assert effective(BASE | {"zero_optimization.stage": stage}, "0.19.8", 1)[
            "zero_optimization.overlap_comm"
        ] is (stage == 3)
    assert (
        effective(BASE | {"flops_profiler.enabled": True}, "0.19.8", 1)["wall_clock_breakdown"]
        is True
    )


def test_old_keys_move() -> None:
    given = BASE | {
        "zero_optimization.cpu_offload": True,
        "zero_optimization.stage": 2,
        "bfloat16.enabled": True,
    }
    values = effective(given, "0.19.8", 1)
    assert values["zero_optimization.offload_optimizer.device"] == "cpu"
    assert values["zero_optimization.offload_optimizer.pin_memory"] is True
    assert values["bf16.enabled"] is True
    assert not {"zero_optimization.cpu_offload", "bfloat16.enabled"} & set(values)
    older = effective(BASE | {"zero_optimization.cpu_offload": True}, "0.19.4", 1)
    assert older["zero_optimization.offload_optimizer.pin_memory"] is False


def test_optional_sections_have_defaults_only_when_present() -> None:
    bare = effective(BASE, "0.19.8", 1)
    assert bare["zero_optimization.offload_optimizer.device"] == "none"
    assert "zero_optimization.offload_optimizer.ratio" not in bare
    assert "zero_optimization.zenflow.topk_ratio" not in bare
    present = effective(BASE | {"zero_optimization.zenflow.overlap_step": True}, "0.19.8", 1)
    assert present["zero_optimization.zenflow.topk_ratio"] == 0.1


CONSTRUCTORS = [
    (
        {"optimizer.type": "AdamW"},
        "0.19.8",
        {"type": "adamw", "params.weight_decay": 0.0, "params.adam_w_mode": True},
    ),
    (
        {"optimizer.type": "AdamW", "optimizer.params.torch_adam": True},
        "0.19.8",
        {"params.weight_decay": 0.01},
    ),
    (
        {"optimizer.type": "Adam", "optimizer.params.torch_adam": True},
        "0.19.8",
        {"params.weight_decay": 0.01},
    ),
    (
        {
            "optimizer.type": "adam",
            "optimizer.params.torch_adam": True,
            "optimizer.params.adam_w_mode": False,
        },
        "0.19.8",
        {"params.weight_decay": 0.0},
    ),
    (
        {"optimizer.type": "AdamW", "optimizer.params.adam_w_mode": False},
        "0.19.8",
        {"params.adam_w_mode": True},
    ),
    (
        {"optimizer.type": "SGD"},
        "0.19.8",
        {"type": "SGD", "params.lr": 0.001, "params.momentum": 0.0},
    ),
    (
        {"optimizer.type": "Lamb", "optimizer.params.lr": 0.5},
        "0.19.8",
        {"params.lr": 0.5, "params.max_coeff": 10.0},
    ),
]


@pytest.mark.parametrize(("given", "version", "expected"), CONSTRUCTORS)
def test_constructor_defaults(
    given: dict[str, Any], version: str, expected: dict[str, Any]
) -> None:
    values = effective(BASE | given, version, 1)
    assert {name: values[f"optimizer.{name}"] for name in expected} == expected


def test_warmup_rate_moved_at_0_17_2() -> None:
    given = BASE | {"scheduler.type": "WarmupLR"}
    assert effective(given, "0.17.1", 1)["scheduler.params.warmup_max_lr"] == 0.001
    assert "scheduler.params.warmup_max_lr" not in effective(given, "0.17.2", 1)


def test_silent_loss_scaling_before_0_17_1() -> None:
    given = BASE | {"fp16.enabled": True, "zero_optimization.stage": 1}
    assert effective(given, "0.17.0", 1)["fp16.initial_scale_power"] == 32
    assert (
        effective(given | {"fp16.min_loss_scale": 1}, "0.17.0", 1)["fp16.initial_scale_power"] == 16
    )
    assert effective(given, "0.17.1", 1)["fp16.initial_scale_power"] == 16


BITS = {"g": {"params": {"start_bits": 8, "target_bits": 4}}}


def _compressed(technique: str, **said: Any) -> dict[str, Any]:
    return {"compression_training": {technique: {"shared_parameters": {"enabled": False}, **said}}}


REFUSED = [
    (_compressed("weight_quantization"), "0.19.6", "weight_quantization has no different_groups"),
    (_compressed("row_pruning", different_groups=BITS), "0.15.0", "row_pruning lacks dense_ratio"),
    (
        _compressed("row_pruning", different_groups={"g": ["a"]}),
        "0.15.0",
        "row_pruning lacks dense_ratio",
    ),
    (_compressed("row_pruning", different_groups=["a"]), "0.15.0", "row_pruning lacks dense_ratio"),
    ({"fp16.enabled": True, "bf16.enabled": True}, "0.19.8", "both are true"),
    (
        {"code.pipeline_stages": 2, "zero_optimization.stage": 2},
        "0.19.8",
        "refuses ZeRO stages 2 and 3",
    ),
    (
        {"tensor_parallel.autotp_size": 2, "zero_optimization.stage": 3},
        "0.19.3",
        "AutoTP cannot be combined with",
    ),
    (
        {"fp16.fp16_master_weights_and_grads": True, "zero_optimization.stage": 1},
        "0.18.2",
        "needs zero_optimization.stage 2",
    ),
    ({"zero_optimization.reduce_bucket_size": 0}, "0.19.6", "expected > 0"),
    ({"aio.use_gds": True}, "0.19.8", "CUDA"),
    ({"elasticity": {"enabled": True}}, "0.19.7", "batch would be chosen at launch"),
    (
        {"scheduler.type": "WarmupLR", "scheduler.params.warmup_num_steps": 0},
        "0.19.3",
        "expected at least 1",
    ),
    ({"scheduler.type": "WarmupDecayLR"}, "0.19.8", "total_num_steps: missing"),
    (
        {
            "zero_optimization.cpu_offload": True,
            "zero_optimization.offload_optimizer.device": "cpu",
        },
        "0.19.8",
        "which replaces",
    ),
    (
        {"zero_optimization.compute_grad_norm": False, "zero_optimization.stage": 1},
        "0.19.8",
        "set gradient_clipping to 0",
    ),
    (
        {"gradient_allreduce_op": "sum", "zero_optimization.stage": 3},
        "0.19.8",
        "sum is not possible",
    ),
    ({"compile.autoep_non_moe": True}, "0.19.7", "DeepSpeed 0.19.7 does not read this key"),
]


@pytest.mark.parametrize(("given", "version", "problem"), REFUSED)
def test_refusals(given: dict[str, Any], version: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        effective(BASE | given, version, 4)


ACCEPTED = [
    (_compressed("weight_quantization", different_groups=BITS), "0.19.6"),
    ({"tensor_parallel.autotp_size": 2, "zero_optimization.stage": 3}, "0.19.4"),
    ({"fp16.fp16_master_weights_and_grads": True, "zero_optimization.stage": 1}, "0.18.3"),
    ({"zero_optimization.reduce_bucket_size": 0}, "0.19.5"),
    ({"aio.use_gds": True, "code.accelerator": "cuda"}, "0.19.8"),
    ({"elasticity": {"enabled": False}}, "0.19.7"),
    ({"scheduler.type": "WarmupLR", "scheduler.params.warmup_num_steps": 0}, "0.19.2"),
    ({"code.pipeline_stages": 2, "zero_optimization.stage": 1}, "0.19.8"),
]


@pytest.mark.parametrize(("given", "version"), ACCEPTED)
def test_accepted_by_other_releases(given: dict[str, Any], version: str) -> None:
    assert effective(BASE | given, version, 4)[MICRO] == 2


def test_every_reason_comes_at_once() -> None:
    given = BASE | {
        "fp16.enabled": True,
        "bf16.enabled": True,
        "gradient_allreduce_op": "sum",
        "zero_optimization.stage": 3,
        TOTAL: 3,
    }
    with pytest.raises(ConfigError) as raised:
        effective(given, "0.19.8", 1)
    assert len(raised.value.problems) == 3


def test_values_are_typed_in_configs_made_by_path(deepspeed: Dialect) -> None:
    for given in ({TOTAL: "8"}, {"gradient_clipping": float("nan")}, {"nothing.here": 1}):
        with pytest.raises(ConfigError, match=next(iter(given))):
            deepspeed.config(BASE | given, world_size=1)


def test_rows_name_their_place() -> None:
    assert all(row.place and row.message for row in REFUSALS)
