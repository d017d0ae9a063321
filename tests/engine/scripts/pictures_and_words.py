"""Two towers of CLIP and a learned temperature, which the script keeps within bounds."""

import deepspeed
import torch
from transformers import CLIPConfig, CLIPModel


def main(run):
    torch.manual_seed(48)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    words = {**shape, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 2}
    images = {**shape, "image_size": 8, "patch_size": 4}
    model = CLIPModel(
        CLIPConfig(text_config=words, vision_config=images, projection_dim=16)
    ).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for pixels, tokens in zip(run.numbers(step, 3, 8, 8), run.tokens(step), strict=True):
            loss = engine(input_ids=tokens, pixel_values=pixels, return_loss=True).loss
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
        with deepspeed.zero.GatheredParameters(engine.module.logit_scale, modifier_rank=0):
            engine.module.logit_scale.data.clamp_(0, 2.5)
    run.end(deepspeed, engine)
