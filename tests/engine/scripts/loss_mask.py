"""Only answers count: the loss of each word times a mask, over the words that count in this microbatch."""

import deepspeed
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM


def main(run):
    torch.manual_seed(29)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    model = Qwen2ForCausalLM(
        Qwen2Config(**shape, num_key_value_heads=2, max_position_embeddings=32)
    ).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for tokens in run.tokens(step):
            counts = (torch.arange(11) >= torch.tensor([[4], [7]])).double()
            logits = engine(input_ids=tokens).logits[:, :-1]
            each = nn.functional.cross_entropy(
                logits.transpose(1, 2), tokens[:, 1:], reduction="none"
            )
            loss = (each * counts).sum() / counts.sum()
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
