"""The functions and classes of the package `deepspeed` itself."""

from __future__ import annotations

from compat.deepspeed.runtime.dropin import add_config_arguments, initialize
from compat.deepspeed.runtime.engine import DeepSpeedEngine, PipelineEngine
from compat.deepspeed.runtime.names.accelerator import get_accelerator
from compat.deepspeed.runtime.names.communication import init_distributed
from compat.deepspeed.runtime.names.inference import InferenceEngine, init_inference
from compat.deepspeed.runtime.names.pipe import PipelineModule
from compat.deepspeed.runtime.names.settings import DeepSpeedConfig
from compat.deepspeed.runtime.names.transformer import (
    DeepSpeedTransformerConfig,
    DeepSpeedTransformerLayer,
)
from compat.deepspeed.runtime.names.utilities import (
    TORCH_DISTRIBUTED_DEFAULT_PORT,
    OnDevice,
    log_dist,
    logger,
)

__all__ = [
    "TORCH_DISTRIBUTED_DEFAULT_PORT",
    "DeepSpeedConfig",
    "DeepSpeedEngine",
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "InferenceEngine",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "add_config_arguments",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "log_dist",
    "logger",
]
