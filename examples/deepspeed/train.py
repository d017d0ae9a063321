"""A training script for DeepSpeed, with files that `stagebridge convert` made from a Megatron launch.

    stagebridge convert launch.args --to deepspeed --world-size 2 -o ds_config.json
    deepspeed --num_accelerators 2 train.py --deepspeed_config ds_config.json

On a machine without accelerators, start it with DS_ACCELERATOR=cpu in the environment. Several files are trained one after the
other, each from the same weights; the first rank prints a line of JSON for every step.
"""

import argparse
import json
import math
from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from bridge.engine.text import sonnets

HIDDEN, SEQUENCE, VOCAB = 64, 32, 256

# From ds_config.code.py, as convert wrote it.

peak, minimum = 0.005, 0.0005
start, warmup, total = 0.0, 2, 20


def lr_factor(step):
    if step <= warmup:
        return (start + (peak - start) * step / warmup) / peak
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return (minimum + (peak - minimum) * (1 + math.cos(math.pi * done)) / 2) / peak


class Model(nn.Module):
    """A small causal transformer over bytes: tokens (batch, sequence) in, logits (batch, sequence, vocabulary) out."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        layer = nn.TransformerEncoderLayer(
            HIDDEN, 4, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True, bias=False
        )
        self.layers = nn.TransformerEncoder(
            layer, 2, nn.LayerNorm(HIDDEN, bias=False), enable_nested_tensor=False
        )
        self.logits = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.logits(
            self.layers(self.tokens(tokens) + self.positions.weight, mask, is_causal=True)
        )


def settings(path):
    """The file as convert made it. Its AdamW is a kernel for accelerators; on CPU, torch's does the same sums."""
    config = json.loads(Path(path).read_text())
    if not torch.cuda.is_available():
        config["optimizer"]["params"]["torch_adam"] = True
    return config


def batches(rows):
    """Microbatches of this rank: every rank draws its own samples, the same in every run."""
    text = torch.frombuffer(bytearray(sonnets()), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(1 + deepspeed.comm.get_rank())
    while True:
        starts = torch.randint(len(text) - SEQUENCE, (rows,), generator=draw)
        yield torch.stack([text[start : start + SEQUENCE + 1] for start in starts])


def train(path, steps):
    torch.manual_seed(0)
    model = Model()
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lr_factor),
        config=settings(path),
    )
    data, accumulation = (
        batches(engine.train_micro_batch_size_per_gpu()),
        engine.gradient_accumulation_steps(),
    )
    for step in range(steps):
        total_loss = torch.zeros((), device=engine.device)
        for _ in range(accumulation):
            sample = next(data).to(engine.device)
            loss = cross_entropy(
                engine(sample[:, :-1]).flatten(0, 1).float(), sample[:, 1:].flatten()
            )
            engine.backward(loss)
            engine.step()
            total_loss += loss.detach() / accumulation
        deepspeed.comm.all_reduce(total_loss)
        if deepspeed.comm.get_rank() == 0:
            mean = total_loss.item() / deepspeed.comm.get_world_size()
            line = {
                "zero": engine.zero_optimization_stage(),
                "step": step + 1,
                "loss": mean,
                "clip": engine.gradient_clipping(),
            }
            print(json.dumps(line), flush=True)
    engine.destroy()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--deepspeed_config", nargs="+", required=True, help="files from stagebridge convert"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():  # or DeepSpeed compiles collectives in shared memory first
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    for path in arguments.deepspeed_config:
        train(path, arguments.steps)


if __name__ == "__main__":
    main()
