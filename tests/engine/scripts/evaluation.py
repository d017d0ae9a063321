"""An evaluation between microbatches and after each step, with words that are right counted over all ranks."""

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def evaluated(engine, run, step):
    engine.eval()
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for tokens in run.tokens(1000 + step):
            found = engine(input_ids=tokens, labels=tokens)
            right = (found.logits[:, :-1].argmax(-1) == tokens[:, 1:]).sum()
            total += torch.stack([found.loss.double(), right.double()])
    deepspeed.comm.all_reduce(total)
    engine.train()
    return total.tolist()


def main(run):
    deepspeed.init_distributed("gloo")
    torch.manual_seed(36)
    shape = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64, "n_positions": 16}
    model = GPT2LMHeadModel(
        GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    seen = []
    for step in range(run.steps):
        for place, tokens in enumerate(run.tokens(step)):
            if place == 1:
                seen.append(evaluated(engine, run, step))
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
        seen.append(evaluated(engine, run, step))
    run.note("seen", seen)
    run.end(deepspeed, engine)
