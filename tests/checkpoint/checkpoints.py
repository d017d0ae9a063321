"""Real checkpoints in small: runs of DeepSpeed and of the native engine that save, and that go on from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.engine.oracles import real_deepspeed

VOCABULARY, LENGTH = 31, 12
ADAM: Mapping[str, Any] = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
WARMUP = {
    "warmup_num_steps": 8,
    "warmup_max_lr": 1e-2,
    "warmup_min_lr": 0.0,
    "warmup_type": "linear",
}


@dataclass(frozen=True)
class Task:
    """What is trained: `batch` sequences a step over all ranks, in `precision`, at a level of sharding. `matrices` alone decay;
    `ends` is the learning rate of the embedding and the output, in a group of their own; frozen parameters may be `excluded`.
    """

    kind: str = "llama"
    precision: str = "fp32"
    level: int = 2
    batch: int = 4
    load: Path | None = None
    save: Path | None = None
    first: int = 0
    last: int = 3
    universal: bool = False
    adam: Mapping[str, Any] = field(default_factory=lambda: {"torch_adam": True})
    matrices: bool = False
    ends: float | None = None
    zero: Mapping[str, Any] = field(default_factory=dict)
    excluded: bool = False
    warmup: Mapping[str, Any] = field(default_factory=lambda: WARMUP)


class Odd(nn.Module):
    """What checkpoints hold beside weights: a tied weight, a buffer, a frozen parameter, and sizes that no rank count divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens = nn.Embedding(VOCABULARY, 7)
        self.mixed = nn.Linear(7, 7)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(7, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Scores of the next token."""
        hidden = (
            self.mixed(self.tokens(input_ids)).tanh() * self.scale
            + self.frozen.sum().to(self.scale.dtype) * 0.01
        )
        return self.head(hidden)


def config_for(kind: str) -> Any:
    """The config of transformers of a small model of a family."""
    from transformers import GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config

    if kind == "gpt2":
        sizes = {
            "n_positions": LENGTH,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "initializer_range": 0.2,
        }
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2Config(
            **sizes,
            **none,
            vocab_size=VOCABULARY,
            activation_function="gelu",
            architectures=["GPT2LMHeadModel"],
        )
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    more = {
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": kind == "tied",
        "initializer_range": 0.2,
    }
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "mixtral" else {}
    made = {"mixtral": MixtralConfig, "qwen2": Qwen2Config}.get(kind, LlamaConfig)
    name = {"mixtral": "MixtralForCausalLM", "qwen2": "Qwen2ForCausalLM"}.get(
        kind, "LlamaForCausalLM"
    )
    return made(**sizes, **more, **experts, vocab_size=VOCABULARY, architectures=[name])


def model_of(kind: str) -> nn.Module:
    """A small model of a family."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    found: nn.Module = (
        Odd() if kind == "odd" else AutoModelForCausalLM.from_config(config_for(kind))
    )
    return found


def scores(net: nn.Module, tokens: Tensor) -> Tensor:
    """Whatever the family returns."""
    found = net(input_ids=tokens)
    return getattr(found, "logits", found)


def tokens_of(task: Task, step: int, rank: int, ranks: int) -> Tensor:
    """The sequences of this rank in a step, the same over all ranks on any number of them."""
    generator = torch.Generator().manual_seed(100 + step)
    rows = torch.randint(0, VOCABULARY, (task.batch, LENGTH), generator=generator)
    share = task.batch // ranks
    return rows[rank * share : (rank + 1) * share]


def loss_of(found: Tensor, tokens: Tensor) -> Tensor:
    """The mean loss of the next token."""
    return nn.functional.cross_entropy(found[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def config_of(task: Task, ranks: int) -> dict[str, Any]:
    """What DeepSpeed is given."""
    halves = {
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 4},
        "bf16": {"enabled": True},
    }
    return {
        "train_micro_batch_size_per_gpu": task.batch // ranks,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {**ADAM, **task.adam}},
        **({"scheduler": {"type": "WarmupLR", "params": dict(task.warmup)}} if task.warmup else {}),
        "zero_optimization": {"stage": task.level, **task.zero},
        "gradient_clipping": 0.5,
        **({task.precision: halves[task.precision]} if task.precision in halves else {}),
        **({"checkpoint": {"load_universal": True}} if task.universal else {}),
    }


def trained_of(net: nn.Module, task: Task) -> Any:
    """What the optimizer gets: all parameters, or matrices and, without decay, vectors; and the ends at a rate of their own."""
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    if not task.matrices:
        return weights
    sides: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    for weight in weights:
        sides[2 if task.ends and VOCABULARY in weight.shape else weight.dim() == 1].append(weight)
    last = [{"params": sides[2], "lr": task.ends, "betas": (0.8, 0.9)}] if task.ends else []
    return [{"params": sides[0]}, {"params": sides[1], "weight_decay": 0.0}, *last]


def rate_of(task: Task, step: int) -> float:
    """The learning rate of DeepSpeed's WarmupLR."""
    least, most = task.warmup["warmup_min_lr"], task.warmup["warmup_max_lr"]
    return float(
        least + (most - least) * min(1.0, max(0, step - 1) / task.warmup["warmup_num_steps"])
    )


Figures = np.ndarray[Any, np.dtype[np.float64]]
"""A row for each step: its loss, a mean over all ranks, and the norm of all gradients before clipping."""


def deepspeed(rank: int, world: int, task: Task) -> Figures:
    """Train with DeepSpeed from step `first` to `last`."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    ds = real_deepspeed()
    net = model_of(task.kind)
    engine, *_ = ds.initialize(
        model=net,
        model_parameters=trained_of(net, task),
        config=config_of(task, world),
        dist_init_required=False,
    )
    found = continued(engine, rank, world, task)
    engine.destroy()
    return found


def continued(engine: Any, rank: int, world: int, task: Task) -> Figures:
    """The steps, from the checkpoint that is named and into another."""
    if task.load:
        path, client = engine.load_checkpoint(str(task.load))
        assert (
            path is not None and client.get("epoch", 3) == 3 and engine.global_steps == task.first
        )
    found = trained(engine, rank, world, task)
    if task.save:
        more = {"exclude_frozen_parameters": True} if task.excluded else {}
        engine.save_checkpoint(str(task.save), client_state={"epoch": 3}, **more)
    return found


def trained(engine: Any, rank: int, world: int, task: Task) -> Figures:
    """The steps."""
    found = []
    for step in range(task.first, task.last):
        tokens = tokens_of(task, step, rank, world)
        loss = loss_of(scores(engine, tokens), tokens)
        engine.backward(loss)
        engine.step()
        found.append(
            (
                _mean(loss.detach(), world),
                float(nan if (norm := engine.get_global_grad_norm()) is None else norm),
            )
        )
    return np.array(found)


def _mean(loss: Tensor, world: int) -> float:
    total = loss.double()
    if world > 1:
        torch.distributed.all_reduce(total)
    return float(total / world)


def native(rank: int, world: int, task: Task) -> Figures:
    """Train with the native engine behind DeepSpeed's interface, with its schedulers."""
    import compat.deepspeed as ds

    net = model_of(task.kind)
    engine, *_ = ds.initialize(
        model=net, model_parameters=trained_of(net, task), config=config_of(task, world)
    )
    return continued(engine, rank, world, task)


def fsdp(rank: int, world: int, task: Task) -> Figures:
    """Train with torch's fully_shard and AdamW; saves and loads as torch.distributed.checkpoint does."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model_of(task.kind)
    mesh = init_device_mesh("cpu", (world,))
    for layer in getattr(getattr(net, "model", net), "layers", []):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained_of(net, task), **{**ADAM, "betas": tuple(ADAM["betas"])})
    if task.load:
        found, held = get_state_dict(net, optimizer)
        state = {"model": found, "optimizer": held, "step": 0}
        dcp.load(state, checkpoint_id=str(task.load))
        set_state_dict(
            net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        assert state["step"] == task.first
    losses = []
    for step in range(task.first, task.last):
        tokens = tokens_of(task, step, rank, world)
        for group in optimizer.param_groups:
            group["lr"] = rate_of(task, step)
        loss = loss_of(scores(net, tokens), tokens)
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(weights, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((_mean(loss.detach(), world), float(norm.full_tensor())))
    if task.save:
        found, held = get_state_dict(net, optimizer)
        dcp.save(
            {"model": found, "optimizer": held, "step": task.last, "epoch": 3},
            checkpoint_id=str(task.save),
        )
    return np.array(losses)


PARTS: Mapping[str, Mapping[str, Any]] = {
    "stages that share words": {
        "parallel.pipeline": 2,
        "zero.stage": 1,
        "precision.compute": "bf16",
    },
    "stages": {"parallel.pipeline": 2, "zero.stage": 1},
    "tensor ranks": {"parallel.tensor": 2, "zero.stage": 2, "precision.compute": "bf16"},
    "tensor ranks without sharding": {"parallel.tensor": 2, "zero.stage": 0},
    "tensor ranks at level 3": {"parallel.tensor": 2, "zero.stage": 3},
}
"""Plans under which DeepSpeed's ranks share a model."""


def in_parts(rank: int, world: int, name: str, save: Path) -> Mapping[str, Tensor]:
    """Two steps of DeepSpeed's pipeline engine or AutoTP with the native GPT, saved; all masters by the GPT's own names."""
    real_deepspeed()
    from bridge.engine.interface import Workload
    from bridge.layout.architecture import Architecture
    from bridge.plan.plan import Plan
    from compat.deepspeed.runtime.backend import BACKEND

    rows = {
        f"optimizer.{key}": tuple(value) if key == "betas" else value for key, value in ADAM.items()
    }
    sizes = {
        "layers": 3,
        "hidden": 16,
        "heads": 4,
        "kv_heads": 4,
        "ffn": 32,
        "vocab": 32,
        "sequence": LENGTH,
    }
    shape = Architecture(**sizes, tied="words" in name)
    plan = Plan.of(
        {
            "optimizer.name": "adamw",
            **rows,
            "batch.micro": 2,
            "batch.accumulation": 2,
            **PARTS[name],
        }
    )
    trainer: Any = BACKEND.open(plan, Workload(shape, 7))
    try:
        for step in range(2):
            tokens = torch.randint(
                0, 32, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step)
            )
            trainer.train_batch(
                [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens.split(2)]
            )
        trainer.engine.save_checkpoint(str(save), client_state={"epoch": 3})
        return {name: weight.clone() for name, weight in trainer.weights().items()}
    finally:
        trainer.close()


def automodel(rank: int, world: int, save: Path) -> None:
    """What AutoModel's checkpointer writes of a step of fully_shard (its state dicts are torch's, the optimizer's one flat)."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model_of("llama")
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(
        trained_of(net, Task(matrices=True)), **{**ADAM, "betas": tuple(ADAM["betas"])}
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    tokens = tokens_of(Task(), 0, rank, world)
    loss_of(scores(net, tokens), tokens).backward()
    optimizer.step()
    schedule.step()
    flat = get_optimizer_state_dict(
        net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    dcp.save(get_model_state_dict(net), checkpoint_id=str(save / "model"))
    dcp.save({"optim": flat, "sched": schedule.state_dict()}, checkpoint_id=str(save / "optim"))
    whole = {name: weight.full_tensor() for name, weight in net.named_parameters()}  # type: ignore[operator]
    moments = {
        name: optimizer.state[weight]["exp_avg"].full_tensor()
        for name, weight in net.named_parameters()
    }
    if rank == 0:
        torch.save((whole, moments), save.with_suffix(".pt"))
        (save / "rng.pt").touch()
