"""The script computes in bfloat16 under torch's autocast; weights and sums stay in fp32."""

import deepspeed
import torch
from torch import nn

TOLERANCE = (1e-5, 1e-2)  # a last bit of fp32 may turn a bit of bfloat16


def main(run):
    torch.manual_seed(55)
    model = nn.Sequential(
        nn.Linear(8, 32),
        nn.LayerNorm(32),
        nn.GELU(),
        nn.Linear(32, 32),
        nn.GELU(),
        nn.Linear(32, 1),
    )
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for rows in run.numbers(step, 8):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = engine(rows.float())
                assert found.dtype == torch.bfloat16
                loss = (found.float() - 1).square().mean()
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
