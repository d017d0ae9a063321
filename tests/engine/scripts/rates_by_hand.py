"""Rates set by hand: through the optimizer's groups, and by `set_lr`."""

import deepspeed
import torch
from torch import nn


def main(run):
    torch.manual_seed(6)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    ).double()
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(4):
        if step == 3:
            engine.set_lr(0.5)
        elif step:
            for group in optimizer.param_groups:
                group["lr"] *= 0.3
                group["weight_decay"] = 0.01 * step
        for rows in run.numbers(step, 8):
            loss = (engine(rows) - rows.sum(1, keepdim=True)).square().mean()
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
