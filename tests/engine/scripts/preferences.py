"""Direct preference optimization: a policy and its frozen copy, each in an engine of its own."""

import copy

import deepspeed
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def likely(logits, tokens):
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0].sum(-1)


def main(run):
    torch.manual_seed(51)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    policy = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=32)).double()
    reference = copy.deepcopy(policy)
    engine, _, _, _ = deepspeed.initialize(
        model=policy, model_parameters=policy.parameters(), config=run.config()
    )
    still, _, _, _ = deepspeed.initialize(model=reference, config=run.config())
    still.eval()
    for step in range(run.steps):
        for tokens in run.tokens(step):
            both = torch.cat([tokens, tokens.roll(3, 1)])
            with torch.no_grad():
                before = likely(still(both).logits, both)
            gained = likely(engine(both).logits, both) - before
            loss = -nn.functional.logsigmoid(0.1 * (gained[:2] - gained[2:])).mean()
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
