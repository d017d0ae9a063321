"""A model that returns a nested dictionary with lists, numbers and None, and a class of its own."""

from dataclasses import dataclass

import deepspeed
import torch
from torch import nn


@dataclass
class Found:
    values: torch.Tensor
    more: dict
    step: int = 0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 2)

    def forward(self, rows, *, scale=1.0, names=("a", "b")):
        inner = self.first(rows).tanh() * scale
        more = {
            "lists": [self.second(inner), None, self.third(inner)],
            "names": list(names),
            "number": 7,
        }
        return Found(inner, more, step=len(names))


def main(run):
    torch.manual_seed(11)
    model = Model().double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for rows in run.numbers(step, 8):
            found = engine(rows, scale=0.5, names=("x", "y", "z"))
            assert (
                found.step == 3
                and found.more["names"] == ["x", "y", "z"]
                and found.more["lists"][1] is None
            )
            loss = (
                found.more["lists"][0].square().mean()
                + found.more["lists"][2].mean()
                + found.values.abs().mean()
            )
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
