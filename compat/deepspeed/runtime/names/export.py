"""`deepspeed.utils.zero_to_fp32`: reads the whole state dictionary in fp32 from a checkpoint of the
native engine or of DeepSpeed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bridge.checkpoint.folder_lock import find_folder
from bridge.checkpoint.formats import read_checkpoint
from bridge.errors import BridgeError, SourceError

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]
NAME = "pytorch_model.bin"


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return all parameters and buffers of a checkpoint on the CPU, by name. The value of a
    parameter is its most precise copy in the checkpoint, and a tied parameter appears under each
    name. No pickle is executed.
    """
    hub = read_checkpoint(find_folder(Path(checkpoint_dir), tag))
    frozen = {
        name
        for name, value in hub.parameters.items()
        if exclude_frozen_parameters and not value.trained
    }
    entries = {
        name: value.best.whole().float()
        for name, value in hub.parameters.items()
        if name not in frozen
    }
    entries.update((name, value.whole()) for name, value in hub.buffers.items())
    entries.update((alias, entries[name]) for alias, name in hub.ties.items() if name in entries)
    return entries


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: Any = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the whole fp32 state dictionary of a checkpoint into one file in `output_dir`."""
    if safe_serialization:
        raise BridgeError(
            "convert_zero_checkpoint_to_fp32_state_dict: found safe_serialization=True; to write"
            f" safetensors, run stagebridge checkpoint convert {checkpoint_dir} --to safetensors"
        )
    from compat.deepspeed.runtime.engine import write

    write(
        get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters),
        Path(output_dir),
        NAME,
    )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Return the model on the CPU with the weights of a checkpoint. Raises `SourceError` if the
    checkpoint lacks a parameter or buffer of the model.
    """
    values = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    with torch.no_grad():
        missing = model.cpu().load_state_dict(values, strict=False).missing_keys
    SourceError.raise_if(
        f"{checkpoint_dir}: the checkpoint lacks {name}, which the model has; load the checkpoint"
        " into the model that wrote it"
        for name in missing
    )
    return model
