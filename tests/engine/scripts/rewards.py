"""A reward model: a Llama with a head for one number, on pairs of which the first is better."""

import deepspeed
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification


def main(run):
    torch.manual_seed(49)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    config = LlamaConfig(**shape, max_position_embeddings=32, num_labels=1, pad_token_id=0)
    model = LlamaForSequenceClassification(config).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for tokens in run.tokens(step):
            scores = engine(input_ids=torch.cat([tokens, tokens.flip(1)])).logits[:, 0]
            loss = -nn.functional.logsigmoid(scores[:2] - scores[2:]).mean()
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
