"""Layers in a list, the first and the last of which share a weight."""

import deepspeed
import torch
from torch import nn


class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, stream):
        return stream @ self.weight.T


def main(run):
    torch.manual_seed(4)
    words = nn.Embedding(64, 16)
    blocks = [
        nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16), nn.LayerNorm(16))
        for _ in range(4)
    ]
    model = nn.Sequential(words, *blocks, Head(words.weight)).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for tokens in run.tokens(step):
            loss = nn.functional.cross_entropy(
                engine(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
            )
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
