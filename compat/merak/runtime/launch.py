"""`Merak.init`: sets the sizes of a run's axes for the ranks that the launcher started. Source:
Merak/initialize.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from bridge.engine import comm
from bridge.engine.environment import detect
from bridge.errors import BridgeError, ConfigError
from bridge.layout.tensor import TensorPlan

__all__ = ["init", "init_empty_weights", "print_rank_0", "set_tp_layer_lists"]


@dataclass
class LaunchSettings:
    """Settings from calls of `init` and `set_tp_layer_lists`, stored until the script builds a
    trainer.
    """

    sizes: dict[str, int] | None = None
    lists: TensorPlan | None = None


RUN = LaunchSettings()


def init(pp: int, tp: int, dp: int, sp: int = 1, backend: str = "nccl") -> None:
    """Join the process group with the given numbers of pipeline, tensor and data ranks.

    As in Merak, the communication backend follows from the device. Raises `ConfigError` if the
    numbers do not fit the ranks.
    """
    environment = detect()
    rank, world = comm.rank_and_world() or (environment.rank, environment.world)
    if pp * tp * dp * sp != world:
        raise ConfigError(
            f"init: pp x tp x dp x sp is {pp * tp * dp * sp}, and the launcher started {world} ranks; make both numbers equal"
        )
    if sp > 1:
        raise ConfigError(
            f"init: found sp={sp}; the engine has no axis for parts of the sequence; use sp=1"
        )
    if comm.rank_and_world() is None:
        comm.connect(
            rank, world, environment.address, "nccl" if torch.cuda.is_available() else "gloo"
        )
    RUN.sizes, RUN.lists = {"pp": pp, "tp": tp, "dp": dp, "sp": sp}, None


def sizes() -> dict[str, int]:
    """Return the mesh sizes that the script passed to `init`. Raises `BridgeError` if the script
    did not call `init`.
    """
    if RUN.sizes is None:
        raise BridgeError(
            "MerakTrainer: the sizes of the run are not set; call init(pp, tp, dp) first"
        )
    return RUN.sizes


def set_tp_layer_lists(
    col_para_list: Sequence[str] | None = None,
    row_para_list: Sequence[str] | None = None,
    conv_para_list: Sequence[str] | None = None,
    input_output_mapping: Sequence[tuple[float, float, str]] | None = None,
    weight_change_list: Sequence[tuple[str, int]] | None = None,
    tp_attr_list: Sequence[str] | None = None,
) -> None:
    """Set how tensor ranks split layers. `col_para_list` and `row_para_list` have substrings of the
    layers' names. Before training, the split model is compared with the whole model on a few
    tokens.
    """
    if conv_para_list:
        raise ConfigError(
            "set_tp_layer_lists: found conv_para_list, but the engine splits only linear layers;"
            " leave it out"
        )
    if not ((col_para_list and row_para_list) or weight_change_list or input_output_mapping):
        raise ConfigError(
            "set_tp_layer_lists: found no list, expected col_para_list and row_para_list, or a mapping"
        )
    shapes: Any = tuple(
        (first, second, WAYS[way]) for first, second, way in input_output_mapping or ()
    )
    RUN.lists = TensorPlan(
        columns=tuple(col_para_list or ()),
        rows=tuple(row_para_list or ()),
        shapes=shapes,
        weights=tuple((name, dimension) for name, dimension in weight_change_list or ()),
        attributes=tuple(tp_attr_list or ()),
    )


WAYS = {"col": "column", "row": "row", "column": "column"}


def print_rank_0(message: str) -> None:
    """Print a message on the first rank."""
    if (comm.rank_and_world() or (0, 1))[0] == 0:
        print(message, flush=True)


def init_empty_weights(include_buffers: bool = False) -> Any:
    """Return a context manager that does nothing, because every rank builds the whole model and keeps
    only the layers of its stages.
    """
    return nullcontext()
