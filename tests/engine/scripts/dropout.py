"""A model of one's own with dropout: the same numbers are dropped wherever a microbatch runs."""

import deepspeed
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        layer = nn.TransformerEncoderLayer(32, 4, 48, 0.3, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.head(self.body(self.words(tokens)))


def main(run):
    torch.manual_seed(39)
    model = Model().double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    engine.train()
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
