"""A model of one's own whose embedding is also its head."""

import deepspeed
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(64, 32), nn.Parameter(torch.randn(12, 32) * 0.1)
        layer = nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), dtype=torch.float64)
        return self.head(self.body(self.words(tokens) + self.positions, mask=mask, is_causal=True))


def main(run):
    torch.manual_seed(3)
    model = Model().double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for tokens in run.tokens(step, length=13):
            logits = engine(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    assert engine.module.head.weight is engine.module.words.weight
    run.end(deepspeed, engine)
