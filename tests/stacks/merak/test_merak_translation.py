"""Merak to and from Megatron and DeepSpeed: facts on single settings, losses that are named, and ways back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bridge
import compat
from bridge.stack.rules import Effect, How
from bridge.translation.translate import Result, translate
from compat.merak.releases import KNOWN

MERAK, MEGATRON, DEEPSPEED = (compat.load(name) for name in ("merak", "megatron", "deepspeed"))
DEGREES = {"pp": 2, "tp": 2, "dp": 2}
EXAMPLES = Path(__file__).parents[3] / "examples" / "merak"
CASES = json.loads((EXAMPLES / "cases.json").read_text())


def plan_of(version: str = KNOWN[-1], world_size: int | None = None, **said: Any) -> dict[str, Any]:
    return bridge.lift(MERAK.read(said, version, world_size)).values().flat()


def sent(to: Any, **said: Any) -> Result:
    return translate(MERAK.read({**DEGREES, **said}, world_size=8), to)


MODEL = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "


def from_megatron(flags: str, world_size: int = 8, version: str | None = None) -> Result:
    return translate(MEGATRON.read((MODEL + flags).split(), world_size=world_size), MERAK, version)


@pytest.mark.parametrize(
    "said, path, value",
    [
        ({"fp16": True}, "precision.compute", "fp16"),
        ({"fp16": True}, "precision.master", "fp32"),
        ({"bf16": True}, "precision.master", "bf16"),
        ({"bf16": True, "version": "2.2.1"}, "precision.compute", "fp32"),
        ({"zero_stage": 1}, "precision.reduce", "fp16"),
        ({}, "precision.reduce", "fp32"),
        ({"half_precision_backend": "cuda_amp"}, "precision.compute", "fp16"),
        ({"fp16": True, "initial_scale_power": 12}, "precision.loss_scale.initial", 4096.0),
        ({"fp16": True, "hysteresis": 5}, "precision.loss_scale.hysteresis", 2),
        ({"fp16": True, "hysteresis": 5, "version": "1.1.1"}, "precision.loss_scale.hysteresis", 5),
        ({"fp16": True, "loss_scale": 128.0}, "precision.loss_scale.static", None),
        ({"adafactor": True}, "optimizer.name", "adafactor"),
        ({"adafactor": True}, "optimizer.betas", None),
        ({"max_grad_norm": -1.0}, "optimizer.clip", 0.0),
        ({"half_precision_backend": "cpu_amp"}, "optimizer.clip", 0.0),
        ({"max_steps": 200, "warmup_ratio": 0.1}, "optimizer.schedule.warmup_steps", 20),
        (
            {"max_steps": 200, "warmup_ratio": 0.1, "warmup_steps": 3},
            "optimizer.schedule.warmup_steps",
            3,
        ),
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 3},
            "optimizer.schedule.warmup_steps",
            0,
        ),
        ({"lr_scheduler_type": "polynomial"}, "optimizer.schedule.minimum", 1e-7),
        ({"lr_scheduler_type": "polynomial"}, "optimizer.schedule.name", "linear"),
        ({"max_steps": -1}, "optimizer.schedule.total_steps", None),
        ({"zero_stage": 1.0}, "zero.stage", 1),
        ({"zero_stage": 1, "version": "1.1.1"}, "zero.stage", 0),
        ({"zero_optimization": True, "version": "1.1.1"}, "zero.stage", 1),
        ({"sequence_parallel": True, "tp": 2, "version": "2.2.2"}, "parallel.sequence", True),
        ({"sequence_parallel": True, "tp": 2}, "parallel.sequence", False),
        ({"sequence_parallel": True, "sp": 2}, "parallel.context", 2),
        ({"activation_checkpointing": False}, "recompute.granularity", "none"),
        ({"activation_checkpoint_ratio": ["0.25"]}, "recompute.ratio", 0.25),
        ({"pp": 2, "partition_method": "parameters"}, "stages.rule", "parameters"),
        ({"partition_method": "parameters"}, "stages.rule", None),
        ({"pp": 2}, "schedule.name", "1f1b"),
        ({}, "parallel.pipeline", None),
        ({"num_heads": 8}, "model.heads", 8),
        ({"no_tie_modules": True}, "model.tied", False),
        ({}, "model.tied", None),
    ],
)
def test_meanings(said: dict[str, Any], path: str, value: Any) -> None:
    assert plan_of(**said).get(path) == value


def test_to_megatron() -> None:
    config = sent(
        MEGATRON,
        fp16=True,
        zero_stage=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        num_layers=8,
    ).config
    expected = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "micro_batch_size": 2,
        "global_batch_size": 16,
        "fp16": True,
        "use_distributed_optimizer": True,
        "clip_grad": 1.0,
        "lr": 5e-5,
        "num_layers": 8,
        "initial_loss_scale": 2.0**32,
    }
    assert {path: config.given[path] for path in expected} == expected


def test_to_deepspeed() -> None:
    config = sent(
        DEEPSPEED,
        bf16=True,
        zero_stage=1,
        zero_reduce_bucket_size=1000,
        per_device_train_batch_size=2,
    ).config
    expected = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "train_batch_size": 4,
        "bf16.enabled": True,
        "zero_optimization.stage": 1,
        "zero_optimization.reduce_bucket_size": 1000,
        "code.pipeline_stages": 2,
        "code.tensor_parallel": 2,
        "optimizer.type": "AdamW",
    }
    assert {path: config.given[path] for path in expected} == expected


def test_from_megatron() -> None:
    result = from_megatron(
        "--micro-batch-size 2 --global-batch-size 16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--bf16 --lr 1e-3 --train-iters 100 --lr-decay-style cosine --min-lr 1e-4 --lr-warmup-iters 10 --clip-grad 0.5 "
        "--use-distributed-optimizer"
    )
    expected = {
        "init.pp": 2,
        "init.tp": 2,
        "init.dp": 2,
        "args.per_device_train_batch_size": 2,
        "args.gradient_accumulation_steps": 4,
        "args.bf16": True,
        "args.zero_stage": 1,
        "args.lr_scheduler_type": "cosine_with_min_lr",
        "args.lr_scheduler_kwargs": {"min_lr": 1e-4},
        "args.warmup_steps": 10,
        "args.max_steps": 100,
        "args.max_grad_norm": 0.5,
        "args.num_layers": 8,
    }
    assert {path: result.config.given[path] for path in expected} == expected
    (said,) = (finding for finding in result.findings if finding.path == "args.bf16")
    assert said.effect is Effect.NUMBERS and "no fp32 master weights" in said.message


def test_from_megatron_with_what_merak_lacks() -> None:
    result = from_megatron(
        "--micro-batch-size 1 "
        "--tensor-model-parallel-size 2 --sequence-parallel --optimizer sgd --lr 0.1 --recompute-granularity selective"
    )
    lost = {
        finding.path for finding in result.findings if finding.given and finding.how is not None
    }
    assert {"sequence_parallel", "optimizer", "recompute_granularity"} <= lost
    assert from_megatron(
        "--micro-batch-size 1 --tensor-model-parallel-size 2 --sequence-parallel --lr 0.1",
        version="2.2.2",
    ).config.given["args.sequence_parallel"]


def test_from_deepspeed() -> None:
    source = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "fp16": {"enabled": True, "initial_scale_power": 12, "hysteresis": 4},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    }
    result = translate(DEEPSPEED.read(source, world_size=4, code={"pipeline_stages": 1}), MERAK)
    given, lost = (
        result.config.given,
        {finding.path for finding in result.findings if finding.how is not None},
    )
    assert (
        given["init.dp"] == 4
        and given["args.zero_stage"] == 1
        and given["args.initial_scale_power"] == 12
    )
    assert {"zero_optimization.stage", "fp16.hysteresis"} <= lost
    assert "args.hysteresis" not in given


def test_nothing_that_is_ignored_or_broken_is_written() -> None:
    result = from_megatron("--micro-batch-size 1 --fp16 --hysteresis 4 --loss-scale 128 --lr 0.1")
    said = [finding.message for finding in result.findings if finding.given and finding.how is None]
    assert not [message for message in said if message.startswith(("no effect", "broken"))]


@pytest.mark.parametrize("other", [MEGATRON, DEEPSPEED], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["file"])
def test_there_and_back_with_what_was_carried(case: dict[str, Any], other: Any) -> None:
    source = MERAK.read(EXAMPLES / case["file"], case["version"], case["world_size"])
    there = translate(source, other)
    back = translate(there.config, MERAK, case["version"], case["world_size"], carry=there.carry)
    assert back.config.given == source.given


def test_an_edit_in_between_survives() -> None:
    source = MERAK.read(
        {**DEGREES, "learning_rate": 1e-3, "split_method": "layer_split"}, world_size=8
    )
    there = translate(source, DEEPSPEED)
    edited = DEEPSPEED.config(
        {**there.config.given, "optimizer.params.lr": 5e-4}, there.config.version, 8
    )
    back = translate(edited, MERAK, carry=there.carry).config
    assert (
        back.given["args.learning_rate"] == 5e-4
        and back.given["args.split_method"] == "layer_split"
    )


def test_what_a_release_lacks_is_a_loss() -> None:
    source = MERAK.read({**DEGREES, "split_method": "layer_split", "seed": 1}, world_size=8)
    result = translate(source, MERAK, "1.1.1")
    assert "args.split_method" not in result.config.given and result.config.given["args.seed"] == 1
    assert {finding.path: finding.how for finding in result.findings}[
        "args.split_method"
    ] is How.DROPPED


def test_split_and_tensor_lists_are_named_when_they_stay_behind() -> None:
    result = sent(MEGATRON, split_method="layer_split", input_output_mapping=[[1, 3, "col"]])
    lost = {finding.path: finding.how for finding in result.findings if finding.how is not None}
    assert (
        lost["args.split_method"] is How.DROPPED
        and lost["tp_lists.input_output_mapping"] is How.DROPPED
    )


@pytest.mark.parametrize("target", ["deepspeed", "fast_llm", "huggingface", "megatron"])
def test_a_schedule_that_ends_with_its_warmup_is_not_kept(target: str) -> None:
    lengths = {"num_stable_steps": 0, "num_decay_steps": 0, "min_lr_ratio": 0.0}
    schedule = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": lengths}
    result = sent(compat.load(target), **schedule, warmup_steps=4, max_steps=6)
    lost = [one for one in result.findings if one.path.startswith("args.lr_scheduler")]
    assert any(one.effect >= Effect.NUMBERS for one in lost), result.findings
