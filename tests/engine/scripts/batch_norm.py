"""Batch norms, whose buffers change with every batch: each rank has its own, as without `SyncBatchNorm`."""

import deepspeed
import torch
from torch import nn


def main(run):
    torch.manual_seed(43)
    model = nn.Sequential(
        nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 1)
    ).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for rows in run.numbers(step, 1, 8):
            loss = (engine(rows) - rows.mean(-1)).square().mean()
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.note("batches", int(engine.module[1].num_batches_tracked) * run.world)
    assert engine.module[1].running_mean.abs().max() > 0
    run.end(deepspeed, engine)
