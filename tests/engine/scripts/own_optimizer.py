"""An update rule that the engine does not have, which would see gradients of no parameter."""

import deepspeed
import torch
from torch import nn

REFUSED = "optimizer: found LBFGS"


def main(run):
    torch.manual_seed(34)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    deepspeed.initialize(
        model=model, optimizer=torch.optim.LBFGS(model.parameters()), config=run.config()
    )
