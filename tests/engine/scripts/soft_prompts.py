"""Prompt tuning: learned vectors before the words of a frozen model, which is called with embeddings."""

import deepspeed
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class Prompted(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.prompt = (
            model.requires_grad_(False),
            nn.Parameter(torch.randn(4, 32) * 0.1),
        )

    def forward(self, tokens):
        words = self.model.get_input_embeddings()(tokens)
        stream = torch.cat([self.prompt.expand(len(tokens), -1, -1), words], 1)
        labels = torch.cat([tokens.new_full((len(tokens), 4), -100), tokens], 1)
        return self.model(inputs_embeds=stream, labels=labels).loss


def main(run):
    torch.manual_seed(53)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    model = Prompted(LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=32))).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=[model.prompt], config=run.config()
    )
    for step in range(run.steps):
        for tokens in run.tokens(step):
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
