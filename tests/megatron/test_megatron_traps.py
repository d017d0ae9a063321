"""What Megatron accepts and then ignores, or stops at, is said on reading."""

from __future__ import annotations

import pytest

import bridge
import compat
from bridge.rules import Effect

MEGATRON = compat.load("megatron")
BARE = (
    "--micro-batch-size 1 --global-batch-size 4 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --lr 1e-3 "
)
CASES = {
    "use_distributed_optimizer": ("--use-distributed-optimizer --optimizer sgd", "--use-distributed-optimizer"),
    "adam_beta1": ("--adam-beta1 0.8 --optimizer sgd", "--adam-beta1 0.8"),
    "sgd_momentum": ("--sgd-momentum 0.8", "--sgd-momentum 0.8 --optimizer sgd"),
    "num_query_groups": ("--num-query-groups 2", "--num-query-groups 2 --group-query-attention"),
    "hysteresis": ("--hysteresis 3 --bf16", "--hysteresis 3 --fp16"),
}
"""Flags with which the argument does nothing good, and flags with which it works."""


@pytest.mark.parametrize("path", CASES)
@pytest.mark.parametrize("version", ["0.9.0", MEGATRON.versions[-1]])
def test_it_is_said_where_it_bites_and_only_there(path: str, version: str) -> None:
    caught, left = (MEGATRON.read((BARE + flags).split(), version, 4) for flags in CASES[path])
    assert path in {finding.path for finding in caught.findings}
    assert path not in {finding.path for finding in left.findings}


def test_a_translation_does_not_write_what_stops() -> None:
    """DeepSpeed shards the state of SGD; Megatron's launch with the same would stop."""
    source = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    config = compat.load("deepspeed").read(source | {"zero_optimization": {"stage": 1}}, world_size=4)
    result = bridge.translate(config, MEGATRON)
    assert "use_distributed_optimizer" not in result.config.given
    assert not any("stops at the start" in finding.message for finding in result.findings)
    assert "zero_optimization.stage" in {finding.path for finding in result.findings}


@pytest.mark.parametrize("version", ["0.9.0", "0.10.0", MEGATRON.versions[-1]])
def test_ranks_that_the_grid_of_experts_does_not_divide_stop_the_run(version: str) -> None:
    """NVIDIA's launch of Mixtral asks for 8 x 4 ranks of experts, and starts on one node of 8."""
    flags = BARE.replace("--global-batch-size 4", "--global-batch-size 32") + (
        "--num-layers 4 --num-experts 8 --expert-model-parallel-size 8 --pipeline-model-parallel-size 4 --bf16"
    )
    few, enough = (MEGATRON.read(flags.split(), version, world) for world in (8, 32))
    stops = {finding.path for finding in few.findings if finding.effect is Effect.STOPS}
    assert stops == {"expert_model_parallel_size"}
    assert not any(finding.effect is Effect.STOPS for finding in enough.findings)


def test_the_script_of_deepspeed_says_how_experts_are_split() -> None:
    flags = f"{BARE} --num-experts 8 --expert-model-parallel-size 4".split()
    result = bridge.translate(MEGATRON.read(flags, world_size=4), compat.load("deepspeed"))
    assert "ep_size=4" in result.written.snippet
