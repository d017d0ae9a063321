"""A rate that falls when the loss of an evaluation no longer does: the scheduler is the script's own business."""

import deepspeed
import torch
from torch import nn


def main(run):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=0.5
    )
    held, rates = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8), []
    for step in range(5):
        engine.train()
        for rows in run.numbers(step, 8):
            loss = (engine(rows) - 1).abs().mean()
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
        engine.eval()
        with torch.no_grad():
            scheduler.step(float((engine(held) - 1).abs().mean()))
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[-1] < rates[0]
    run.note("rates", rates)
    run.end(deepspeed, engine)
