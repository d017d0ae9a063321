"""SGD with momentum and L2 decay, by the script's own optimizer in two groups."""

import deepspeed
import torch
from torch import nn


def main(run):
    torch.manual_seed(45)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    ).double()
    groups = [
        {"params": model[:2].parameters(), "lr": 0.01},
        {"params": model[2:].parameters(), "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.05)
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=run.config(gradient_clipping=1.0)
    )
    for step in range(5):
        for rows in run.numbers(step, 8):
            loss = (engine(rows) - 1).square().mean()
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
