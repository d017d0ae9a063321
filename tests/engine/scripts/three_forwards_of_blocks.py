"""Triplets through a model of transformers in three passes, and one loss."""

import deepspeed
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def main(run):
    torch.manual_seed(13)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    model = LlamaForCausalLM(
        LlamaConfig(**shape, max_position_embeddings=32, tie_word_embeddings=True)
    ).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for tokens in run.tokens(step):
            anchor, near, far = (
                engine(tokens.roll(shift, 1)).logits.mean(1) for shift in (0, 1, 5)
            )
            loss = nn.functional.triplet_margin_loss(anchor, near, far, margin=2.0)
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
