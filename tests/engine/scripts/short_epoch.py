"""An epoch that ends in the middle of a step: the script says that the step ends here."""

import deepspeed
import torch
from torch import nn


def main(run):
    torch.manual_seed(15)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(4):
        rows = run.numbers(step, 8)
        kept = rows[: len(rows) // 2] if step % 2 else rows
        for place, row in enumerate(kept):
            engine.set_gradient_accumulation_boundary(place + 1 == len(kept))
            loss = (engine(row) - 1).square().mean()
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
