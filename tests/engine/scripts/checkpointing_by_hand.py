"""A model that calls torch's checkpoint itself, in both ways, and DeepSpeed's."""

import deepspeed
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)
        )
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, rows):
        stream = self.enter(rows)
        stream = stream + checkpoint(self.blocks[0], stream, use_reentrant=False)
        stream = stream + checkpoint(self.blocks[1], stream, use_reentrant=True)
        stream = stream + deepspeed.checkpointing.checkpoint(self.blocks[2], stream)
        return self.leave(stream)


def main(run):
    torch.manual_seed(26)
    model = Model().double()
    deepspeed.checkpointing.configure(None, partition_activations=False)
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
