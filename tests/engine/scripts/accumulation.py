"""GPT-2 with gradient accumulation: the loop of every tutorial."""

import deepspeed
from transformers import GPT2Config, GPT2LMHeadModel, set_seed


def main(run):
    set_seed(1)
    shape = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64, "n_positions": 16}
    model = GPT2LMHeadModel(
        GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ).double()
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
