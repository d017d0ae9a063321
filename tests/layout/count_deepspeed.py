"""Prints, as JSON, the bytes of tensors that DeepSpeed has for a small model on two ranks, by ZeRO stage.

Arguments: the rank, a file for the meeting of the ranks, and the number format.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist

from tests.layout.count_memory import config_of, model_of

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def bytes_of(tensors: Iterable[Any], known: set[int]) -> int:
    """Bytes of the storages of tensors that are not `known`, which know them from then on."""
    size = 0
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            size += storage.nbytes()
    return size


GRADIENTS = (
    "fp32_groups_gradients_flat",
    "averaged_gradients",
    "all_grad_tensors",
    "grad_partitions_flat_buffer",
)
"""Attributes of DeepSpeed's optimizers that hold gradients until the step."""


def flatten(value: Any) -> list[Any]:
    """All tensors within lists and dictionaries."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in flatten(part)]
    return [value]


def count(stage: int, dtype: str) -> dict[str, int]:
    """Bytes by kind: weights, masters and moments after a step, and gradients before it."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, "overlap_comm": False},
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
    }
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(
        model=model_of(config_of("llama"), torch.float32, "eager"), config=config
    )
    ids = torch.randint(0, 102, (1, 16))
    for step in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        if step == 0:
            engine.step()
    known: set[int] = set()
    found = {}
    parameters = list(engine.module.parameters())
    weights = [getattr(one, "ds_tensor", one) for one in parameters]
    found["weights"] = bytes_of(weights, known)
    found["weights whole"] = bytes_of(parameters, known)
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    groups = [one for group in inner.param_groups for one in group["params"]]
    masters = [
        *groups,
        *getattr(optimizer, "fp32_partitioned_groups_flat", ()),
        *getattr(optimizer, "single_partition_of_fp32_groups", ()),
        *getattr(optimizer, "fp32_groups_flat_partition", ()),
        *getattr(optimizer, "fp32_groups_flat", ()),
    ]
    found["master"] = bytes_of(masters, known)
    moments = [
        value
        for state in inner.state.values()
        for name, value in state.items()
        if name.startswith("exp_avg")
    ]
    found["moments"] = bytes_of(moments, known)
    found["written"] = bytes_of((one.grad for one in (*parameters, *groups)), known)
    kept = [getattr(optimizer, name, None) for name in GRADIENTS]
    found["gradients"] = bytes_of(flatten(kept), known)
    found["elements"] = sum(getattr(one, "ds_numel", one.numel()) for one in parameters)
    return found


def main() -> None:
    """Print the figures of all stages."""
    rank, meeting, dtype = sys.argv[1:]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", f"file://{meeting}", rank=int(rank), world_size=2)
    # Its collectives in shared memory would be compiled, and only inference calls them.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    found: dict[str, Any] = {str(stage): count(stage, dtype) for stage in range(4)}
    found["config"] = json.loads(config_of("llama").to_json_string(use_diff=False))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
