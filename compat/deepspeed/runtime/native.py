"""Trains with the native engine behind DeepSpeed's interface. The engine gets the same model, groups
and settings as DeepSpeed itself gets in the module `trainers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from torch import Tensor

from bridge.engine.comm import everyones
from bridge.engine.environment import detect
from bridge.engine.interface import Step, Workload
from bridge.engine.joining import join
from bridge.engine.layers import logits_in
from bridge.engine.models.dense import native
from bridge.engine.models.gpt import mean_cross_entropy
from bridge.engine.rows import Batch
from bridge.errors import BridgeError
from compat.deepspeed import DeepSpeedConfig
from compat.deepspeed.runtime.dropin import initialize
from compat.deepspeed.runtime.trainers import (
    build_optimizer,
    decay_groups,
    exact,
    restore,
    scheduler_of,
    settings,
)


class DropInTrainer:
    """Trains a workload's model as a DeepSpeed config says. `bridge.engine.interface.Trainer` documents the
    methods.
    """

    def __init__(self, config: DeepSpeedConfig, workload: Workload) -> None:
        join(detect())
        model = native(workload)
        buffers = exact(model) if workload.folder else {}
        self.engine, *_ = initialize(
            model=model,
            model_parameters=decay_groups(model, config, workload),
            optimizer=None if config.effective.get("optimizer.type") else build_optimizer,
            lr_scheduler=scheduler_of(config),
            config=settings(config, workload),
        )
        restore(self.engine.module, buffers)
        self.data = (self.engine.native.data.index, self.engine.native.data.size)
        self.micro, self.accumulation = (
            self.engine.train_micro_batch_size_per_gpu(),
            self.engine.gradient_accumulation_steps(),
        )

    def train_batch(self, batches: Iterable[Batch]) -> Step:
        engine, total = self.engine, 0.0
        lr, scale = engine.get_lr()[0], engine.cur_scale
        for tokens, targets in islice(batches, self.accumulation):
            loss = mean_cross_entropy(logits_in(engine(tokens)), targets)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach())
        mean = sum(everyones(total)) / (self.accumulation * self.data[1])
        return Step(
            mean, engine.get_global_grad_norm(), float(lr), engine.was_step_applied(), scale
        )

    def resume(self, place: Path) -> int:
        folder, _ = self.engine.load_checkpoint(place.parent, tag=place.name)
        BridgeError.raise_if(
            []
            if folder
            else [
                f"{place}: found no checkpoint to continue from; name the folder of a saved"
                " checkpoint"
            ]
        )
        return self.engine.global_steps

    def weights(self) -> Mapping[str, Tensor]:
        return {
            name: whole.detach().cpu().float() for name, whole in self.engine.native.state_dict()
        }

    def bytes(self) -> Mapping[str, int]:
        sizes = self.engine.native.bytes()
        return {
            "weights": sizes["weights"],
            "gradients": sizes["gradients"],
            "optimizer": sizes["master"] + sizes["moments"],
        }

    def close(self) -> None:
        self.engine.native.weights.settle()
