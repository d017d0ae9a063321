"""BERT classifies: pooled output, label smoothing, and an accuracy that the ranks add up."""

import deepspeed
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification


def main(run):
    deepspeed.init_distributed("gloo")
    torch.manual_seed(21)
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
        "classifier_dropout": 0.0,
        "num_labels": 3,
    }
    model = BertForSequenceClassification(BertConfig(**shape, **rules)).double()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=run.config()
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    right = torch.zeros(2)
    for step in range(run.steps):
        for tokens in run.tokens(step):
            labels = tokens[:, 0] % 3
            logits = engine(input_ids=tokens).logits
            loss = criterion(logits, labels)
            engine.backward(loss)
            engine.step()
            run.loss(loss)
            right += torch.tensor([(logits.argmax(-1) == labels).sum(), len(labels)])
        run.step(engine)
    deepspeed.comm.all_reduce(right)
    run.note("right", right.tolist())
    run.end(deepspeed, engine)
