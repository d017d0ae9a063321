"""Mixtral with the loss that balances its experts."""

import deepspeed
import torch
from transformers import MixtralConfig, MixtralForCausalLM


def main(run):
    torch.manual_seed(23)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    experts = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.02,
    }
    config = MixtralConfig(**shape, **experts, num_key_value_heads=2, max_position_embeddings=32)
    config._experts_implementation = "eager"
    model = MixtralForCausalLM(config).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for tokens in run.tokens(step):
            found = engine(input_ids=tokens, labels=tokens)
            engine.backward(found.loss)
            engine.step()
            run.loss(found.loss)
        run.step(engine)
    run.end(deepspeed, engine)
