"""Contrastive training: two forward passes for one backward."""

import deepspeed
import torch
from torch import nn


def main(run):
    torch.manual_seed(12)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 6)
    ).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for rows in run.numbers(step, 8):
            one = nn.functional.normalize(engine(rows), dim=-1)
            other = nn.functional.normalize(engine(rows * 0.9 + 0.1), dim=-1)
            loss = nn.functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(rows)))
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
