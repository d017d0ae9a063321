"""What Megatron accepts and then ignores, or stops at, is said on reading."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import bridge
import compat
from bridge.stack.rules import Effect
from bridge.translation import sidecar as carry

MEGATRON = compat.load("megatron")
BARE = (
    "--micro-batch-size 1 --global-batch-size 4 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --lr 1e-3 "
)
CASES = {
    "use_distributed_optimizer": (
        "--use-distributed-optimizer --optimizer sgd",
        "--use-distributed-optimizer",
    ),
    "adam_beta1": ("--adam-beta1 0.8 --optimizer sgd", "--adam-beta1 0.8"),
    "sgd_momentum": ("--sgd-momentum 0.8", "--sgd-momentum 0.8 --optimizer sgd"),
    "num_query_groups": ("--num-query-groups 2", "--num-query-groups 2 --group-query-attention"),
    "use_checkpoint_opt_param_scheduler": (
        "--load ckpt --use-checkpoint-opt_param-scheduler --no-load-optim",
        "--load ckpt --use-checkpoint-opt_param-scheduler --no-load-rng",
    ),
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
    source = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    config = compat.load("deepspeed").read(
        source | {"zero_optimization": {"stage": 1}}, world_size=4
    )
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


@pytest.mark.once
@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize(
    "grid", [(1, 1, 1, 1), (1, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (2, 2, 4, 1)]
)
def test_data_ranks_outside_the_pipeline_need_one_grid(
    ranks: int, pipeline: int, grid: tuple[int, int, int, int]
) -> None:
    """As Megatron-Core's own `initialize_model_parallel` does, in a model without experts too."""
    megatron = pytest.importorskip("tests.harvesting.starts.megatron")
    pytest.importorskip("megatron.core")
    tensor, context, expert, within = grid
    flags = (
        f"{BARE.replace('--global-batch-size 4', '')} --bf16 --sequence-parallel --use-tp-pp-dp-mapping"
        f" --tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"
        f" --context-parallel-size {context} --expert-tensor-parallel-size {within}"
    )
    if expert > 1:
        flags += f" --num-experts 4 --disable-bias-linear --expert-model-parallel-size {expert}"
    config = MEGATRON.read(flags.split(), "0.16.1", ranks)
    stops = any(one.effect is Effect.STOPS for one in config.findings)
    try:
        with megatron._ranks(SimpleNamespace(**config.args.flat())):
            assert not stops
    except AssertionError as error:
        assert stops and "data parallel size of the attention and moe layers" in str(error)


def test_the_script_of_deepspeed_says_how_experts_are_split() -> None:
    flags = f"{BARE} --num-experts 8 --expert-model-parallel-size 4".split()
    result = bridge.translate(MEGATRON.read(flags, world_size=4), compat.load("deepspeed"))
    assert "ep_size=4" in result.written.snippet


SPLIT = "--tensor-model-parallel-size 2"
EXPERTS = "--num-experts 4 --disable-bias-linear"
PIPES = "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
ODD = "--moe-ffn-hidden-size 9"
SHARED = "--num-experts 4 --moe-shared-expert-intermediate-size 8"
SINKHORN = f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff"
CONTEXT = "--context-parallel-size 2"
RAMP = "--train-samples 1000 --rampup-batch-size"
STOPPING = (
    (
        "padded_vocab_size",
        f"{SPLIT} --padded-vocab-size 129",
        f"{SPLIT} --padded-vocab-size 128",
        "0.19.2",
    ),
    ("ffn_hidden_size", f"{SPLIT} --ffn-hidden-size 129", f"{SPLIT} --ffn-hidden-size 128", ""),
    ("moe_ffn_hidden_size", f"{EXPERTS} {ODD} {SPLIT} --sequence-parallel", f"{EXPERTS} {ODD}", ""),
    ("seq_length", f"{SPLIT} --sequence-parallel --seq-length 31", f"{SPLIT} --seq-length 31", ""),
    ("num_experts", f"{EXPERTS} {SPLIT}", f"{EXPERTS} {SPLIT} --sequence-parallel", ""),
    ("moe_shared_expert_intermediate_size", SHARED, f"{SHARED} --disable-bias-linear", "0.19.2"),
    ("context_parallel_size", f"{CONTEXT} --transformer-impl local", CONTEXT, ""),
    ("moe_router_topk", f"{EXPERTS} --moe-router-topk 5", f"{EXPERTS} --moe-router-topk 4", ""),
    ("moe_aux_loss_coeff", f"{SINKHORN} 0.01", f"{SINKHORN} 0", ""),
    ("global_batch_size", f"{PIPES} --global-batch-size 6", f"{PIPES} --global-batch-size 8", ""),
    (
        "rampup_batch_size",
        f"{RAMP} 4 8 100 --global-batch-size 16",
        f"{RAMP} 4 4 100 --global-batch-size 16",
        "0.17.1",
    ),
    (
        "rampup_batch_size",
        f"{RAMP} a b c --global-batch-size 16",
        f"{RAMP} 4 4 100 --global-batch-size 16",
        "0.15.3",
    ),
    (
        "rampup_batch_size",
        f"{RAMP} 2 2 100 --global-batch-size 16",
        f"{RAMP} 4 4 100 --global-batch-size 16",
        "0.17.1",
    ),
    (
        "override_opt_param_scheduler",
        "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
        "--override-opt_param-scheduler",
        "",
    ),
    ("optimizer", "--optimizer muon --fp16", "--optimizer muon --bf16", "0.16.1"),
)
"""Flags with which Megatron's core stops behind its parser, others with which it starts, and the release."""


@pytest.mark.parametrize("path, bad, good, version", STOPPING)
def test_what_the_core_asserts_is_said(path: str, bad: str, good: str, version: str) -> None:
    read = [
        MEGATRON.read((BARE + flags).split(), version or None, 4).findings for flags in (bad, good)
    ]
    assert [{one.path for one in found if one.effect is Effect.STOPS} for found in read] == [
        {path},
        set(),
    ]


def test_a_release_without_ramps_says_that_it_ignores_one() -> None:
    config = MEGATRON.read(f"{BARE} {RAMP} 4 4 100 --global-batch-size 16".split(), "0.18.2", 4)
    assert Effect.NUMBERS in {
        finding.effect for finding in config.findings if finding.path == "rampup_batch_size"
    }


def test_a_ramp_that_comes_back_beside_an_edited_batch_is_checked() -> None:
    """The ramp is the sidecar's and the batch the edited file's; Megatron would stop where they do not meet."""
    source = MEGATRON.read(f"{BARE} {RAMP} 4 4 100 --global-batch-size 16".split(), "0.17.1", 4)
    result = bridge.translate(source, compat.load("deepspeed"))
    sidecar = carry.parse(result.carry.text(result.written.text), "sidecar")
    for micro, stops in ((1, False), (2, True)):
        batch = {
            "train_micro_batch_size_per_gpu": micro,
            "train_batch_size": 20 * micro,
            "gradient_accumulation_steps": 5,
        }
        edited = compat.load("deepspeed").config(
            {**result.config.given, **batch}, result.config.version, 4
        )
        back = bridge.translate(edited, MEGATRON, "0.17.1", 4, sidecar)
        assert back.config.given["rampup_batch_size"] == source.given["rampup_batch_size"]
        assert any(finding.effect is Effect.STOPS for finding in back.findings) is stops
