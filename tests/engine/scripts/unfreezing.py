"""A part of the model that is frozen at first and trained later, in the same run."""

import deepspeed
import torch
from torch import nn

REFUSED = "requires_grad is True, but was False when the engine was made"


def main(run):
    torch.manual_seed(35)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    model[0].requires_grad_(False)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        model[0].requires_grad_(step > 0)
        for rows in run.numbers(step, 8):
            loss = (engine(rows) - 1).square().mean()
            engine.backward(loss)
            engine.step()
