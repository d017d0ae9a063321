"""A training step of models of transformers on two ranks, as a ratio to FSDP2's, DDP's and DTensor's.

A Llama and a Mixtral of four blocks, width 512, 2,048 tokens a rank. Prints the table of README.md, row by row.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from engine import RANKS, TIMEOUT, Pair, Time, line, ratios

from bridge.engine import initialize
from bridge.plan.plan import Plan
from tests.engine.pool import Pool

BOUNDS = (
    ("zero 2", "fsdp2 whole", 1.0),
    ("zero 3", "fsdp2", 1.0),
    ("zero 0", "ddp", 1.05),
    ("tensor", "dtensor", 0.95),
)
"""What is compared with what, and the largest ratio wanted."""
TITLES = {
    "fsdp2 whole": "FSDP2, not resharded",
    "fsdp2": "FSDP2",
    "ddp": "DDP",
    "dtensor": "DTensor",
}
SIZES: Mapping[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
SEQUENCES, SEQUENCE = 8, 256
CLIP, RATE = 1.0, 1e-3
COLUMNS = ("model", "engine", "beside", "engine", "other", "wall time", "processor time", "bound")
Step = Callable[[], float]


def model(kind: str) -> nn.Module:
    """The same on every rank. Experts run one by one, as on any processor."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    experts = (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 688}
        if kind == "mixtral"
        else {}
    )
    config = CONFIG_MAPPING[kind](**{**SIZES, **experts}, use_cache=False)
    config._experts_implementation = "eager"
    torch.manual_seed(1)
    found: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return found.train()


def batch(rank: int, world: int, whole: bool) -> dict[str, Tensor]:
    """A rank's sequences, or those of all ranks."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(SIZES["vocab_size"], (SEQUENCES * world, SEQUENCE), generator=generator)
    own = tokens if whole else tokens[rank * SEQUENCES : (rank + 1) * SEQUENCES]
    return {"input_ids": own, "labels": own}


def native(kind: str, name: str, data: Mapping[str, Tensor]) -> Step:
    """The engine at a ZeRO level, or with two tensor ranks."""
    layout = {"parallel.tensor": RANKS} if name == "tensor" else {"zero.stage": int(name[-1])}
    engine = initialize(
        model(kind), Plan.of({"optimizer.lr": RATE, "optimizer.clip": CLIP, **layout})
    )
    return lambda: engine.train_batch([dict(data)])


def torch_step(kind: str, name: str, data: Mapping[str, Tensor]) -> Step:
    """DDP, FSDP2 with a unit for each block, or DTensor; torch's fused AdamW."""
    net: Any = model(kind)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if name == "ddp":
        net = DistributedDataParallel(net, gradient_as_bucket_view=True)
    elif name == "dtensor":
        split(net, mesh)
    else:
        for block in net.model.layers:
            fully_shard(block, mesh=mesh, reshard_after_forward=name == "fsdp2")
        fully_shard(net, mesh=mesh, reshard_after_forward=name == "fsdp2")
    weights: list[list[Tensor]] = [[], []]
    for weight in net.parameters():
        weights[hasattr(weight, "placements")].append(weight)
    groups = [{"params": part} for part in weights if part]
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=0.0, fused=True)

    def step() -> float:
        loss = net(**data).loss
        loss.backward()
        clip([part for part in weights if part])
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    return step


def clip(parts: list[list[Tensor]]) -> None:
    """By one norm over plain tensors and DTensors."""
    norms = [
        nn.utils.get_total_norm([weight.grad for weight in part if weight.grad is not None])
        for part in parts
    ]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    norm = torch.stack(whole).square().sum().sqrt()
    factor = float((CLIP / (norm + 1e-6)).clamp(max=1.0))
    for part in parts:
        torch._foreach_mul_([weight.grad for weight in part if weight.grad is not None], factor)


def split(net: Any, mesh: Any) -> None:
    """Columns, then rows, in each block; rows of the words, columns of the head."""
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    styles = {
        **{f"model.layers.*.self_attn.{name}": ColwiseParallel() for name in columns[:3]},
        **{f"model.layers.*.mlp.{name}": ColwiseParallel() for name in columns[3:]},
        f"model.layers.*.self_attn.{rows[0]}": RowwiseParallel(),
        f"model.layers.*.mlp.{rows[1]}": RowwiseParallel(),
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(net, mesh, styles)


def compared(rank: int, world: int, kind: str, ours: str, theirs: str, pairs: int) -> list[Pair]:
    """Times of both, measured in turns; the first of a pair changes from pair to pair."""
    data = batch(rank, world, ours == "tensor")
    steps = [native(kind, ours, data), torch_step(kind, theirs, data)]
    losses = torch.tensor([[step() for _ in range(3)] for step in steps])
    assert torch.allclose(losses[0], losses[1], rtol=1e-3), losses.tolist()
    found = []
    for pair in range(pairs):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        times = {index: timed(steps[index]) for index in order}
        found.append((times[0], times[1]))
    return found


def timed(step: Step) -> Time:
    """Time of one step, which all ranks start together."""
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    step()
    return Time(time.perf_counter() - wall, time.process_time() - processor)


def main() -> None:
    """Print one row for each comparison."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", default="", help="compare only names that contain this")
    given = parser.parse_args()
    pool = Pool(RANKS)
    print(line(COLUMNS), line("---" for _ in COLUMNS).replace(" ", ""), sep="\n", flush=True)
    for kind in ("llama", "mixtral"):
        for ours, theirs, bound in BOUNDS:
            if given.only in f"{kind} {ours} {theirs}" and not (
                kind == "mixtral" and ours == "tensor"
            ):
                found = pool.run(compared, kind, ours, theirs, given.pairs, timeout=TIMEOUT)[0]
                print(row(kind, ours, theirs, bound, found), flush=True)
    pool.close()


def row(kind: str, ours: str, theirs: str, bound: float, found: list[Pair]) -> str:
    """One line of the table."""
    cells = [kind.capitalize(), ours.replace("zero", "ZeRO"), TITLES[theirs]]
    cells += [
        f"{sorted(pair[index].wall for pair in found)[len(found) // 2] * 1e3:.0f} ms"
        for index in (0, 1)
    ]
    for what in ("wall", "processor"):
        each = ratios(found, what)
        cells.append(f"{each[len(each) // 2]:.2f} ({each[0]:.2f} to {each[-1]:.2f})")
    return line([*cells, f"{bound:.2f}"])


if __name__ == "__main__":
    main()
