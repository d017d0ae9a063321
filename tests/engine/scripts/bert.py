"""BERT learns masked words; few labels count."""

import deepspeed
import torch
from transformers import BertConfig, BertForMaskedLM


def main(run):
    torch.manual_seed(20)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    rules = {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 32,
    }
    model = BertForMaskedLM(BertConfig(**shape, **rules)).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    for step in range(run.steps):
        for tokens in run.tokens(step):
            chosen = tokens % 4 == 0
            labels = tokens.where(chosen, -100)
            attention = (torch.arange(12) < torch.tensor([[12], [9]])).long()
            loss = engine(
                input_ids=tokens.where(~chosen, 1), attention_mask=attention, labels=labels
            ).loss
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)
    run.end(deepspeed, engine)
