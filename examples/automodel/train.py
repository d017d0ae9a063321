"""A script in the words of AutoModel's AutoPipeline: a small Llama over two pipeline stages, in under a minute on a CPU.

    torchrun --nproc-per-node 2 examples/automodel/train.py

Only the import differs from a script for AutoModel itself: `from compat.automodel import AutoPipeline` instead of
`from nemo_automodel.components.distributed.pipelining import AutoPipeline`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from compat.automodel import AutoPipeline

ROWS, STEPS = 8, 20


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss of a microbatch."""
    return torch.nn.functional.cross_entropy(
        logits.float().view(-1, logits.size(-1)), targets.reshape(-1)
    )


def counting(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of numbers that count up, and the next ones."""
    first = torch.arange(ROWS).view(-1, 1) + step * ROWS
    rows = (torch.arange(33) * (first % 7 + 1) + first) % 64
    return rows[:, :-1], rows[:, 1:]


def main() -> None:
    """Train over as many pipeline stages as ranks were started."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    pipeline = AutoPipeline(
        world_mesh=mesh,
        pp_schedule="1f1b",
        pp_microbatch_size=2,
        pp_batch_size=ROWS,
        scale_grads_in_schedule=True,
    )
    pipeline.build(LlamaForCausalLM(config), loss_fn=loss_fn)
    print(pipeline.pretty_print_stages(max_modules_per_stage=1), flush=True)
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in pipeline.parts]
    for step in range(STEPS):
        tokens, targets = counting(step)
        losses: list[torch.Tensor] = []
        if pipeline.info.has_first_stage:
            pipeline.info.schedule.step(tokens, target=targets, losses=losses)
        else:
            pipeline.info.schedule.step(target=targets, losses=losses)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if pipeline.info.has_last_stage:
            print(f"step {step + 1}  loss {torch.stack(losses).mean():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
