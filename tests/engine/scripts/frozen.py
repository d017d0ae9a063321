"""Frozen embedding and first blocks of a Qwen3; the optimizer gets what is left."""

import deepspeed
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def main(run):
    torch.manual_seed(8)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    model = Qwen3ForCausalLM(
        Qwen3Config(**shape, vocab_size=64, num_key_value_heads=2, max_position_embeddings=32)
    ).double()
    for part in (model.model.embed_tokens, *model.model.layers[:2]):
        part.requires_grad_(False)
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=trained, config=run.config()
    )
    for step in range(run.steps):
        for tokens in run.tokens(step):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
    assert torch.equal(run.weights["model.layers.0.mlp.up_proj.weight"], before)
