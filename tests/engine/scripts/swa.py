"""The mean of the last steps' weights, by torch's own class."""

import deepspeed
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel


def main(run):
    torch.manual_seed(19)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    average = AveragedModel(model)
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
        if step >= 1:
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                average.update_parameters(engine.module)
    run.note("updates", int(average.n_averaged))
    run.note("average", torch.cat([mean.flatten() for mean in average.parameters()]))
    run.end(deepspeed, engine)
