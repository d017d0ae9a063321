"""A run that is saved in the middle and goes on in another engine, with schedule and moments."""

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup


def started(run, seed):
    torch.manual_seed(seed)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=32)).double()
    return deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        lr_scheduler=lambda optimizer: get_linear_schedule_with_warmup(optimizer, 2, 8),
        config=run.config(),
    )[0]


def steps(run, engine, numbers):
    for step in numbers:
        for tokens in run.tokens(step):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        run.step(engine)


def main(run):
    engine = started(run, 37)
    steps(run, engine, range(2))
    engine.save_checkpoint(run.folder, client_state={"epoch": 3})
    other = started(run, 38)
    _, client = other.load_checkpoint(run.folder)
    run.note("client", dict(client))
    run.note("steps", other.global_steps)
    steps(run, other, range(2, 4))
    run.note("rates", other.get_lr())
    run.end(deepspeed, other)
