"""Asks the installed DeepSpeed which values it reads from a config. A question is a dictionary of
plain data. The answer has values by the paths of our schema.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bridge.plan.section import nest
from bridge.stack.dialect import Config
from compat.deepspeed import live
from compat.deepspeed.batch import ranks
from compat.deepspeed.formats import plain

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
    "graph_harvesting",
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
SINGLE = {
    "use_data_before_expert_parallelism": "use_data_before_expert_parallel_",
    "optimizer.type": "optimizer_name",
    "optimizer.legacy_fusion": "optimizer_legacy_fusion",
    "scheduler.type": "scheduler_name",
    "checkpoint.load_universal": "load_universal_checkpoint",
    "checkpoint.use_node_local_storage": "use_node_local_storage",
    "checkpoint.parallel_write.pipeline_stage": "checkpoint_parallel_write_pipeline",
    "torch_autocast.enabled": "torch_autocast_enabled",
    "torch_autocast.dtype": "torch_autocast_dtype",
    "torch_autocast.lower_precision_safe_modules": "torch_autocast_lower_precision_safe_modules",
    "data_efficiency.enabled": "data_efficiency_enabled",
    "data_types.grad_accum_dtype": "grad_accum_dtype",
    "data_types.param_dtype": "param_dtype",
    "data_types.buffer_dtype": "buffer_dtype",
    "data_types.keep_in_fp32_modules": "keep_in_fp32_modules",
    "fp16.enabled": "fp16_enabled",
    "fp16.fp16_master_weights_and_grads": "fp16_master_weights_and_gradients",
    "bf16.enabled": "bfloat16_enabled",
    "bf16.immediate_grad_update": "bfloat16_immediate_grad_update",
}
"""Attributes of DeepSpeedConfig that hold a single setting, by the setting's path. Releases before
0.17.1 store settings of fp16 and bf16 in this way; later releases have an object for each section.
"""
SCALING = {
    "fp16.loss_scale_window": "scale_window",
    "fp16.min_loss_scale": "min_scale",
    "fp16.hysteresis": "delayed_shift",
    "fp16.consecutive_hysteresis": "consecutive_hysteresis",
}
"""Maps settings of fp16 to the names that the loss scaler's arguments have in releases before
0.17.1.
"""
MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
FREE = (
    "arg_mappings",
    "model_info",
    "partition_config",
    "quantized_initialization",
    "post_init_quant",
)
"""Names of keys whose value is a free-form mapping and not a section with keys of its own."""
DTYPES = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16"}


LOOSER = ""
"""Pattern for our messages about configs that we refuse although DeepSpeedConfig accepts them. The
empty pattern matches every message, because DeepSpeedConfig ignores unknown keys, and DeepSpeed's
engine refuses other configs only later.
"""
ENGINE = ("optimizer.params.adam_w_mode", "optimizer.params.weight_decay")
"""Settings that the engine overrides when it builds the optimizer. The config object still has the
given values.
"""


def pose_config(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two things about a config: the question to ask DeepSpeed, and the values that we
    expect in the answer.
    """
    sizes = ranks(config.effective, config.version, config.world_size)
    question = {
        "config": plain(config.given, {}),
        "ranks": sizes.dividing,
        "world": config.world_size,
        "code": nest(_code(config.given)).get("code", {}),
    }
    values = {path: value for path, value in config.effective.items() if path not in ENGINE}
    for path, value in values.items():
        # DeepSpeed's config object keeps a folder as a path, which drops a slash at its end.
        if path.endswith(".nvme_path") and value is not None:
            values[path] = str(Path(value))
    return question, values


def _code(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in settings.items() if path.startswith("code.")}


def raw(source: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return the question about the unchecked config `source`, asked for as many ranks as `config`
    has.
    """
    question, _ = pose_config(config)
    read = {name: value for name, value in source.items() if name != "code"}
    return {**question, "config": read, "code": source.get("code", {})}


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, by path, that the installed DeepSpeed reads from the config in `question`.
    Raises `ConfigError` with DeepSpeed's reason if DeepSpeed refuses the config.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with _accelerator(question["code"].get("accelerator") or "cpu"):
        return values_by_path(live.real(dict(question["config"]), int(question["ranks"])))


@contextmanager
def _accelerator(name: str) -> Iterator[None]:
    """Context in which DeepSpeed assumes an accelerator with the name `name`."""
    from deepspeed.accelerator import get_accelerator

    with patch.object(type(get_accelerator()), "device_name", lambda self, index=None: name):
        yield


def release_of_package() -> str:
    """Return the installed release. Raises `VersionError` if DeepSpeed is not installed."""
    return live.release_of_package()


def values_by_path(config: Any) -> dict[str, Any]:
    """Return the values, by path, in DeepSpeed's config object, which may be from any release in
    our tables. Values that the object does not store are left out.
    """
    names = dict(zip(TOP, TOP, strict=True)) | SINGLE
    values = {
        path: _plain(getattr(config, name)) for path, name in names.items() if hasattr(config, name)
    }
    for attribute, section in MODELS.items():
        model = getattr(config, attribute, None)
        values.update(_flat(model.model_dump(by_alias=True) if model is not None else {}, section))
    for attribute, section in OBJECTS.items():
        values.update(_flat(vars(getattr(config, attribute, _Nothing())), section))
    for attribute, section in DICTS.items():
        values.update(_flat(getattr(config, attribute, {}), section))
    for name in MONITORS:
        values.update(_flat(getattr(config.monitor_config, name).model_dump(), name))
    values |= _flat(config.optimizer_params or {}, "optimizer.params")
    values |= _flat(config.scheduler_params or {}, "scheduler.params")
    return values | _scaling(config) | _rest(config)


class _Nothing:
    """Stands for an object that the release's config does not have."""

    def __init__(self) -> None: ...


def _scaling(config: Any) -> dict[str, Any]:
    """Return the settings of loss scaling that the config object of a release before 0.17.1 stores.
    The result is empty without fp16. It has the settings of a dynamic scale only if the config sets
    at least one of these settings.
    """
    if not getattr(config, "fp16_enabled", False):
        return {}
    dynamic = config.dynamic_loss_scale_args or {}
    settings = {path: dynamic[name] for path, name in SCALING.items() if name in dynamic}
    power = (
        {"fp16.initial_scale_power": dynamic["init_scale"].bit_length() - 1}
        if "init_scale" in dynamic
        else {}
    )
    return (
        settings
        | power
        | {"fp16.loss_scale": config.loss_scale, "fp16.auto_cast": config.fp16_auto_cast}
    )


def _rest(config: Any) -> dict[str, Any]:
    values = {"data_efficiency.seed": config.data_efficiency_config["seed"]}
    if config.comms_config.comms_logger_enabled:
        logger = config.comms_config.comms_logger
        values |= _flat(
            logger.model_dump() if hasattr(logger, "model_dump") else vars(logger), "comms_logger"
        )
    return values


def _flat(data: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in data.items():
        path = f"{prefix}.{name}"
        inner = isinstance(value, Mapping) and not path.endswith(FREE)
        values.update(_flat(value, path) if inner else {path: _plain(value)})
    return values


def _plain(value: Any) -> Any:
    if str(value) in DTYPES:
        return DTYPES[str(value)]
    return list(value) if isinstance(value, tuple) else value
