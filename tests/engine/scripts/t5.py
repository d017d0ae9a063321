"""T5 translates: an encoder, a decoder, and one embedding for both."""

import deepspeed
import torch
from transformers import T5Config, T5ForConditionalGeneration


def main(run):
    torch.manual_seed(22)
    shape = {
        "d_model": 32,
        "d_ff": 48,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 64,
        "dropout_rate": 0.0,
    }
    model = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0)).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for tokens in run.tokens(step):
            loss = engine(
                input_ids=tokens, attention_mask=tokens.gt(5).long(), labels=tokens[:, :7].flip(1)
            ).loss
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
