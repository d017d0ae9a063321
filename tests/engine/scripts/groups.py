"""Llama in groups of parameters: no decay for norms, a smaller rate for the embedding."""

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main(run):
    torch.manual_seed(2)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    model = LlamaForCausalLM(
        LlamaConfig(**shape, num_key_value_heads=2, max_position_embeddings=32)
    ).double()
    decay, plain, slow = [], [], []
    for name, weight in model.named_parameters():
        (slow if "embed" in name else plain if weight.dim() == 1 else decay).append(weight)
    groups = [
        {"params": decay, "weight_decay": 0.2},
        {"params": plain, "weight_decay": 0.0},
        {"params": slow, "weight_decay": 0.0, "lr": 0.001},
    ]
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=groups, config=run.config()
    )
    for step in range(run.steps):
        for tokens in run.tokens(step):
            loss = engine(tokens, labels=tokens)[0]
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
