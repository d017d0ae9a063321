"""Dropout in a list of layers, of which some are trained and each is drawn for anew."""

import deepspeed
import torch
from torch import nn


def main(run):
    torch.manual_seed(40)
    model = nn.Sequential(
        nn.Linear(8, 32),
        nn.Dropout(0.5),
        nn.Linear(32, 32),
        nn.AlphaDropout(0.2),
        nn.RReLU(),
        nn.Linear(32, 1),
    ).double()
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
