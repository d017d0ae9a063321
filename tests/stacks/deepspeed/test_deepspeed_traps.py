"""Traps: one config for each row that it catches, and one beside it that it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.stack.dialect import Dialect
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from compat.deepspeed.checks import CHECKS

QUIET: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}
Z = "zero_optimization."
N, C, S, X = Effect.NUMBERS, Effect.COST, Effect.NONE, Effect.STOPS

MASTER, STATES, BF16 = (
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    {"bf16.enabled": True, Z + "stage": 2},
)
NVME = {Z + "offload_optimizer.device": "nvme", Z + "offload_optimizer.nvme_path": "/nvme"}
ON_CPU, LION = {Z + "offload_optimizer.device": "cpu"}, {"optimizer.type": "Lion"}

CASES: list[tuple[str, Effect, dict[str, Any], dict[str, Any]]] = [
    (
        "fp16.fp16_master_weights_and_grads",
        X,
        {"fp16.enabled": True, "fp16.fp16_master_weights_and_grads": True, Z + "stage": 2},
        {
            "fp16.enabled": True,
            "fp16.fp16_master_weights_and_grads": True,
            Z + "stage": 2,
            **ON_CPU,
        },
    ),
    (MASTER, X, {**BF16, MASTER: True}, {**BF16, MASTER: True, STATES: True}),
    (
        "optimizer.params.nesterov",
        X,
        {"optimizer.type": "SGD", "optimizer.params.nesterov": True},
        {
            "optimizer.type": "SGD",
            "optimizer.params.nesterov": True,
            "optimizer.params.momentum": 0.9,
        },
    ),
    (
        Z + "offload_optimizer.ratio",
        C,
        {Z + "stage": 3, **NVME, Z + "offload_optimizer.ratio": 0.5},
        {Z + "stage": 3, **ON_CPU, Z + "offload_optimizer.ratio": 0.5},
    ),
    (
        Z + "offload_optimizer",
        C,
        {Z + "stage": 2, **ON_CPU},
        {Z + "stage": 2, **ON_CPU, "optimizer.type": "AdamW"},
    ),
    (
        Z + "allgather_bucket_size",
        X,
        {Z + "stage": 2, Z + "allgather_bucket_size": 3},
        {Z + "allgather_bucket_size": 3},
    ),
    (MASTER, X, {**BF16, MASTER: True, **ON_CPU, **LION}, {**BF16, MASTER: True, **ON_CPU}),
    (
        STATES,
        X,
        {**BF16, MASTER: True, STATES: True, **ON_CPU, **LION},
        {**BF16, MASTER: True, STATES: True, **ON_CPU},
    ),
    (
        MASTER,
        Effect.ROUNDING,
        {**BF16, Z + "stage": 1, "data_types.grad_accum_dtype": "fp32", MASTER: True},
        {**BF16, Z + "stage": 1, MASTER: True, STATES: True},
    ),
    ("pipeline.stages", S, {"pipeline.stages": 2}, {}),
    ("pipeline.partition", S, {"pipeline.partition": "best"}, {}),
    ("pipeline.seed_layers", S, {"pipeline.seed_layers": True}, {}),
    ("disable_allgather", S, {"disable_allgather": True}, {}),
    (
        "tensor_parallel.tp.tp_size",
        S,
        {"tensor_parallel.tp.tp_size": 2},
        {"tensor_parallel.autotp_size": 2},
    ),
    (Z + "allgather_partitions", S, {Z + "allgather_partitions": True}, {}),
    (Z + "cpu_offload_use_pin_memory", S, {Z + "cpu_offload_use_pin_memory": True}, {}),
    ("fp32_allreduce", S, {"fp32_allreduce": True}, {"communication_data_type": "fp32"}),
    (
        "data_parallel_size",
        S,
        {"data_parallel_size": 4},
        {"data_parallel_size": 4, "sequence_parallel_size": 1},
    ),
    (
        "scheduler.type",
        S,
        {"optimizer.type": "AdamW"},
        {"optimizer.type": "AdamW", "code.scheduler.name": "other"},
    ),
    (
        "fp16.hysteresis",
        N,
        {"fp16.enabled": True, "fp16.hysteresis": 4},
        {"fp16.enabled": True, "fp16.hysteresis": 4, Z + "stage": 1},
    ),
    (
        "optimizer.params",
        N,
        {"optimizer.params.lr": 0.1},
        {"optimizer.type": "AdamW", "optimizer.params.lr": 0.1},
    ),
    ("scheduler.params", N, {"scheduler.params.warmup_min_lr": 0.1}, {}),
    (
        "pipeline",
        C,
        {"pipeline.activation_checkpoint_interval": 1},
        {"pipeline.activation_checkpoint_interval": 1, "code.pipeline_stages": 2},
    ),
    (
        "activation_checkpointing",
        C,
        {"activation_checkpointing.partition_activations": True},
        {"activation_checkpointing.partition_activations": True, "code.checkpointing": True},
    ),
    (
        Z + "offload_param",
        C,
        {Z + "offload_param.device": "cpu", Z + "stage": 2},
        {Z + "offload_param.device": "cpu", Z + "stage": 3},
    ),
    (
        Z + "offload_optimizer",
        C,
        {Z + "offload_optimizer.device": "cpu"},
        {Z + "offload_optimizer.device": "cpu", Z + "stage": 1, "optimizer.type": "AdamW"},
    ),
    (
        Z + "offload_optimizer.super_offload",
        C,
        {Z + "offload_optimizer.super_offload": True, Z + "stage": 2},
        {Z + "offload_optimizer.super_offload": True, Z + "stage": 3},
    ),
    (
        Z + "offload_param.nvme_path",
        X,
        {Z + "offload_param.device": "nvme", Z + "stage": 3},
        {
            Z + "offload_param.device": "nvme",
            Z + "offload_param.nvme_path": "/nvme",
            Z + "stage": 3,
        },
    ),
    (
        Z + "offload_optimizer.nvme_path",
        X,
        {Z + "offload_optimizer.device": "nvme", Z + "stage": 3},
        {
            Z + "offload_optimizer.device": "nvme",
            Z + "offload_optimizer.nvme_path": "/nvme",
            Z + "stage": 3,
        },
    ),
    (
        Z + "legacy_stage1",
        X,
        {Z + "legacy_stage1": True, Z + "stage": 1},
        {Z + "legacy_stage1": False, Z + "stage": 1},
    ),
    (
        "prescale_gradients",
        X,
        {"prescale_gradients": True, Z + "stage": 2},
        {"prescale_gradients": True, Z + "stage": 2, Z + "reduce_scatter": False},
    ),
    (
        "gradient_predivide_factor",
        X,
        {"gradient_predivide_factor": 2.0, Z + "stage": 3},
        {"gradient_predivide_factor": 2.0, Z + "stage": 1},
    ),
    (
        Z + "stage",
        N,
        {"bf16.enabled": True, "optimizer.type": "AdamW"},
        {"bf16.enabled": True, "optimizer.type": "AdamW", Z + "stage": 1},
    ),
    (Z + "stage", N, {"fp16.enabled": True, "optimizer.type": "adam"}, {"optimizer.type": "AdamW"}),
    (
        "gradient_clipping",
        N,
        {"code.pipeline_stages": 2},
        {"code.pipeline_stages": 2, "gradient_clipping": 0.0},
    ),
    (
        "gradient_clipping",
        N,
        {"code.pipeline_stages": 2},
        {"code.pipeline_stages": 2, Z + "stage": 1},
    ),
    (
        "optimizer.type",
        C,
        {"optimizer.type": "Lion"},
        {"optimizer.type": "Lion", "code.accelerator": "cuda"},
    ),
    (
        "optimizer.type",
        X,
        {"optimizer.type": "Lamb", "code.accelerator": "cpu"},
        {"optimizer.type": "Lamb", "code.accelerator": "npu"},
    ),
    (
        "optimizer.type",
        X,
        {"optimizer.type": "Lion", "code.accelerator": "cpu", Z + "stage": 1},
        {
            "optimizer.type": "Lion",
            "code.accelerator": "cpu",
            Z + "stage": 1,
            Z + "offload_optimizer.device": "cpu",
        },
    ),
    (
        "managed_gradient_accumulation",
        N,
        {"code.manual_accumulation": True, Z + "stage": 2},
        {"code.manual_accumulation": True, Z + "stage": 2, "managed_gradient_accumulation": False},
    ),
    (
        "managed_gradient_accumulation",
        X,
        {"managed_gradient_accumulation": False, Z + "stage": 1, Z + "overlap_comm": True},
        {"managed_gradient_accumulation": False, Z + "stage": 2, Z + "overlap_comm": True},
    ),
    (
        "train_batch_size",
        N,
        {"tensor_parallel.autotp_size": 2, "train_batch_size": 8},
        {"tensor_parallel.autotp_size": 2},
    ),
    (
        "data_types.grad_accum_dtype",
        X,
        {"bf16.enabled": True, "data_types.grad_accum_dtype": "fp32"},
        {"bf16.enabled": True, "data_types.grad_accum_dtype": "fp32", Z + "stage": 1},
    ),
    (
        "data_types.param_dtype",
        X,
        {"bf16.enabled": True, "data_types.param_dtype": "fp16"},
        {"bf16.enabled": True, "data_types.param_dtype": "bf16"},
    ),
    ("optimizer.type", X, {"optimizer.type": "OneBitAdam"}, {"optimizer.type": "Adagrad"}),
    ("optimizer.type", X, {"optimizer.type": "sgd"}, {"optimizer.type": "SGD"}),
    ("scheduler.type", X, {"scheduler.type": "WarmUpLR"}, {"scheduler.type": "CosineAnnealingLR"}),
    (
        "optimizer.params.max_grad_norm",
        X,
        {"optimizer.type": "AdamW", "optimizer.params.max_grad_norm": 1.0},
        {"optimizer.type": "AdamW"},
    ),
    (
        "optimizer.params.adam_w_mode",
        N,
        {"optimizer.type": "AdamW", "optimizer.params.adam_w_mode": False},
        {"optimizer.type": "Adam", "optimizer.params.adam_w_mode": False},
    ),
    (
        "optimizer.type",
        N,
        {"optimizer.type": "Adam", "optimizer.params.weight_decay": 0.1},
        {
            "optimizer.type": "Adam",
            "optimizer.params.weight_decay": 0.1,
            "optimizer.params.adam_w_mode": False,
        },
    ),
    (
        "zero_allow_untested_optimizer",
        X,
        {"optimizer.type": "SGD", Z + "stage": 2},
        {"optimizer.type": "SGD", Z + "stage": 2, "zero_allow_untested_optimizer": True},
    ),
    (
        "scheduler.params.warmup_max_lr",
        N,
        {"scheduler.type": "WarmupLR", "optimizer.type": "AdamW", "optimizer.params.lr": 0.1},
        {
            "scheduler.type": "WarmupLR",
            "optimizer.type": "AdamW",
            "optimizer.params.lr": 0.1,
            "scheduler.params.warmup_max_lr": 0.1,
        },
    ),
    (
        "optimizer.params.lr",
        N,
        {
            "scheduler.type": "WarmupDecayLR",
            "scheduler.params.total_num_steps": 100,
            "optimizer.type": "AdamW",
            "optimizer.params.lr": 0.1,
        },
        {
            "scheduler.type": "WarmupDecayLR",
            "scheduler.params.total_num_steps": 100,
            "scheduler.params.warmup_max_lr": 0.1,
            "optimizer.type": "AdamW",
            "optimizer.params.lr": 0.1,
        },
    ),
    (
        "optimizer.params.bias_correction",
        X,
        {
            "optimizer.type": "AdamW",
            "optimizer.params.torch_adam": True,
            "optimizer.params.bias_correction": True,
        },
        {"optimizer.type": "AdamW", "optimizer.params.bias_correction": True},
    ),
    (
        Z + "overlap_comm",
        C,
        {"code.pipeline_stages": 2, Z + "stage": 1, Z + "overlap_comm": True},
        {"code.pipeline_stages": 2, Z + "stage": 1, Z + "overlap_comm": False},
    ),
    (
        "steps_per_print",
        X,
        {"code.pipeline_stages": 2, Z + "stage": 1, "wall_clock_breakdown": True},
        {
            "code.pipeline_stages": 2,
            Z + "stage": 1,
            "wall_clock_breakdown": True,
            "steps_per_print": 10,
        },
    ),
    (
        "code.partition_method",
        S,
        {"code.partition_method": "uniform"},
        {"code.partition_method": "uniform", "code.pipeline_stages": 2},
    ),
    (Z + "cpu_offload", S, {Z + "cpu_offload": True, Z + "stage": 1}, {}),
]


def _about(
    dialect: Dialect, given: dict[str, Any], path: str, version: str = "0.19.8"
) -> list[Finding]:
    config = dialect.config(QUIET | given, version=version, world_size=4)
    return [finding for finding in config.findings if finding.path == path]


@pytest.mark.parametrize(("path", "effect", "caught", "left"), CASES)
def test_traps(
    deepspeed: Dialect, path: str, effect: Effect, caught: dict[str, Any], left: dict[str, Any]
) -> None:
    assert effect in {finding.effect for finding in _about(deepspeed, caught, path)}
    assert len(_about(deepspeed, left, path)) < len(_about(deepspeed, caught, path))


def test_every_row_is_tested() -> None:
    tested = {path for path, *_ in CASES} | {"sequence_parallel_size", "fp16.initial_scale_power"}
    assert {trap.path for trap in CHECKS} <= tested
    assert all(trap.place and trap.message for trap in CHECKS)


def test_traps_of_older_releases(deepspeed: Dialect) -> None:
    alone = {"sequence_parallel_size": 2}
    assert _about(deepspeed, alone, "sequence_parallel_size", "0.16.9")
    assert not _about(deepspeed, alone, "sequence_parallel_size", "0.17.0")
    silent = {"fp16.enabled": True, Z + "stage": 1}
    assert _about(deepspeed, silent, "fp16.initial_scale_power", "0.17.0")
    assert not _about(deepspeed, silent, "fp16.initial_scale_power", "0.17.1")
    assert not _about(
        deepspeed, silent | {"fp16.hysteresis": 2}, "fp16.initial_scale_power", "0.17.0"
    )
    piped = {"code.pipeline_stages": 2, Z + "stage": 1}
    found = [
        bool(_about(deepspeed, piped, "steps_per_print", version))
        for version in ("0.15.1", "0.15.2", "0.16.4", "0.16.5")
    ]
    assert found == [False, True, True, False]


@pytest.mark.parametrize("version", ["0.19.2", "0.19.3"])
def test_silent_clipping(deepspeed: Dialect, version: str) -> None:
    config = deepspeed.read({"train_micro_batch_size_per_gpu": 2}, version=version, world_size=1)
    (finding,) = config.findings
    assert (finding.path, finding.effect, finding.given, finding.matters) == (
        "gradient_clipping",
        N,
        False,
        True,
    )


def test_a_plain_config_is_clean(deepspeed: Dialect) -> None:
    given = QUIET | {
        Z + "stage": 2,
        "bf16.enabled": True,
        "optimizer.type": "AdamW",
        "optimizer.params.lr": 1e-4,
    }
    given["code.scheduler.name"] = "constant"
    assert deepspeed.config(given, version="0.19.8", world_size=4).findings == ()


def test_findings_know_their_line_and_nearest_name(deepspeed: Dialect) -> None:
    text = '{\n "train_batch_size": 4,\n "gradient_clipping": 1.0,\n "optimizer": {\n  "type": "AdanW"\n }\n}'
    (finding,) = (
        finding
        for finding in deepspeed.read(text, world_size=4).findings
        if finding.path == "optimizer.type"
    )
    assert str(finding.origin) == "line 5"
    assert finding.message.startswith("neither this release nor PyTorch has an optimizer AdanW")
    assert finding.message.endswith("; did you mean adamw?")
    assert finding.given


def test_an_assumed_world_is_told(deepspeed: Dialect) -> None:
    config = deepspeed.read(
        {"train_batch_size": 8, "gradient_clipping": 1.0, "sequence_parallel_size": 2}
    )
    (finding,) = config.findings
    assert (finding.path, finding.effect) == ("world_size", S)
    assert "2 is assumed" in finding.message


def test_ranks_of_a_tensor_group_share_samples(deepspeed: Dialect) -> None:
    settings = {**QUIET, "gradient_accumulation_steps": 4, "tensor_parallel": {"autotp_size": 4}}
    found = {
        one.path: one.message for one in deepspeed.inspect(deepspeed.read(settings, world_size=8))
    }
    assert "a step takes 16" in found["tensor_parallel.autotp_size"]
    assert "say 64" in found["tensor_parallel.autotp_size"]
