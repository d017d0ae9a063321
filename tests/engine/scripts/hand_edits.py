"""Weights that the script changes between steps, whole and in place: norms of rows held at one, a value reset."""

import deepspeed
import torch
from torch import nn


def main(run):
    torch.manual_seed(16)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    ).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(4):
        for rows in run.numbers(step, 8):
            loss = (engine(rows) - 1).square().mean()
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
        weight, bias = engine.module[2].weight, engine.module[0].bias
        with deepspeed.zero.GatheredParameters([weight, bias], modifier_rank=0), torch.no_grad():
            weight.div_(weight.norm(dim=1, keepdim=True))
            bias.zero_()
    run.end(deepspeed, engine)
