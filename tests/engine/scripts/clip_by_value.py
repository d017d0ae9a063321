"""Gradients of the whole step clipped by value, as DeepSpeed's users reach them."""

import deepspeed
import torch
from torch import nn


def main(run):
    torch.manual_seed(27)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    ).double()
    config = run.config(gradient_clipping=0.0)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    largest = []
    for step in range(run.steps):
        for rows in run.numbers(step, 8):
            loss = (engine(rows) - 3).square().mean()
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                for weight in engine.module.parameters():
                    gradient = deepspeed.utils.safe_get_full_grad(weight)
                    largest.append(float(gradient.abs().max()))
                    deepspeed.utils.safe_set_full_grad(weight, gradient.clamp(-0.05, 0.05))
            engine.step()
            run.loss(loss)
        run.step(engine)
    assert max(largest) > 0.05
    run.note("largest", largest)
    run.end(deepspeed, engine)
