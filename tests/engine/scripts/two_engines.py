"""Two models, two optimizers, one loop: what makes samples and what judges them."""

import deepspeed
import torch
from torch import nn


def main(run):
    torch.manual_seed(32)
    maker = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).double()
    first, _, _, _ = deepspeed.initialize(
        model=maker, model_parameters=maker.parameters(), config=run.config()
    )
    other, _, _, _ = deepspeed.initialize(
        model=judge, model_parameters=judge.parameters(), config=run.config()
    )
    criterion = nn.functional.binary_cross_entropy_with_logits
    for step in range(run.steps):
        for rows in run.numbers(step, 12):
            real, noise = rows[:, :8], rows[:, 8:]
            with torch.no_grad():
                made = first(noise)
            verdicts = other(torch.cat([real, made]))
            loss = criterion(
                verdicts,
                torch.tensor([1.0] * len(real) + [0.0] * len(made), dtype=torch.float64)[:, None],
            )
            other.backward(loss)
            other.step()
            run.loss(loss)
        run.step(other)
        for rows in run.numbers(step + 50, 12):
            loss = (first(rows[:, 8:]) - rows[:, :8]).square().mean()
            first.backward(loss)
            first.step()
            run.loss(loss)
        run.step(first)
    run.end(deepspeed, first)
    run.note("judge", float(other.get_global_grad_norm()))
