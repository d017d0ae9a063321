"""Hooks on gradients: an embedding that learns slower, values clipped as they come; and hooks on modules."""

import deepspeed
import torch
from torch import nn


def main(run):
    torch.manual_seed(28)
    model = nn.Sequential(
        nn.Embedding(64, 16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 64)
    ).double()
    model[0].weight.register_hook(lambda gradient: gradient * 0.1)
    model[1].weight.register_hook(lambda gradient: gradient.clamp(-0.002, 0.002))
    seen = {"forward": 0, "backward": 0.0, "largest": 0.0}

    def forward(module, inputs, output):
        seen["forward"] += 1

    def backward(module, inputs, outputs):
        seen["backward"] += float(outputs[0].norm())

    model[1].weight.register_hook(
        lambda gradient: seen.update(largest=max(seen["largest"], float(gradient.max())))
    )
    model[1].register_forward_hook(forward)
    model[3].register_full_backward_hook(backward)
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
    run.note("calls", seen["forward"] * run.world)
    run.note("backward", seen["backward"] * run.world)
    assert seen["largest"] == 0.002
    run.end(deepspeed, engine)
