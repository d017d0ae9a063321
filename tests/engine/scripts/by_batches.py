"""Training by `train_batch` over a data set that DeepSpeed loads."""

import deepspeed
import torch
from torch import nn


class Model(nn.Sequential):
    @staticmethod
    def loss_fn(output, wanted):
        return nn.functional.mse_loss(output, wanted)


def main(run):
    torch.manual_seed(57)
    model = Model(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    batches = iter(
        [
            (rows, rows.sum(1, keepdim=True))
            for step in range(run.steps)
            for rows in run.numbers(step, 8)
        ]
    )
    for _ in range(run.steps):
        run.loss(engine.train_batch(batches))
        run.step(engine)
    run.end(deepspeed, engine)
