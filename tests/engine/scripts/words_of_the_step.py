"""Each word of a step counts alike, whichever microbatch it is in: sums over the number of words of all ranks."""

import deepspeed
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def main(run):
    deepspeed.init_distributed("gloo")
    torch.manual_seed(30)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=32)).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        batches = [
            (tokens, tokens.where(tokens % (2 + int(tokens[0, 0]) % 3) == 0, -100))
            for tokens in run.tokens(step)
        ]
        words = torch.tensor(float(sum((labels[:, 1:] != -100).sum() for _, labels in batches)))
        deepspeed.comm.all_reduce(words)
        for tokens, labels in batches:
            logits = engine(input_ids=tokens).logits[:, :-1]
            total = nn.functional.cross_entropy(
                logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
            loss = total / words * run.world * engine.gradient_accumulation_steps()
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
