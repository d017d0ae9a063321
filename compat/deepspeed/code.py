"""Writes the settings of the training script (the code part of a config) as a mapping, as a short
script and as a launch command.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bridge.plan.section import nest
from bridge.stack.launch_command import nodes
from compat.deepspeed import schedule

FILE = "ds_config.json"
SCRIPT = "train.py"
GROUPS = "code.parameter_groups"
PASSES = 2
"""Number of calls of `backward` before each step in a script with manual accumulation
(`code.manual_accumulation`).
"""

Flat = Mapping[str, Any]


def settings(values: Flat) -> dict[str, Any]:
    """Return the values of the code part as nested mappings, without the leading `code`."""
    nested_values: dict[str, Any] = nest(
        {path: value for path, value in values.items() if path.startswith("code.")}
    )
    return dict(nested_values.get("code", {}))


def size(values: Flat, name: str) -> int:
    """Return the size `name` from the code part; 1 if the config does not set it."""
    return int(values.get(f"code.{name}") or 1)


def _has_pipeline(values: Flat) -> bool:
    return size(values, "pipeline_stages") > 1


def _needs_mpu(values: Flat) -> bool:
    """Return whether the script passes an mpu, an object with groups of ranks, to
    `deepspeed.initialize`. A script with pipeline stages does not, because a PipelineModule has its
    own mpu.
    """
    return not _has_pipeline(values) and (
        size(values, "tensor_parallel") > 1 or size(values, "context_parallel") > 1
    )


def script(values: Flat, world_size: int | None = None) -> str:
    """Return a short training script for the JSON file. The script calls functions that the user
    has to write.
    """
    # Before anything is built, because the first weights are drawn then.
    seed = values.get("code.seed")
    seed_lines = (
        []
        if seed is None
        else [f"torch.manual_seed({seed})  # the same seed; each stack draws in its own order"]
    )
    schedule_lines = [*schedule.lines(values), ""] if schedule.steers(values) else []
    model = [*_model_lines(values, world_size), *_checkpointing_lines(values)]
    parts = (_import_lines(values), seed_lines, schedule_lines, model, _start_lines(values))
    return "\n\n".join(text for text in map("\n".join, parts) if text) + "\n"


def _import_lines(values: Flat) -> Iterator[str]:
    standard = [
        *(["import json"] if values.get(GROUPS) else []),
        *(["import math"] if schedule.steers(values) else []),
    ]
    yield from (*standard, *(["from pathlib import Path"] if values.get(GROUPS) else []))
    if standard:
        yield ""
    yield "import deepspeed"
    if values.get("code.seed") is not None:
        yield "import torch"
    if schedule.steers(values):
        yield "from torch.optim.lr_scheduler import LambdaLR"
    if _has_pipeline(values):
        yield "from deepspeed.pipe import PipelineModule"
    if _has_pipeline(values) and size(values, "tensor_parallel") > 1:
        yield "from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology"


def _model_lines(values: Flat, world_size: int | None) -> Iterator[str]:
    if _has_pipeline(values):
        yield from _pipeline_lines(values, world_size)
    else:
        yield "model = build_model()  # your torch.nn.Module"
    if _needs_mpu(values):
        yield from _group_lines(values)
    if _needs_mpu(values) and size(values, "context_parallel") > 1:
        yield "# in the model: deepspeed.sequence.layer.DistributedAttention(attention, mpu.get_sequence_parallel_group())"
    experts = size(values, "expert_parallel")
    if experts > 1:
        yield f"# in the model: deepspeed.moe.layer.MoE(hidden_size, expert, num_experts, ep_size={experts})"
    automatic = int(values.get("tensor_parallel.autotp_size") or 0)
    if automatic > 1:
        # DeepSpeed compares the inputs of these ranks in the first
        # forward pass, and stops if they differ.
        yield "# every rank of a tensor group reads the same data"
        yield f"model = deepspeed.tp_model_init(model, tp_size={automatic}, dtype=dtype)"


def _group_lines(values: Flat) -> Iterator[str]:
    """Yield a line of the script that builds an mpu. A comment in the line lists the methods that
    DeepSpeed calls on the mpu (runtime/config.py; utils/groups.py).
    """
    sizes, kinds = [], []
    if size(values, "tensor_parallel") > 1:
        sizes.append(f"tensor={size(values, 'tensor_parallel')}")
        kinds.append("model")
    kinds.append("data")
    if size(values, "context_parallel") > 1:
        sizes.append(f"sequence={size(values, 'context_parallel')}")
        kinds += ["sequence", "sequence_data"]
    calls = ", ".join(f"get_{kind}_parallel_*" for kind in kinds)
    yield f"mpu = build_groups({', '.join(sizes)})  # Megatron-style: {calls}"


def _pipeline_lines(values: Flat, world_size: int | None) -> Iterator[str]:
    stages, tensor = size(values, "pipeline_stages"), size(values, "tensor_parallel")
    shape = f"num_stages={stages}"
    # With num_stages alone PipelineModule makes all other ranks data ranks.
    if tensor > 1:
        data = "data_ranks" if world_size is None else world_size // (stages * tensor)
        yield f"topology = PipeModelDataParallelTopology(num_pp={stages}, num_mp={tensor}, num_dp={data})"
        shape = "topology=topology"
    arguments = {
        "partition_method": repr(values.get("code.partition_method") or "parameters"),
        "activation_checkpoint_interval": values.get("pipeline.activation_checkpoint_interval")
        or 0,
    }
    yield "model = PipelineModule("
    yield "    layers=build_layers(),  # your layers, in order"
    yield f"    {shape},"
    yield "    loss_fn=loss_fn,"
    yield from (f"    {name}={value}," for name, value in arguments.items())
    yield ")"


def _checkpointing_lines(values: Flat) -> Iterator[str]:
    if values.get("code.checkpointing"):
        # The functions split saved activations over the tensor group, which they get from an mpu.
        mpu = "None"
        if _has_pipeline(values):
            mpu = "model.mpu()"
        elif _needs_mpu(values):
            mpu = "mpu"
        every = values.get("code.checkpoint_interval") or 1
        group = "layer" if every == 1 else f"{every} layers"
        yield f'deepspeed.checkpointing.configure({mpu}, deepspeed_config="{FILE}")'
        yield f"# in the model, for every {group}: deepspeed.checkpointing.checkpoint(layers, hidden)"


def _spares_norms(values: Flat) -> bool:
    """Return whether the script excludes biases and norms from weight decay. DeepSpeed's file has
    no key for this.
    """
    return values.get("code.decay_scope") == "matrices" and bool(
        values.get("optimizer.params.weight_decay")
    )


def groups(values: Flat) -> Iterator[str]:
    """Yield the lines that build the optimizer's parameter groups; none if all parameters are in
    one group.
    """
    if values.get(GROUPS):
        yield f"groups = json.loads(Path({json.dumps(values[GROUPS])}).read_text())  # names of parameters, and their settings"
        yield "named = dict(model.named_parameters())"
        yield 'groups = [{**group, "params": [named[name] for name in group["params"]]} for group in groups]'
    elif _spares_norms(values):
        yield "trained = [p for p in model.parameters() if p.requires_grad]"
        yield "groups = ["
        yield f'    {{"params": [p for p in trained if p.ndim > 1], "weight_decay": {values["optimizer.params.weight_decay"]}}},'
        yield '    {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},  # biases and norms'
        yield "]"


def _start_lines(values: Flat) -> Iterator[str]:
    yield from groups(values)
    yield "engine, optimizer, loader, scheduler = deepspeed.initialize("
    yield "    model=model,"
    if values.get(GROUPS) or _spares_norms(values):
        yield "    model_parameters=groups,"
    else:
        yield "    model_parameters=[p for p in model.parameters() if p.requires_grad],"
    if values.get("optimizer.type") is None:
        yield "    optimizer=build_optimizer,  # your optimizer: the file names none"
    if schedule.steers(values):
        yield "    lr_scheduler=lambda optimizer: LambdaLR(optimizer, lr_factor),"
    elif schedule.settings_of_code(values).get("name") == schedule.OTHER:
        yield "    lr_scheduler=build_scheduler,  # your schedule: stagebridge cannot translate it"
    if _needs_mpu(values):
        yield "    mpu=mpu,"
    yield f'    config="{FILE}",'
    yield ")"
    prefix = "code.trainer."
    for path in sorted(path for path in values if path.startswith(prefix)):
        yield f"# like the Trainer with {path.removeprefix(prefix)}={values[path]!r}"
    length = values.get("code.steps")
    per_token = values.get("code.loss") == "per_token"
    if per_token:
        yield "# the loss of a step is the mean over its tokens: `tokens` counts those of all ranks and micro batches"
    # A pipeline takes all micro batches of a step in one call.
    # Elsewhere `engine.step()` counts calls, and steps at the last.
    if _has_pipeline(values):
        if per_token:
            yield "# loss_fn: the sum over tokens * engine.dp_world_size * engine.micro_batches / tokens"
        yield "loss = engine.train_batch(iterator)" + (f"  # {length} times" if length else "")
    else:
        each = "# for each micro batch" + (f", until {length} steps are done" if length else "")
        # The engine divides by the micro batches, and by the ranks.
        mean = " * engine.dp_world_size * engine.gradient_accumulation_steps() / tokens"
        loss = f"engine(batch){mean if per_token else ''}"
        yield f"loss = {loss}; engine.backward(loss); engine.step()  {each}"


def launch(values: Flat, world_size: int | None) -> tuple[str, ...]:
    """Return the command that starts the script on `world_size` ranks."""
    return ("deepspeed", *_rank_options(values, world_size), SCRIPT, "--deepspeed_config", FILE)


def _rank_options(values: Flat, world_size: int | None) -> tuple[str, ...]:
    """Return the launcher's options for `world_size` ranks; empty if the number is not known.
    Without these options, the launcher uses every device of the machine.
    """
    if world_size is None:
        return ()
    # Two names of one option (launcher/runner.py); the second reads better where there is no GPU.
    flag = (
        "--num_gpus" if values.get("code.accelerator") in (None, "cuda") else "--num_accelerators"
    )
    count, each = nodes(world_size)
    several = ("--hostfile", "hostfile", "--num_nodes", str(count)) if count > 1 else ()
    return (*several, flag, str(each))


def environment(values: Flat) -> dict[str, str]:
    """Return the environment variables that the run needs."""
    accelerator = values.get("code.accelerator")
    return {"DS_ACCELERATOR": accelerator} if accelerator else {}
