"""LoRA by peft on a Llama, of which only the adapters are trained."""

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def main(run):
    torch.manual_seed(10)
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
    rules = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    model = get_peft_model(model, rules).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=[w for w in model.parameters() if w.requires_grad],
        config=run.config(),
    )
    for step in range(run.steps):
        for tokens in run.tokens(step):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
