"""A tied embedding that is frozen: head and input stay, all else is trained."""

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def main(run):
    torch.manual_seed(9)
    shape = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64, "n_positions": 16}
    model = GPT2LMHeadModel(
        GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ).double()
    model.get_input_embeddings().weight.requires_grad = False
    assert model.lm_head.weight is model.transformer.wte.weight
    trained = filter(lambda weight: weight.requires_grad, model.parameters())
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=trained, config=run.config()
    )
    for step in range(run.steps):
        for tokens in run.tokens(step):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
