"""Functions with a backward of their own: rounded weights whose gradient goes straight through, a gradient turned round."""

import deepspeed
import torch
from torch import nn


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, steps):
        ctx.save_for_backward(weight)
        return (weight * steps).round() / steps

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        return gradient * (weight.abs() <= 1), None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stream):
        return stream.view_as(stream)

    @staticmethod
    def backward(ctx, gradient):
        return -0.3 * gradient


class Quantized(nn.Linear):
    def forward(self, stream):
        return nn.functional.linear(stream, Rounded.apply(self.weight, 16), self.bias)


class Adversary(nn.Module):
    def __init__(self):
        super().__init__()
        self.task, self.domain = nn.Linear(16, 1), nn.Linear(16, 2)

    def forward(self, inner):
        return self.task(inner), self.domain(Reversed.apply(inner))


def main(run):
    torch.manual_seed(44)
    model = nn.Sequential(
        Quantized(8, 16), nn.Tanh(), Quantized(16, 16), nn.Tanh(), Adversary()
    ).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for rows in run.numbers(step, 8):
            task, domain = engine(rows)
            loss = task.square().mean() + nn.functional.cross_entropy(
                domain, (rows[:, 0] > 0).long()
            )
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
