"""A loop that asks for no exchange before the last microbatch, and calls `zero_grad` by itself."""

from contextlib import nullcontext

import deepspeed
import torch
from torch import nn


def main(run):
    torch.manual_seed(41)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        rows = run.numbers(step, 8)
        for place, row in enumerate(rows):
            with engine.no_sync() if place < len(rows) - 1 else nullcontext():
                loss = (engine(row) - 1).square().mean()
                engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
        optimizer.zero_grad(set_to_none=True)
        engine.zero_grad()
    run.end(deepspeed, engine)
