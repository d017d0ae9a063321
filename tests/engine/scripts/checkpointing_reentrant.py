"""The older way of checkpointing, whose backward runs another backward, with inputs that ask for gradients."""

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def main(run):
    torch.manual_seed(25)
    shape = {
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": 64,
        "n_positions": 16,
        "use_cache": False,
    }
    model = GPT2LMHeadModel(
        GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ).double()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    model.train()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for tokens in run.tokens(step):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
