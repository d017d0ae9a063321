"""An LSTM over two halves of a text: its state goes from one to the next, cut off from the gradient."""

import deepspeed
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.body, self.head = (
            nn.Embedding(64, 16),
            nn.LSTM(16, 24, 2, batch_first=True),
            nn.Linear(24, 64),
        )

    def forward(self, tokens, state=None):
        found, state = self.body(self.words(tokens), state)
        return self.head(found), state


def main(run):
    torch.manual_seed(54)
    model = Model().double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for tokens in run.tokens(step, length=13):
            state, losses = None, []
            for place in (0, 6):
                logits, state = engine(tokens[:, place : place + 6], state)
                state = tuple(each.detach() for each in state)
                losses.append(
                    nn.functional.cross_entropy(
                        logits.flatten(0, 1), tokens[:, place + 1 : place + 7].flatten()
                    )
                )
            loss = sum(losses) / 2
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
