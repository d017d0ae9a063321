"""A small model learns from the logits of a larger one, which is not trained and lies outside the engine."""

import deepspeed
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


def made(layers):
    shape = {"n_embd": 32, "n_layer": layers, "n_head": 4, "vocab_size": 64, "n_positions": 16}
    return GPT2LMHeadModel(
        GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ).double()


def main(run):
    torch.manual_seed(50)
    teacher, student = made(4).eval().requires_grad_(False), made(2)
    engine, _, _, _ = deepspeed.initialize(
        model=student, model_parameters=student.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for tokens in run.tokens(step):
            with torch.no_grad():
                wanted = (teacher(tokens).logits / 2).log_softmax(-1)
            found = engine(tokens, labels=tokens)
            apart = nn.functional.kl_div(
                (found.logits / 2).log_softmax(-1), wanted, log_target=True, reduction="batchmean"
            )
            loss = 0.5 * found.loss + 0.5 * 4 * apart
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
