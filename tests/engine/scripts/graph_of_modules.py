"""Modules that are used twice, one that is skipped by a random choice, and weights in a ParameterList."""

import deepspeed
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.shared, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.scales = nn.ParameterList([torch.ones(16) * 0.5 for _ in range(3)])
        self.rare = nn.Linear(16, 16)

    def forward(self, rows, deep):
        stream = self.enter(rows)
        for scale in self.scales:
            stream = stream + scale * self.shared(stream).tanh()
        return self.leave(self.rare(stream) if deep else stream)


def main(run):
    torch.manual_seed(58)
    model = Model().double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for rows in run.numbers(step, 8):
            loss = (engine(rows, deep=bool(rows[0, 0] > 0)) - 1).square().mean()
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
