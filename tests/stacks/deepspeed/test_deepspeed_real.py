"""Generated configs against the installed DeepSpeedConfig: the same verdict and values, or a listed difference."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from bridge.errors import BridgeError, VersionError
from bridge.plan.section import nest
from bridge.stack.dialect import Dialect

pytest.importorskip("deepspeed")

RELEASE = "0.19.8"
Z = "zero_optimization."

POOLS: Mapping[str, tuple[Any, ...]] = {
    "train_batch_size": (8, 16, 24, 64, 7),
    "train_micro_batch_size_per_gpu": (1, 2, 4, 3),
    "gradient_accumulation_steps": (1, 2, 4, 3),
    "steps_per_print": (1, 10, None),
    "gradient_clipping": (0, 0.5, 1.0),
    "prescale_gradients": (True, False),
    "gradient_predivide_factor": (1.0, 2.0, 4),
    "gradient_allreduce_op": ("mean", "sum", "SUM", "max"),
    "communication_data_type": ("fp32", "bf16", "FP16", "fp64", None),
    "seq_parallel_communication_data_type": ("fp32", "bf16", None, "fp8"),
    "managed_gradient_accumulation": (True, False),
    "wall_clock_breakdown": (True, False),
    "memory_breakdown": (True, False),
    "dump_state": (True, False),
    "disable_allgather": (True, False),
    "disable_python_gc": (True, False),
    "zero_allow_untested_optimizer": (True, False),
    "zero_force_ds_cpu_optimizer": (True, False),
    "dataloader_drop_last": (True, False),
    "use_data_before_expert_parallelism": (True, False),
    Z + "stage": (0, 1, 2, 3, "0", "3", True, 4, -1, "x", 1.5),
    Z + "reduce_bucket_size": (500_000_000, 5e8, 1, 0, -1, 1.5),
    Z + "allgather_bucket_size": (5e8, 0, 1000, -1),
    Z + "contiguous_gradients": (True, False),
    Z + "reduce_scatter": (True, False),
    Z + "overlap_comm": (True, False, None),
    Z + "round_robin_gradients": (True, False),
    Z + "sub_group_size": (1e9, 1000, 1e14),
    Z + "stage3_prefetch_bucket_size": (0, 5e7, 1000),
    Z + "stage3_max_live_parameters": (0, 1e9),
    Z + "max_live_parameters": (0, 1e6),
    Z + "stage3_gather_16bit_weights_on_model_save": (True, False),
    Z + "stage3_gather_fp16_weights_on_model_save": (True, False),
    Z + "cpu_offload": (True, False),
    Z + "cpu_offload_param": (True, False),
    Z + "compute_grad_norm": (True,),
    Z + "parameter_alignment": (True, False),
    Z + "zero_hpz_partition_size": (1, 8),
    Z + "leaf_module.classes": (["a.B"], "a.B", []),
    Z + "offload_optimizer.device": ("none", "cpu", "nvme", "gpu"),
    Z + "offload_optimizer.pin_memory": (True, False),
    Z + "offload_optimizer.ratio": (1.0, 0.5, 0, 1.5),
    Z + "offload_optimizer.super_offload": (True, False),
    Z + "offload_param.device": ("none", "cpu", "disk"),
    Z + "offload_param.buffer_size": (1e8, 100),
    Z + "zenflow.topk_ratio": (0.1, 0.5, 0.0, 1.0),
    Z + "zenflow.update_interval": ("auto", 4, 0, "often"),
    Z + "zenflow.select_strategy": ("auto", "step", "sometimes"),
    Z + "mics_shard_size": (2,),
    Z + "stag": (1,),
    "fp16.enabled": (True, False),
    "fp16.loss_scale": (0, 128.0, -1, True),
    "fp16.initial_scale_power": (16, 8, 32),
    "fp16.loss_scale_window": (1000, 1, 0),
    "fp16.hysteresis": (1, 2),
    "fp16.min_loss_scale": (1, 128, 0),
    "fp16.fp16_master_weights_and_grads": (True, False),
    "bf16.enabled": (True, False),
    "bf16.check_grad_overflow": (True, False),
    "bf16.bf16_master_weights_and_grads": (True, False),
    "bf16.bf16_optimizer_states": (True, False),
    "bf16.loss_scale": (0,),
    "bfloat16.enabled": (True, False),
    "optimizer.type": ("AdamW", "Adam", "adam", "SGD", "Lamb", "MyOwn"),
    "optimizer.params.lr": (1e-3, 1, 0.0),
    "optimizer.params.weight_decay": (0, 0.1),
    "optimizer.legacy_fusion": (True, False),
    "scheduler.type": ("WarmupLR", "CosineAnnealingLR"),
    "activation_checkpointing.partition_activations": (True, False),
    "activation_checkpointing.number_checkpoints": (4, None),
    "pipeline.activation_checkpoint_interval": (0, 1, 2),
    "pipeline.stages": ("auto", 2),
    "checkpoint.tag_validation": ("Warn", "FAIL", "ignore", "maybe"),
    "checkpoint.load_universal": (True, False),
    "checkpoint.parallel_write.pipeline_stage": (True, False),
    "checkpoint.writer.type": ("fast", "PYTHON", "slow"),
    "data_types.grad_accum_dtype": ("fp32", "bf16", None),
    "data_types.keep_in_fp32_modules": ("auto", ["norm"], "norm"),
    "torch_autocast.enabled": (True, False),
    "torch_autocast.dtype": ("bf16", "torch.bfloat16", "half", "fp1"),
    "flops_profiler.enabled": (True, False),
    "flops_profiler.profile_step": (1, 5),
    "aio.block_size": (1048576, 4096),
    "aio.use_gds": (False, True),
    "autotuning.enabled": (True, False),
    "autotuning.results_dir": ("out", ""),
    "tensor_parallel.autotp_size": (0, 1),
    "tensor_parallel.kernel_inject": (True, False),
    "tensor_parallel.replace_with_kernel_inject": (True, False),
    "tensor_parallel.dtype": ("fp16",),
    "comms_logger.enabled": (True, False),
    "tensorboard.enabled": (False,),
    "wandb.project": ("p",),
    "compile.deepcompile": (True, False),
    "compile.passes": (["z1"], ["z9"], None),
    "compile.backend": ("inductor",),
    "hybrid_engine.max_out_tokens": (512, 0),
    "timers.throughput.enabled": (True, False),
    "weight_quantization.num_bits": (4, 8),
    "expert_parallel.autoep_size": (1, 2),
    "expert_parallel.load_balance_coeff": (None, 0.1),
    "data_efficiency.seed": (1, 1234),
    "elasticity.enabled": (False,),
    "amp.enabled": (False,),
    "sparse_gradients": (False,),
    "nebula.enabled": (False,),
}
"""Values that the dialect and DeepSpeed must judge alike."""

DIFFERENCES: tuple[tuple[str, Any, str], ...] = (
    ("train_micro_batch_size_per_gpu", 2.5, "a fraction of a sample"),
    ("gradient_accumulation_steps", True, "true for a number"),
    ("steps_per_print", "10", "text for a number"),
    ("steps_per_print", 0, "divides by zero in the engine"),
    ("gradient_clipping", "auto", "left as text, on which the engine trips"),
    ("gradient_clipping", -1.0, "negative norm"),
    ("gradient_clipping", None, "the engine compares None with 0"),
    ("gradient_predivide_factor", 0, "divides by zero in the engine"),
    ("zero_optimisation", {"stage": 3}, "unknown key, ignored: stage 0"),
    ("activation_checkpointing.partitioned_activations", True, "unknown key, ignored"),
    ("flops_profiler.enable", True, "unknown key, ignored"),
    ("aio.thread_count", 4, "renamed in 0.16.4, ignored since"),
    ("seq_parallel_comm_data_type", "fp32", "renamed in 0.16.5, ignored since"),
    ("tensor_parallel.partition_config", {"layer_spec": []}, "unknown key, ignored"),
    (Z + "stage", "auto", "dropped: stage 0"),
    (Z + "reduce_bucket_size", "auto", "dropped: the default"),
    (Z + "reduce_bucket_size", "100", "text for a number"),
    (Z + "reduce_bucket_size", True, "true for a number"),
    (Z + "overlap_comm", "yes", "text for true"),
    (Z + "overlap_comm", 1, "1 for true"),
    (Z + "offload_optimizer.ratio", "0.5", "text for a number"),
    (Z + "zenflow", {}, "an empty section switches this feature on"),
    ("weight_quantization", {}, "an empty section switches this feature on"),
    ("fp16.enabled", "auto", "dropped: false"),
    ("fp16.enabled", "true", "text for true"),
    ("fp16.initial_scale_power", 4096, "a scale beyond any number"),
    ("fp16.hysteresis", 0, "the scale never shrinks"),
    ("bf16.enabled", 1, "1 for true"),
    ("optimizer.params.lr", "1e-3", "text for a number"),
    ("optimizer.params.lr", -0.1, "negative rate"),
    ("checkpoint.load_universal", "no", "text is true"),
    ("data_types.grad_accum_dtype", "fp99", "found out in the engine only"),
    ("pipeline.activation_checkpoint_interval", -1, "negative count"),
    ("expert_parallel.autoep_size", 0, "found out in the engine only"),
    (Z + "compute_grad_norm", False, "needs gradient_clipping 0, found out in the engine only"),
)
"""What DeepSpeed accepts and then ignores or trips on, and the dialect refuses, with why."""

BASE = {"train_micro_batch_size_per_gpu": 2}
BESIDE: Mapping[str, Mapping[str, Any]] = {
    Z + "offload_optimizer.ratio": {Z + "stage": 3},
    Z + "compute_grad_norm": {Z + "stage": 1},
    "optimizer.params.lr": {"optimizer.type": "AdamW"},
}
"""What must stand beside a value for DeepSpeed to accept it."""


def _ours(dialect: Dialect, data: Mapping[str, Any], world: int) -> Any:
    try:
        return dialect.read(data, version=RELEASE, world_size=world)
    except BridgeError as error:
        return error


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nested data; of two keys of which one is the parent of the other, the first stays."""
    kept: dict[str, Any] = {}
    for path, value in flat.items():
        if not any(path.startswith(other + ".") or other.startswith(path + ".") for other in kept):
            kept[path] = value
    return nest(kept)


def _sample(chance: random.Random, paths: tuple[str, ...], size: int) -> dict[str, Any]:
    return BASE | {
        path: chance.choice(POOLS[path]) for path in chance.sample(paths, min(size, len(paths)))
    }


def assert_agree(
    ours: Any, theirs: Any, held: Callable[[Any], Mapping[str, Any]], data: Mapping[str, Any]
) -> None:
    assert isinstance(ours, BridgeError) == isinstance(theirs, str), (data, ours, theirs)
    if isinstance(ours, BridgeError):
        return
    effective, found = ours.effective, held(theirs)
    for path in effective.keys() & found.keys():
        value = list(effective[path]) if isinstance(effective[path], tuple) else effective[path]
        assert value == found[path], (data, path)


def test_each_value_alone(
    deepspeed: Dialect, real: Callable[..., Any], held: Callable[[Any], Mapping[str, Any]]
) -> None:
    for path, values in POOLS.items():
        for value in values:
            data = _nested(
                {path: value, **BASE} if path != "train_micro_batch_size_per_gpu" else {path: value}
            )
            assert_agree(_ours(deepspeed, data, 4), real(data, 4), held, data)


@pytest.mark.parametrize("seed", range(8))
def test_combinations(
    deepspeed: Dialect,
    real: Callable[..., Any],
    held: Callable[[Any], Mapping[str, Any]],
    seed: int,
) -> None:
    chance, accepted = random.Random(seed), 0
    paths = tuple(POOLS)
    for _ in range(400):
        size, world = chance.choice((1, 2, 3, 5, 8)), chance.choice((1, 2, 4, 8))
        data = _nested(_sample(chance, paths, size))
        ours, theirs = _ours(deepspeed, data, world), real(data, world)
        assert_agree(ours, theirs, held, data)
        if not isinstance(theirs, str):
            accepted += 1
            written = deepspeed.write(ours)
            assert deepspeed.read(written, version=RELEASE, world_size=world).given == ours.given
            assert_agree(ours, real(json.loads(written.text), world), held, data)
    assert 100 < accepted < 350


def test_batch_triangle(
    deepspeed: Dialect, real: Callable[..., Any], held: Callable[[Any], Mapping[str, Any]]
) -> None:
    sides = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    verdicts = set()
    for total in (None, 1, 4, 8, 12, 31):
        for micro in (None, 1, 2, 3):
            for steps in (None, 1, 2, 4):
                for world in (1, 2, 3, 8):
                    chosen = zip(sides, (total, micro, steps), strict=True)
                    data = {side: value for side, value in chosen if value is not None}
                    theirs = real(data, world)
                    verdicts.add(isinstance(theirs, str))
                    assert_agree(_ours(deepspeed, data, world), theirs, held, data)
    assert verdicts == {True, False}


@pytest.mark.parametrize(("path", "value", "why"), DIFFERENCES)
def test_differences(
    deepspeed: Dialect, real: Callable[..., Any], path: str, value: Any, why: str
) -> None:
    data = _nested({path: value, **BESIDE.get(path, {}), **{key: 2 for key in BASE if key != path}})
    assert not isinstance(real(data), str), why
    with pytest.raises(BridgeError) as raised:
        deepspeed.read(data, version=RELEASE, world_size=1)
    assert path.rpartition(".")[2] in str(raised.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("_comment", "hello"),
        ("fp8", {"enabled": True}),
        ("optimizer.kind", "AdamW"),
        ("scheduler.name", "WarmupLR"),
    ],
)
def test_keys_that_nobody_reads(
    deepspeed: Dialect,
    real: Callable[..., Any],
    held: Callable[[Any], Mapping[str, Any]],
    path: str,
    value: Any,
) -> None:
    data = _nested({path: value, **BASE})
    assert_agree(_ours(deepspeed, data, 1), real(data), held, data)
    assert held(real(data)) == held(real(BASE))


def test_to_object(deepspeed: Dialect) -> None:
    config = deepspeed.read(
        {"train_batch_size": 32, "gradient_accumulation_steps": 2}, version=RELEASE, world_size=8
    )
    assert config.to_object().train_micro_batch_size_per_gpu == 2
    piped = deepspeed.config(
        {"train_batch_size": 32, "gradient_accumulation_steps": 2, "code.pipeline_stages": 4},
        RELEASE,
        8,
    )
    assert piped.to_object().train_micro_batch_size_per_gpu == 8
    older = deepspeed.read({"train_batch_size": 32}, version="0.19.7", world_size=8)
    with pytest.raises(VersionError, match=r"0\.19\.7.*0\.19\.8"):
        older.to_object()
