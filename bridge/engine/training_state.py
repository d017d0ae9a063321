"""What saving and loading read of an engine, and the counts of its progress."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from bridge.engine.comm import Comm, Group
from bridge.engine.layers import Chain
from bridge.engine.loss_scale import LossScaler
from bridge.engine.optimizer import ShardOptimizer
from bridge.engine.weights import Weights
from bridge.layout.pipeline import Pipeline
from bridge.layout.shard import Flat, Layout, Parameter
from bridge.plan.plan import Plan


@dataclass
class Progress:
    """Counts since the start of training, and results of the last step: mean loss over all ranks,
    gradient norm before clipping, and learning rate.
    """

    steps: int = 0
    skipped: int = 0
    samples: int = 0
    loss: float = math.nan
    grad_norm: float = math.nan
    lr: float = 0.0


class TrainingState(Protocol):
    """The parts of an engine on one rank that a checkpoint saves, and that tell what this rank holds."""

    plan: Plan
    comm: Comm
    device: torch.device
    seed: int
    data: Group
    tensor: Group
    line: Group
    chain: Chain
    pipeline: Pipeline
    parameters: list[Parameter]
    layout: Layout
    weights: Weights
    optimizer: ShardOptimizer
    scaler: LossScaler
    progress: Progress
    say: Callable[[str], None]

    @property
    def model(self) -> nn.Module:
        """The model."""

    def first_holder(self, flat: Flat) -> bool:
        """Return whether this pipeline rank is the first of the ranks that hold `flat`."""
