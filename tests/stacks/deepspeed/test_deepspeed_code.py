"""The code part: values, a script that is Python, and the launch command."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from bridge.stack.dialect import Dialect, Written

BASE = {"train_micro_batch_size_per_gpu": 2}
SCRIPTS: list[tuple[dict[str, Any], int | None, tuple[str, ...], tuple[str, ...]]] = [
    (
        {},
        1,
        ("model = build_model()", "engine.backward(loss)", "optimizer=build_optimizer"),
        ("mpu", "PipelineModule"),
    ),
    ({"optimizer.type": "AdamW"}, 1, (), ("build_optimizer",)),
    (
        {"code.tensor_parallel": 4},
        8,
        ("mpu = build_groups(tensor=4)", "mpu=mpu"),
        ("PipelineModule",),
    ),
    (
        {"code.context_parallel": 2},
        8,
        ("mpu = build_groups(sequence=2)", "get_sequence_data_parallel_*", "DistributedAttention("),
        (),
    ),
    (
        {
            "code.pipeline_stages": 2,
            "code.partition_method": "uniform",
            "pipeline.activation_checkpoint_interval": 3,
        },
        8,
        (
            "num_stages=2,",
            "partition_method='uniform'",
            "activation_checkpoint_interval=3",
            "engine.train_batch",
        ),
        ("mpu=mpu", "engine.backward"),
    ),
    (
        {"code.pipeline_stages": 2, "code.tensor_parallel": 2},
        8,
        ("PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)", "topology=topology"),
        ("num_stages",),
    ),
    (
        {"tensor_parallel.autotp_size": 2},
        2,
        ("deepspeed.tp_model_init(model, tp_size=2",),
        ("mpu=mpu",),
    ),
    (
        {"code.checkpointing": True},
        1,
        ('deepspeed.checkpointing.configure(None, deepspeed_config="ds_config.json")',),
        (),
    ),
    (
        {"code.scheduler.name": "cosine", "code.scheduler.total_steps": 100},
        1,
        ("LambdaLR(optimizer, lr_factor)", "def lr_factor(step):"),
        (),
    ),
    ({"code.scheduler.name": "constant"}, 1, (), ("lr_scheduler",)),
    ({"code.scheduler.name": "other"}, 1, ("lr_scheduler=build_scheduler,",), ("lr_factor",)),
]


def _written(dialect: Dialect, given: dict[str, Any], world: int | None) -> Written:
    return dialect.write(dialect.config(BASE | given, version="0.19.8", world_size=world))


@pytest.mark.parametrize(("given", "world", "there", "absent"), SCRIPTS)
def test_scripts(
    deepspeed: Dialect,
    given: dict[str, Any],
    world: int | None,
    there: tuple[str, ...],
    absent: tuple[str, ...],
) -> None:
    snippet = _written(deepspeed, given, world).snippet
    ast.parse(snippet)
    assert all(part in snippet for part in there)
    assert not any(part in snippet for part in absent)


LAUNCHES: list[tuple[dict[str, Any], int | None, str]] = [
    ({}, None, "deepspeed train.py --deepspeed_config ds_config.json"),
    ({}, 4, "deepspeed --num_gpus 4 train.py --deepspeed_config ds_config.json"),
    (
        {},
        16,
        "deepspeed --hostfile hostfile --num_nodes 2 --num_gpus 8 train.py --deepspeed_config ds_config.json",
    ),
    (
        {"code.accelerator": "cpu"},
        2,
        "deepspeed --num_accelerators 2 train.py --deepspeed_config ds_config.json",
    ),
]


@pytest.mark.parametrize(("given", "world", "command"), LAUNCHES)
def test_launch_commands(
    deepspeed: Dialect, given: dict[str, Any], world: int | None, command: str
) -> None:
    written = _written(deepspeed, given, world)
    assert " ".join(written.launch) == command
    assert written.environment == ({"DS_ACCELERATOR": "cpu"} if given else {})


def test_code_is_data_too(deepspeed: Dialect) -> None:
    given = {"code.pipeline_stages": 2, "code.scheduler.name": "cosine"}
    assert _written(deepspeed, given, 4).code == {
        "pipeline_stages": 2,
        "scheduler": {"name": "cosine"},
    }
    assert "code" not in _written(deepspeed, given, 4).text
