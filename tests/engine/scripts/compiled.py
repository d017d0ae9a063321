"""Blocks that torch compiles, here by its tracer alone."""

import deepspeed
import torch
from torch import nn


def main(run):
    torch.manual_seed(56)
    blocks = [
        nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16))
        for _ in range(3)
    ]
    model = nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 1)).double()
    for block in model[1:-1]:
        block.compile(backend="aot_eager")
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for rows in run.numbers(step, 8):
            loss = (engine(rows) - 1).square().mean()
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
