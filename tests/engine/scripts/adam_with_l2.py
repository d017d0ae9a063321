"""Adam with decay in the gradient, by a function that makes the optimizer, and a schedule by a function of it."""

import deepspeed
import torch
from torch import nn


def main(run):
    torch.manual_seed(46)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=lambda weights: torch.optim.Adam(
            weights, lr=0.02, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.1
        ),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.05, total_steps=8
        ),
        config=run.config(),
    )
    for step in range(5):
        for rows in run.numbers(step, 8):
            loss = (engine(rows) - 1).square().mean()
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.note("rates", engine.get_lr())
    run.end(deepspeed, engine)
