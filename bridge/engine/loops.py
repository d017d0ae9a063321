"""Plain training loops of torch: call the model, let torch's wrapper reduce gradients, clip the
gradients by one norm, and update the weights with torch's optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bridge.engine.comm import everyones, rank_and_world
from bridge.engine.interface import Step, Workload
from bridge.engine.layers import logits_in
from bridge.engine.models.dense import model_to_train
from bridge.engine.models.gpt import sum_cross_entropy
from bridge.engine.optimizer import groups_without_decay, rate_of_update, setting
from bridge.engine.rows import IGNORED, Batch
from bridge.errors import BridgeError
from bridge.plan.plan import Plan
from bridge.trace import naming
from bridge.trace.module import ModuleSource


class PlainTrainer:
    """A run of a plain training loop on one rank."""

    shares_batch = False
    """Whether ranks are data ranks, or each does the same."""

    def __init__(self, plan: Plan, workload: Workload) -> None:
        here = rank_and_world() or (0, 1)
        self.plan, self.data, self.steps = plan, here if self.shares_batch else (0, 1), 0
        self.micro = plan.batch.micro or workload.micro
        whole = plan.batch.global_ or self.micro * (plan.batch.accumulation or 1) * (
            plan.parallel.data or here[1]
        )
        self.accumulation = max(1, whole // (self.micro * self.data[1]))
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model: nn.Module = model_to_train(workload).to(self.device)
        self.wrapped = self.wrap(self.model)
        self.optimizer = self.build_optimizer()
        rate = self.optimizer.defaults["lr"]
        self.ratios = [group["lr"] / rate if rate else 1.0 for group in self.optimizer.param_groups]

    def wrap(self, model: nn.Module) -> Any:
        """Return the model in the wrapper of torch that the loop calls."""
        return model

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer, whose groups keep the ratios between their rates."""
        return _optimizer(self.plan, self.model)

    def waits(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context for a forward and a backward pass. Data ranks reduce gradients only in
        the `last` pass of a step.
        """
        return nullcontext()

    @property
    def low(self) -> bool:
        """Whether the model runs under autocast to bf16."""
        return self.plan.precision.compute == "bf16"

    def train_batch(self, batches: Iterable[Batch]) -> Step:
        microbatches = [
            (tokens.to(self.device), targets.to(self.device))
            for tokens, targets in islice(batches, self.accumulation)
        ]
        tokens_here = sum(int((targets != IGNORED).sum()) for _, targets in microbatches)
        every = sum(self._everyones(tokens_here))
        lr = rate_of_update(self.plan, self.steps)
        self.optimizer.zero_grad()
        total = 0.0
        for number, (tokens, targets) in enumerate(microbatches):
            with self.waits(number == len(microbatches) - 1):
                with torch.autocast(self.device, torch.bfloat16, self.low):
                    logits = logits_in(self.wrapped(tokens))
                loss, count = sum_cross_entropy(logits, targets)
                # Wrappers average gradients over data ranks: times their number it is a sum, which
                # the tokens of all ranks divide.
                mean = (
                    loss * self.data[1] / every
                    if self.plan.loss == "per_token"
                    else loss / count / len(microbatches)
                )
                torch.autograd.backward(mean)
            total += float(mean)
        norm = norm_of(self.model.parameters(), self.plan.optimizer.clip)
        for group, ratio in zip(self.optimizer.param_groups, self.ratios, strict=True):
            group["lr"] = lr * ratio
        self.optimizer.step()
        self.steps += 1
        means = self._everyones(total)
        return Step(sum(means) / len(means), norm, lr * self.ratios[0])

    def _everyones(self, value: Any) -> Any:
        return everyones(value) if self.data[1] > 1 else [value]

    def trace_source(self) -> ModuleSource:
        """Return what a trace of this run reads."""
        return ModuleSource(self.wrapped, self.optimizer, self.accumulation)

    def resume(self, place: Path) -> int:
        raise BridgeError(
            f"{place}: a plain loop cannot resume from a checkpoint; start it without one"
        )

    def weights(self) -> Mapping[str, Tensor]:
        """Return every parameter whole, in fp32 on the CPU. Every rank gets all parameters."""
        return wholes(self.model)

    def bytes(self) -> Mapping[str, int]:
        return memory_bytes(self.model, self.optimizer)

    def close(self) -> None:
        """Do nothing: a plain loop opens nothing except the process group of all ranks."""


class ReplicatedTrainer(PlainTrainer):
    """Data ranks with DistributedDataParallel."""

    shares_batch = True

    def wrap(self, model: nn.Module) -> Any:
        return DistributedDataParallel(model)

    def waits(self, last: bool) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = nullcontext() if last else self.wrapped.no_sync()
        return context


class ShardedTrainer(PlainTrainer):
    """A plain loop on data ranks with `fully_shard`, whose mixed-precision policy casts to bf16."""

    shares_batch, low = True, False  # no autocast beside the policy

    def wrap(self, model: nn.Module) -> Any:
        half = torch.bfloat16 if self.plan.precision.compute == "bf16" else None
        policy = MixedPrecisionPolicy(
            param_dtype=half, reduce_dtype=torch.float32 if half else None
        )
        # Numbered layers are the blocks. The rest of the model is left to the root's own group.
        for name, block in naming.layers_by_name(model).items():
            if name[-1].isdigit():
                fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    def waits(self, last: bool) -> AbstractContextManager[Any]:
        self.wrapped.set_requires_gradient_sync(last)
        return nullcontext()


TRAINERS = {"none": PlainTrainer, "ddp": ReplicatedTrainer, "fsdp2": ShardedTrainer}


def wholes(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all weights by name, whole, in fp32 on the CPU. Every rank gets all weights."""
    return {
        name: _whole(weight).detach().float().cpu().clone()
        for name, weight in model.named_parameters()
    }


def memory_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer state on this rank."""
    weights = [_local(weight) for weight in model.parameters()]
    states = [
        _local(value)
        for state in optimizer.state.values()
        for value in state.values()
        if value.dim()
    ]
    parts = {"weights": weights, "gradients": weights, "optimizer": states}
    return {
        kind: sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        for kind, tensors in parts.items()
    }


def norm_of(parameters: Iterable[nn.Parameter], bound: float | None) -> float:
    """Clip gradients to the norm `bound`, unless it is None or 0. Return the global norm before
    clipping.
    """
    return float(_whole(nn.utils.clip_grad_norm_(parameters, bound or torch.inf)))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _optimizer(plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    settings = plan.optimizer
    name = setting(settings, "name")
    decay = setting(settings, "weight_decay")
    free = {one for group in groups_without_decay(model, settings) for one in group.names}
    weights = [weight for one, weight in model.named_parameters() if one not in free]
    others = [weight for one, weight in model.named_parameters() if one in free]
    groups = [
        {"params": part, "weight_decay": rate}
        for part, rate in ((weights, decay), (others, 0.0))
        if part
    ]
    options: dict[str, Any] = {"lr": setting(settings, "lr")}
    if name == "sgd":
        options |= {"momentum": setting(settings, "momentum"), "nesterov": bool(settings.nesterov)}
        return torch.optim.SGD(groups, **options)
    options |= {"betas": setting(settings, "betas"), "eps": setting(settings, "eps")}
    return (torch.optim.Adam if name == "adam" else torch.optim.AdamW)(groups, **options)
