"""Parametrized weights: weight normalization and symmetric matrices, under names that torch makes."""

import deepspeed
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def main(run):
    torch.manual_seed(42)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    ).double()
    parametrizations.weight_norm(model[0])
    parametrize.register_parametrization(model[2], "weight", Symmetric())
    nn.utils.weight_norm(model[4])
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
    assert "0.parametrizations.weight.original0" in dict(model.named_parameters())
    run.end(deepspeed, engine)
