"""What the ranks of a pool run for tests of traces."""

from __future__ import annotations

from pathlib import Path

from bridge.engine import initialize
from bridge.engine.models.gpt import mean_cross_entropy, summed_cross_entropy
from bridge.engine.tracing import EngineSource
from bridge.plan import Plan
from bridge.trace import attach
from runs import Case, microbatches, model_of


def traced(rank: int, world: int, case: Case, folder: Path, full: bool = False) -> list[float]:
    """Train with the plan's debug levels; the losses."""
    plan = Plan.of(case.plan)
    loss = summed_cross_entropy if plan.loss == "per_token" else mean_cross_entropy
    engine = initialize(model_of(case), plan, loss, seed=11)
    attach(EngineSource(engine), plan.debug, folder, full=full)
    return [engine.train_batch(microbatches(case, engine, step)) for step in range(case.steps)]
