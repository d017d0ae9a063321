"""Runs torch's FSDP2 as AutoModel does: sharded blocks, the recipe's optimizer and schedule, and a
loss per token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from bridge.checkpoint.groups import FILE, build_groups
from bridge.engine.comm import rank_and_world
from bridge.engine.environment import detect
from bridge.engine.formats import TORCH
from bridge.engine.interface import Workload
from bridge.engine.joining import join as join_group
from bridge.engine.loops import ShardedTrainer
from bridge.errors import BridgeError
from bridge.stack.dialect import Config
from bridge.translation.lift import lift

POLICY = "distributed.mp_policy."
HYPER = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "amsgrad")


def join() -> int:
    """Join the process group and return the number of ranks."""
    join_group(detect())
    return (rank_and_world() or (0, 1))[1]


class FullyShardedTrainer(ShardedTrainer):
    """Trains the native model of the workload as `config` says."""

    def __init__(self, config: Config, workload: Workload) -> None:
        BridgeError.raise_if(
            []
            if rank_and_world()
            else [
                "automodel: FSDP2 shards over ranks, but there is only one rank; start at least two"
            ]
        )
        self.values, self.workload = config.effective.flat(), workload
        super().__init__(lift(config), workload)

    def wrap(self, model: Any) -> Any:
        model.to(TORCH[self.plan.precision.master or "fp32"])
        mesh: DeviceMesh = init_device_mesh(self.device, (self.data[1],))
        formats = {
            name: self.values.get(f"{POLICY}{name}")
            for name in ("param_dtype", "reduce_dtype", "output_dtype")
        }
        dtypes = {name: TORCH[value] for name, value in formats.items() if value is not None}
        cast = bool(self.values.get(f"{POLICY}cast_forward_inputs", True))
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(**dtypes, cast_forward_inputs=cast),
        }
        # From the inside out: a module takes the parameters that none within it has taken.
        for block in _blocks(model):
            fully_shard(block, **options)
        fully_shard(model, **options)
        whole = [
            name for name, weight in model.named_parameters() if not isinstance(weight, DTensor)
        ]
        BridgeError.raise_if(f"{name}: FSDP2 did not shard this parameter" for name in whole)
        return model

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer that the recipe names, with the recipe's arguments."""
        make = getattr(torch.optim, str(self.values["optimizer._target_"]).rpartition(".")[2])
        settings = {
            name: self.values[f"optimizer.{name}"]
            for name in HYPER
            if f"optimizer.{name}" in self.values
        }
        parameters = dict(self.model.named_parameters())
        groups = (
            build_groups(self.workload.groups, parameters, FILE)
            if self.workload.groups
            else self.model.parameters()
        )
        return make(groups, **settings)  # type: ignore[no-any-return]

    def resume(self, place: Path) -> int:
        """Continue from a checkpoint of torch.distributed.checkpoint. The checkpoint must contain
        the model, the optimizer and the step.
        """
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
        load(state, checkpoint_id=str(place))
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.steps = int(state["step"])
        return self.steps


def _blocks(model: Any) -> list[nn.Module]:
    """Return the layers of a decoder. Each layer is sharded as a unit."""
    if isinstance(model, nn.Sequential):
        return list(model)[1:-1]
    return list(
        max(
            (module for module in model.modules() if isinstance(module, nn.ModuleList)),
            key=len,
            default=(),
        )
    )
