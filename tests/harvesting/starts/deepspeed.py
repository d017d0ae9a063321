"""Starts the installed DeepSpeed's engine with a config, on one rank of the CPU and with a small
model, to see whether the engine stops.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest.mock import MagicMock, patch

from bridge.errors import ConfigError
from bridge.stack.dialect import Config
from compat.deepspeed.checks_view import MICRO, STEPS, TOTAL
from compat.deepspeed.formats import plain
from compat.deepspeed.live import release_of_package as release_of_package
from tests.harvesting.judges import deepspeed as real
from tests.harvesting.machine import judge

RANKS = (TOTAL, "sequence_parallel_size", "data_parallel_size")
"""Keys whose values are for all ranks. `real` checks them for the run's own number of ranks."""
LEFT_OUT = (*RANKS, *real.MONITORS)
"""Keys that are left out. Monitors need packages of their own."""
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
WIDTH = 8


def start(config: Config) -> None:
    """Build DeepSpeed's config for the run's ranks, and its engine on one rank. Raises `ConfigError`
    with the reason for which one of them stops.
    """
    question, _ = real.pose_config(config)
    if not {MICRO, TOTAL} & question["config"].keys():
        question["config"][MICRO] = 1  # the script's part, which the report asks for
    real.answer(question)
    values = config.effective
    data = {key: value for key, value in plain(config.given, {}).items() if key not in LEFT_OUT}
    data |= {MICRO: values.get(MICRO) or 1, STEPS: values.get(STEPS) or 1}
    try:
        with _alone():
            _engine(data, int(values["code.pipeline_stages"]) > 1)
    except Exception as error:
        judge(error)
        reason = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f"refused by DeepSpeed's engine: {type(error).__name__}: {reason}"
        ) from error


def _engine(data: Mapping[str, Any], is_pipeline: bool) -> None:
    import deepspeed
    from deepspeed.runtime.pipe.module import PipelineModule
    from torch import nn

    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    model = (
        PipelineModule(layers, num_stages=1, loss_fn=nn.MSELoss())
        if is_pipeline
        else nn.Sequential(*layers)
    )
    offloads = (data.get("zero_optimization") or {}).get("offload_optimizer") or {}
    on_cpu = offloads.get("device", "none") != "none"
    narrow = bool((data.get("bf16") or {}).get("bf16_optimizer_states"))
    client = partial(_on_cpu, fp32_optimizer_states=not narrow) if on_cpu else _client
    arguments = {} if data.get("optimizer") else {"optimizer": client}
    deepspeed.initialize(
        model=model,
        model_parameters=[*model.parameters()],
        config=dict(data),
        dist_init_required=False,
        **arguments,
    )


def _client(parameters: Any) -> Any:
    from torch import optim

    return optim.AdamW(parameters, lr=1e-3)


def _on_cpu(parameters: Any, **options: Any) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, lr=1e-3, **options)


@cache
def _group() -> None:
    """Make the process group of one rank, once for the program."""
    from torch import distributed

    place = os.path.join(tempfile.mkdtemp(), "store")
    distributed.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)


@contextmanager
def _alone() -> Iterator[None]:
    """Context of a run on one rank. Kernels are stand-ins: the engine is built, and trains nothing."""
    with patch.dict(os.environ, ALONE):
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops.op_builder.builder import OpBuilder
        from deepspeed.ops.op_builder.cpu.no_impl import NotImplementedBuilder

        _group()
        device = type(get_accelerator())
        # A GPU has kernels that a CPU lacks, such as Lion's.
        with (
            patch.object(OpBuilder, "load", lambda self, verbose=False: MagicMock()),
            patch.object(NotImplementedBuilder, "load", lambda self, verbose=True: MagicMock()),
            patch.object(device, "is_fp16_supported", lambda self: True),
        ):
            yield
