"""Microbatches of other lengths and fewer rows, as the end of an epoch gives them."""

import deepspeed
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM


def main(run):
    torch.manual_seed(14)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**shape, max_position_embeddings=32)).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    places = run.mine(range(4))
    for step in range(run.steps):
        for place, tokens in zip(places, run.tokens(step), strict=True):
            batch = tokens[: 1 if place > 1 else 2, : 8 + place]
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
