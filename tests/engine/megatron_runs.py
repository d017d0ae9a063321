"""What ranks run for tests of Megatron-Core: the same training on it and on the engine, from the same weights and data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bridge.engine import initialize
from bridge.engine.interface import Workload
from bridge.engine.models.gpt import mean_cross_entropy, sum_cross_entropy
from bridge.plan.plan import Plan
from compat.megatron.runtime.backend import BACKEND
from tests.engine.runs import SHAPE, Case, microbatches, model_of
from tests.trace.traces import fed

TOKENS = 8
GATED = replace(
    SHAPE, layers=4, hidden=32, ffn=48, vocab=30, sequence=TOKENS, norm="rms", gated=True
)
"""Grouped queries, a gate, rotary positions, tied embeddings."""
LEARNED = replace(GATED, norm="layer", gated=False, rotary=False, tied=False, vocab=29)
"""GELU, learned positions, an output layer of its own, and a vocabulary that tensor ranks do not divide."""


@dataclass(frozen=True)
class Found:
    """Losses and gradient norms of each step; weights at the end; sizes of this rank's parameters by Megatron's name; bytes."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    elements: dict[str, int]
    bytes: dict[str, int]


def on_megatron(rank: int, world: int, cases: Sequence[Case]) -> list[Found]:
    """Train each on Megatron-Core."""
    return [_megatron(case) for case in cases]


def _megatron(case: Case) -> Found:
    trainer = BACKEND.open(Plan.of(case.plan), Workload(case.shape, case.seed))
    try:
        steps = [
            trainer.train_batch(fed(case, *trainer.data, trainer.accumulation, step))
            for step in range(case.steps)
        ]
        named = {
            name: weight.numel()
            for chunk in trainer.chunks
            for name, weight in chunk.named_parameters()
        }
        norms = [step.grad_norm or 0.0 for step in steps]
        return Found(
            [step.loss for step in steps],
            norms,
            dict(trainer.weights()),
            named,
            dict(trainer.bytes()),
        )
    finally:
        trainer.close()


def on_engine(rank: int, world: int, cases: Sequence[Case]) -> list[Found]:
    """Train each on the native engine."""
    return [_engine(case) for case in cases]


def _engine(case: Case) -> Found:
    plan = Plan.of(case.plan)
    loss = sum_cross_entropy if plan.loss == "per_token" else mean_cross_entropy
    engine = initialize(model_of(case), plan, loss, seed=11)
    losses, norms = list[float](), list[float]()
    for step in range(case.steps):
        losses.append(engine.train_batch(microbatches(case, engine, step)))
        norms.append(engine.progress.grad_norm)
    return Found(
        losses,
        norms,
        {name: weight.clone() for name, weight in engine.state_dict()},
        {},
        engine.bytes(),
    )


def case_of(shape: Any, **values: Any) -> Case:
    """A case of eight sequences in a step, in fp32; `values` are plan values, with two underscores for a dot."""
    given = {name.replace("__", "."): value for name, value in values.items()}
    return Case({**SETTINGS, **given}, shape, batch=8, steps=3, dtype=torch.float32, tokens=TOKENS)


SETTINGS = {
    "batch.micro": 2,
    "batch.global_": 8,
    "precision.compute": "fp32",
    "optimizer.lr": 1e-2,
    "optimizer.eps": 1e-4,
    "optimizer.weight_decay": 0.1,
    "optimizer.decay_scope": "matrices",
    "optimizer.clip": 0.5,
}
