"""Several losses of one pass with weights that change, one of which does not come to all parameters."""

import deepspeed
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.value, self.kind, self.unused = nn.Linear(16, 1), nn.Linear(16, 3), nn.Linear(16, 2)

    def forward(self, rows):
        inner = self.body(rows)
        return self.value(inner), self.kind(inner), inner


def main(run):
    torch.manual_seed(31)
    model = Model().double()
    rules = {"type": "SGD", "params": {"lr": 0.1}}
    config = run.config(optimizer=rules)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for step in range(run.steps):
        for rows in run.numbers(step, 8):
            value, kind, inner = engine(rows)
            losses = [
                (value[:, 0] - rows.sum(1)).square().mean(),
                nn.functional.cross_entropy(kind, (rows[:, 0] > 0).long()),
                inner.square().mean(),
            ]
            loss = sum(
                part * weight
                for part, weight in zip(losses, (1.0, 0.5 ** (step + 1), 0.01), strict=True)
            )
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
