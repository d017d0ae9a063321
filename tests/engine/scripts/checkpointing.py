"""A Llama computes activations again, in the newer of transformers' ways."""

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main(run):
    torch.manual_seed(24)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    model = LlamaForCausalLM(
        LlamaConfig(**shape, max_position_embeddings=32, use_cache=False)
    ).double()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
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
