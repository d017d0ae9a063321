"""What the installed accelerate makes of a launch: its own parser, launcher and plugins, in a process of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch


class Launched(Exception):
    """The launcher would start the processes now."""


def ask(
    flags: list[str] | None,
    config: Mapping[str, Any] | None,
    environment: Mapping[str, str],
    gpus: int,
    folder: str,
    call: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the fields after `Accelerator(**call)` of a launch on a machine with `gpus` GPUs, or `stops` with the reason.

    Without `flags`, torchrun starts a rank for each GPU.
    """
    _import_all()
    read, write = os.pipe()
    if pid := os.fork():
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        os.waitpid(pid, 0)
        found: dict[str, Any] = json.loads(text)
        return found
    try:
        os.close(read)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            found = _launch(flags, config, environment, gpus, folder, call or {})
        except BaseException as error:
            found = {"stops": f"{type(error).__name__}: {error}"}
        with os.fdopen(write, "w") as pipe:
            json.dump(found, pipe, default=str)
    finally:
        os._exit(0)


@cache
def _import_all() -> None:
    """Import what a launch needs before the fork, which then is cheap."""
    from importlib import import_module

    for name in (
        "accelerate.commands.launch",
        "accelerate.utils.deepspeed",
        "deepspeed.launcher.runner",
        "torch.distributed.device_mesh",
        "torch.distributed.fsdp",
        "torch.distributed.run",
        "torch.testing._internal.distributed.fake_pg",
        "transformers.integrations.deepspeed",
        "transformers.integrations",
    ):
        import_module(name)


def _launch(
    flags: list[str] | None,
    config: Any,
    environment: Mapping[str, str],
    gpus: int,
    folder: str,
    call: Mapping[str, Any],
) -> dict[str, Any]:
    import torch
    import torch.distributed.run as runner
    from accelerate.commands import launch
    from accelerate.commands.launch import launch_command, launch_command_parser

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(
        {"PATH": "/usr/bin", "HF_HOME": folder, "MKL_NUM_THREADS": "1", **environment}
    )
    words = list(flags or ())
    if config is not None:
        with open("config.yaml", "w") as file:
            json.dump(config, file)
        words = ["--config_file", "config.yaml", *words]
    seen: dict[str, Any] = {}

    def run(args: Any) -> None:
        if int(args.nproc_per_node) < 1:
            raise AssertionError("no process")
        seen.update(environment=dict(os.environ), args=args)
        raise Launched

    def start(command: Any, env: Mapping[str, str]) -> None:
        # DeepSpeed's launcher starts the ranks of several machines, which are two here.
        many = command[0] == "deepspeed" and command[command.index("--num_gpus") + 1]
        args = SimpleNamespace(nproc_per_node=many, nnodes=2) if many else None
        seen.update(environment=dict(env), args=args)
        raise Launched

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.object(torch.cuda, "is_available", lambda: gpus > 0))
        enter(patch.object(torch.cuda, "device_count", lambda: gpus))
        enter(patch.object(torch.cuda, "current_device", lambda: 0))
        enter(patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)))
        for place in ("accelerate.commands.launch", "accelerate.accelerator"):
            enter(patch(f"{place}.is_bf16_available", lambda *_: True))
        enter(patch("accelerate.utils.dataclasses.is_cuda_available", lambda: gpus > 0))
        enter(patch("accelerate.accelerator.is_megatron_lm_available", lambda: True))
        for place in ("accelerate.commands.launch", "accelerate.state"):
            enter(patch(f"{place}.check_cuda_p2p_ib_support", lambda: True))
        enter(patch("accelerate.utils.launch.is_port_in_use", lambda _: False))
        enter(patch("accelerate.utils.launch.get_free_port", lambda: 45678))
        for name in ("get_grad_scaler", "get_fsdp2_grad_scaler"):
            enter(patch(f"accelerate.accelerator.{name}", lambda *_, **__: None))
        enter(patch.object(runner, "run", run))
        enter(patch.object(launch.subprocess, "Popen", start))
        if flags is None:
            return _accelerate(SimpleNamespace(nproc_per_node=gpus, nnodes=1), gpus, stack, call)
        sys.argv = ["accelerate-launch", *words, "train.py"]
        with suppress(Launched):
            launch_command(launch_command_parser().parse_args([*words, "train.py"]))
        os.environ.clear()
        os.environ.update(seen["environment"])
        return _accelerate(seen["args"], gpus, stack, call)


def _accelerate(args: Any, gpus: int, stack: ExitStack, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Accelerator(**call)` in the environment that the launcher has set."""
    import torch
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

    enter = stack.enter_context
    world = 1
    if args is not None:
        world = int(args.nproc_per_node) * int(str(args.nnodes).partition(":")[0])
        os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    # Another test may have left its state in the process from which this one was forked.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    init = torch.distributed.init_process_group

    def fake(*_: Any, **__: Any) -> None:
        if args is None:
            raise ValueError("environment variable RANK expected, but not set")
        init(
            backend="fake",
            rank=0,
            world_size=world,
            store=torch.testing._internal.distributed.fake_pg.FakeStore(),
        )

    def device(self: Any) -> None:
        self.device = torch.device("cpu")

    enter(patch.object(torch.distributed, "init_process_group", fake))
    enter(patch("accelerate.state.set_numa_affinity", lambda _: None))
    enter(patch.object(PartialState, "set_device", device))
    import deepspeed

    enter(patch.object(deepspeed.comm, "is_initialized", torch.distributed.is_initialized))
    enter(patch.object(deepspeed.comm, "init_distributed", fake))
    own = Accelerator(**call)
    state = own.state
    dynamo = state.dynamo_plugin
    found: dict[str, Any] = {
        "distributed_type": state.distributed_type.value,
        "num_processes": own.num_processes,
        "mixed_precision": own.mixed_precision,
        "gradient_accumulation_steps": own.gradient_state.num_steps,
        "cpu": state._cpu,
        "debug": state.debug,
        "dynamo_backend": dynamo.backend.value,
        "dynamo.mode": dynamo.mode,
        "dynamo.fullgraph": dynamo.fullgraph,
        "dynamo.dynamic": dynamo.dynamic,
        "dynamo.use_regional_compilation": getattr(dynamo, "use_regional_compilation", None),
        "device_ids": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    kind = found["distributed_type"]
    if kind == "FSDP":
        found |= {f"fsdp.{name}": value for name, value in _fsdp(state.fsdp_plugin).items()}
    if kind == "MEGATRON_LM":
        own_args = state.megatron_lm_plugin.megatron_lm_default_args
        found |= {f"megatron_lm.{name}": value for name, value in own_args.items()}
    if kind == "DEEPSPEED":
        plugin = state.deepspeed_plugin
        names = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
                 "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path",
                 "zero3_save_16bit_model", "zero3_init_flag")  # fmt: skip
        found |= {f"deepspeed.{name}": getattr(plugin, name, None) for name in names}
        for half in ("fp16", "bf16"):
            found[f"deepspeed.deepspeed_config.{half}.enabled"] = plugin.deepspeed_config[half][
                "enabled"
            ]
    sizes = getattr(own, "parallelism_config", None)
    if sizes is not None:
        names = (
            "dp_replicate_size",
            "dp_shard_size",
            "tp_size",
            "cp_size",
            "sp_size",
            "cp_backend",
            "sp_backend",
        )
        found |= {f"parallelism.{name}": getattr(sizes, name, None) for name in names}
    return found


def _fsdp(plugin: Any) -> dict[str, Any]:
    names = ("fsdp_version", "ignored_modules", "use_orig_params", "sync_module_states", "forward_prefetch",
             "activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading",
             "transformer_cls_names_to_wrap", "min_num_params", "reshard_after_forward")  # fmt: skip
    found = {name: getattr(plugin, name, None) for name in names}
    for name in ("sharding_strategy", "backward_prefetch", "state_dict_type"):
        value = getattr(plugin, name, None)
        found[name] = getattr(value, "name", value)
    policy = plugin.auto_wrap_policy
    found["auto_wrap_policy"] = getattr(policy, "__name__", policy)
    found["cpu_offload"] = getattr(
        plugin.cpu_offload, "offload_params", "CPU" in type(plugin.cpu_offload).__name__
    )
    mixed = plugin.mixed_precision_policy
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype") if mixed else ():
        if (value := getattr(mixed, name, None)) is not None:
            found[f"mixed_precision_policy.{name}"] = str(value).removeprefix("torch.")
    return found
