"""The script's own optimizer and a schedule with warmup from transformers."""

import deepspeed
import torch
from transformers import OPTConfig, OPTForCausalLM, get_cosine_schedule_with_warmup


def main(run):
    torch.manual_seed(5)
    shape = {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    model = OPTForCausalLM(
        OPTConfig(**shape, word_embed_proj_dim=32, max_position_embeddings=32, dropout=0.0)
    ).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-6, weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 8)
    config = run.config()
    del config["optimizer"]
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    rates = []
    for step in range(5):
        for tokens in run.tokens(step):
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            run.loss(loss)
        rates += engine.get_lr()
        run.step(engine)
    run.note("rates", rates)
    run.end(deepspeed, engine)
