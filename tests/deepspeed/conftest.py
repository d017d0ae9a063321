"""Fixtures for the DeepSpeed dialect: the dialect, the real DeepSpeedConfig, and what such an object holds by path."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import compat
from bridge.dialect import Dialect
from bridge.errors import ConfigError


@pytest.fixture(scope="session")
def deepspeed() -> Dialect:
    """The dialect under test."""
    return compat.load("deepspeed")


@pytest.fixture(scope="session")
def real() -> Callable[[dict[str, Any], int], Any]:
    """Builds the real DeepSpeedConfig of a mapping at a data-parallel size, or returns the message of its refusal."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    pytest.importorskip("deepspeed")
    from compat.deepspeed.live import real as build

    def built(data: dict[str, Any], ranks: int = 1) -> Any:
        try:
            return build(data, ranks)
        except ConfigError as error:
            return str(error)

    return built


@pytest.fixture(scope="session")
def held() -> Callable[[Any], dict[str, Any]]:
    """What a real DeepSpeedConfig holds, by the dialect's paths."""
    return _held


TOP = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "managed_gradient_accumulation",
    "steps_per_print",
    "dump_state",
    "disable_python_gc",
    "disable_allgather",
    "communication_data_type",
    "seq_parallel_communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "gradient_allreduce_op",
    "gradient_clipping",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dataloader_drop_last",
    "log_level",
)
MODELS = {
    "zero_config": "zero_optimization",
    "float16_config": "fp16",
    "bfloat16_config": "bf16",
    "hybrid_engine": "hybrid_engine",
    "compile_config": "compile",
    "timers_config": "timers.throughput",
    "tensor_parallel_config": "tensor_parallel",
    "weight_quantization_config": "weight_quantization",
}
OBJECTS = {
    "activation_checkpointing_config": "activation_checkpointing",
    "flops_profiler_config": "flops_profiler",
    "autotuning_config": "autotuning",
    "expert_parallel_config": "expert_parallel",
}
DICTS = {"pipeline": "pipeline", "aio_config": "aio", "checkpoint_config": "checkpoint"}
DATA_TYPES = ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules")


def _held(config: Any) -> dict[str, Any]:
    found = {name: _plain(getattr(config, name)) for name in TOP}
    found["use_data_before_expert_parallelism"] = config.use_data_before_expert_parallel_
    for attribute, section in MODELS.items():
        model = getattr(config, attribute)
        found.update(_flat(model.model_dump(by_alias=True) if model is not None else {}, section))
    for attribute, section in OBJECTS.items():
        found.update(_flat(vars(getattr(config, attribute)), section))
    for attribute, section in DICTS.items():
        found.update(_flat(getattr(config, attribute), section))
    for name in ("tensorboard", "wandb", "csv_monitor", "comet"):
        found.update(_flat(getattr(config.monitor_config, name).model_dump(), name))
    found.update(_flat({name: getattr(config, name) for name in DATA_TYPES}, "data_types"))
    return found | _optimizer(config) | _checkpoint(config) | _rest(config)


def _optimizer(config: Any) -> dict[str, Any]:
    found = {"optimizer.type": config.optimizer_name, "scheduler.type": config.scheduler_name}
    found["optimizer.legacy_fusion"] = config.optimizer_legacy_fusion
    found |= _flat(config.optimizer_params or {}, "optimizer.params")
    return found | _flat(config.scheduler_params or {}, "scheduler.params")


def _checkpoint(config: Any) -> dict[str, Any]:
    return {
        "checkpoint.load_universal": config.load_universal_checkpoint,
        "checkpoint.use_node_local_storage": config.use_node_local_storage,
        "checkpoint.parallel_write.pipeline_stage": config.checkpoint_parallel_write_pipeline,
    }


def _rest(config: Any) -> dict[str, Any]:
    found = {
        "torch_autocast.enabled": config.torch_autocast_enabled,
        "torch_autocast.dtype": _plain(config.torch_autocast_dtype),
        "torch_autocast.lower_precision_safe_modules": config.torch_autocast_lower_precision_safe_modules,
        "data_efficiency.enabled": config.data_efficiency_enabled,
        "data_efficiency.seed": config.data_efficiency_config["seed"],
    }
    if config.comms_config.comms_logger_enabled:
        found |= _flat(config.comms_config.comms_logger.model_dump(), "comms_logger")
    return found


def _flat(data: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in data.items():
        path = f"{prefix}.{name}"
        inner = isinstance(value, Mapping) and not path.endswith(FREE)
        found.update(_flat(value, path) if inner else {path: _plain(value)})
    return found


FREE = ("arg_mappings", "model_info", "partition_config", "quantized_initialization", "post_init_quant")
DTYPES = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16"}


def _plain(value: Any) -> Any:
    if str(value) in DTYPES:
        return DTYPES[str(value)]
    return list(value) if isinstance(value, tuple) else value
