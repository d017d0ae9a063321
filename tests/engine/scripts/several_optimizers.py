"""One model with an optimizer for each half: DeepSpeed takes one, and so does the engine."""

import deepspeed
import torch
from torch import nn

REFUSED = "optimizer: found list"


def main(run):
    torch.manual_seed(33)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    halves = [
        torch.optim.AdamW(model[0].parameters(), lr=0.01),
        torch.optim.SGD(model[2].parameters(), lr=0.1),
    ]
    deepspeed.initialize(model=model, optimizer=halves, config=run.config())
