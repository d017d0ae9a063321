"""Runs torch's FSDP2 as AutoModel does: sharded blocks, the recipe's optimizer and schedule, and a
loss per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from bridge.checkpoint.groups import FILE, build_groups
from bridge.engine.comm import everyones, rank_and_world
from bridge.engine.environment import detect
from bridge.engine.formats import TORCH
from bridge.engine.interface import Step, Workload
from bridge.engine.joining import join as join_group
from bridge.engine.layers import logits_in
from bridge.engine.learning_rate import learning_rate
from bridge.engine.loops import memory_bytes, norm_of, wholes
from bridge.engine.models.dense import model_to_train
from bridge.engine.models.gpt import sum_cross_entropy
from bridge.engine.rows import IGNORED, Batch
from bridge.errors import BridgeError
from bridge.stack.dialect import Config
from bridge.translation.lift import lift

POLICY = "distributed.mp_policy."
HYPER = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "amsgrad")


def join() -> int:
    """Join the process group and return the number of ranks."""
    join_group(detect())
    return (rank_and_world() or (0, 1))[1]


class FullyShardedTrainer:
    """Trains the native model of the workload as `config` says.

    `bridge.engine.interface.Trainer` documents the methods.
    """

    def __init__(self, config: Config, workload: Workload) -> None:
        BridgeError.raise_if(
            []
            if rank_and_world()
            else [
                "automodel: FSDP2 shards over ranks, but there is only one rank; start at least two"
            ]
        )
        self.values, self.plan = config.effective.flat(), lift(config)
        self.data = rank_and_world() or (0, 1)
        self.micro = self.plan.batch.micro or workload.micro
        whole = (self.plan.batch.global_ or self.micro * self.data[1]) // (
            self.micro * self.data[1]
        )
        self.accumulation = self.plan.batch.accumulation or max(1, whole)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = self._sharded(
            model_to_train(workload).to(self.device, TORCH[self.plan.precision.master or "fp32"])
        )
        self.workload = workload
        self.optimizer = self._optimizer()
        usual = self.optimizer.defaults["lr"] or 1.0
        self._ratios = [
            group["lr"] / usual if self.workload.groups else 1.0
            for group in self.optimizer.param_groups
        ]
        self.steps = 0

    def _sharded(self, model: Any) -> nn.Module:
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
        return model  # type: ignore[no-any-return]

    def _optimizer(self) -> torch.optim.Optimizer:
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

    def train_batch(self, batches: Iterable[Batch]) -> Step:
        """Run one step as AutoModel's loop does: losses are summed over tokens, and divided by the
        number of tokens on all ranks in all microbatches.
        """
        microbatches = [
            (tokens.to(self.device), targets.to(self.device))
            for tokens, targets in islice(batches, self.accumulation)
        ]
        counts = everyones(sum(int((targets != IGNORED).sum()) for _, targets in microbatches))
        lr = learning_rate(self.plan.optimizer.lr or 0.0, self.plan.optimizer.schedule, self.steps)
        total = 0.0
        for number, (tokens, targets) in enumerate(microbatches):
            # Gradients are reduced once a step, with its last microbatch.
            self.model.set_requires_gradient_sync(number == len(microbatches) - 1)  # type: ignore[operator]
            loss, _ = sum_cross_entropy(logits_in(self.model(tokens)), targets)
            # FSDP2 averages over data ranks: times their number it is a sum, which the tokens of
            # all ranks divide.
            torch.autograd.backward(loss * self.data[1] / sum(counts))
            total += float(loss)
        norm = norm_of(self.model.parameters(), self.plan.optimizer.clip)
        for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = lr * ratio
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return Step(sum(everyones(total)) / sum(counts), norm, lr * self._ratios[0])

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

    def weights(self) -> Mapping[str, Tensor]:
        """Return all weights on every rank."""
        return wholes(self.model)

    def bytes(self) -> Mapping[str, int]:
        return memory_bytes(self.model, self.optimizer)

    def close(self) -> None:
        """Does nothing, because the trainer opens only the default process group, which stays open."""


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
