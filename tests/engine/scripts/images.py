"""A vision transformer classifies pictures."""

import deepspeed
import torch
from transformers import ViTConfig, ViTForImageClassification


def main(run):
    torch.manual_seed(47)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_labels": 5,
    }
    rules = {
        "image_size": 8,
        "patch_size": 4,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    model = ViTForImageClassification(ViTConfig(**shape, **rules)).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for pixels in run.numbers(step, 3, 8, 8):
            loss = engine(
                pixel_values=pixels, labels=(pixels[:, 0, 0, 0] * 10).long().abs() % 5
            ).loss
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
