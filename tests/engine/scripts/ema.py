"""An exponential average of the weights, by which the script evaluates."""

import copy

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def main(run):
    torch.manual_seed(18)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16}
    model = GPT2LMHeadModel(
        GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ).double()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    held, seen = torch.arange(3, 27).view(2, 12), []
    for step in range(4):
        for tokens in run.tokens(step):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
        for mean, weight in zip(average.parameters(), engine.module.parameters(), strict=True):
            with deepspeed.zero.GatheredParameters([weight]):
                mean.data.lerp_(weight.data, 0.25)
        with torch.no_grad():
            seen.append(float(average(input_ids=held, labels=held).loss))
    run.note("evaluated", seen)
    run.note("average", torch.stack([mean.norm() for mean in average.parameters()]))
    run.end(deepspeed, engine)
