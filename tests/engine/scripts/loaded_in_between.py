"""Weights put back to those of the start by `load_state_dict` after a few steps; moments go on."""

import deepspeed
import torch
from torch import nn


def main(run):
    torch.manual_seed(17)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(4):
        if step == 2:
            engine.load_state_dict({f"module.{name}": value for name, value in start.items()})
        for rows in run.numbers(step, 8):
            loss = (engine(rows) - 1).square().mean()
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
