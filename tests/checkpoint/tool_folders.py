"""Checkpoints as Trainer, accelerate and torch write them, and as Lightning composes them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils
from torch import Tensor
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Trainer, TrainingArguments

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "max_position_embeddings": 32}
LLAMA = LlamaConfig(**SIZES, **HEADS, num_key_value_heads=4)
TIED = LlamaConfig(**SIZES, **HEADS, num_key_value_heads=2, tie_word_embeddings=True)
GROUPED = LlamaConfig(**SIZES, **HEADS, num_key_value_heads=2)
GPT2 = GPT2Config(
    vocab_size=64,
    n_embd=32,
    n_layer=2,
    n_head=4,
    n_positions=32,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
STEPS = 2


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of tokens, each with its labels."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def model_of(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


@dataclass
class TrainedRun:
    """A model that was trained for some steps, with what trains it."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any

    def step(self, number: int) -> float:
        """Train one step. Returns the loss before it."""
        batch = Rows()[number]
        loss = self.model(**{name: row[None] for name, row in batch.items()}).loss
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    @property
    def truth(self) -> dict[tuple[str, str], Tensor]:
        """Every weight and moment, by the name of the parameter and its kind."""
        found: dict[tuple[str, str], Tensor] = {}
        for name, weight in self.model.named_parameters():
            state = self.optimizer.state[weight]
            found[name, "weight"] = weight.detach().clone()
            found |= {(name, kind): state[kind].clone() for kind in ("exp_avg", "exp_avg_sq")}
        return found


def run_of(config: Any, steps: int = STEPS, seed: int = 0) -> TrainedRun:
    """A run of plain torch, with groups as in most scripts: what decays, and what does not."""
    model = model_of(config, seed)
    flat = [weight for weight in model.parameters() if weight.ndim < 2]
    wide = [weight for weight in model.parameters() if weight.ndim > 1]
    rows = [{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(rows, lr=1e-2)
    run = TrainedRun(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10))
    for number in range(steps):
        run.step(number)
    return run


def lightning_state(run: TrainedRun) -> dict[str, Any]:
    """What Lightning's `dump_checkpoint` returns of a module that has the model as its attribute `model`
    (trainer/connectors/checkpoint_connector.py).
    """
    return {
        "epoch": 0,
        "global_step": STEPS,
        "pytorch-lightning_version": "2.5.5",
        "state_dict": {f"model.{name}": held for name, held in run.model.state_dict().items()},
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 1}}}},
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(1.5)}},
        "optimizer_states": [run.optimizer.state_dict()],
        "lr_schedulers": [run.scheduler.state_dict()],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 1e-2},
    }


def file_of(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


def plain_file(run: TrainedRun, folder: Path) -> Path:
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    return file_of(
        {**state, "scheduler": run.scheduler.state_dict(), "epoch": 3}, folder / "run.pt"
    )


def lightning_file(run: TrainedRun, folder: Path) -> Path:
    return file_of(lightning_state(run), folder / "last.ckpt")


def converted_by_torch(make: Callable[[TrainedRun, Path], Path]) -> Callable[..., Path]:
    def convert(run: TrainedRun, folder: Path) -> Path:
        torch_save_to_dcp(make(run, folder), folder / "by_torch")
        return folder / "by_torch"

    return convert


def saved_by_dcp(state: Callable[[TrainedRun], Mapping[str, Any]]) -> Callable[..., Path]:
    def save(run: TrainedRun, folder: Path) -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(dict(state(run)), checkpoint_id=str(folder / "dcp"))
        return folder / "dcp"

    return save


class App(Stateful):
    """The object of torch's tutorial on distributed checkpoints."""

    def __init__(self, run: TrainedRun) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.run.model, self.run.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def under(model: str, optimizer: str) -> Callable[[TrainedRun], dict[str, Any]]:
    def state(run: TrainedRun) -> dict[str, Any]:
        weights, moments = get_state_dict(run.model, run.optimizer)
        return {model: weights, optimizer: moments}

    return state


def torchtitan(run: TrainedRun) -> dict[str, Any]:
    """What torchtitan saves: the model at the top, an optimizer without nesting (components/checkpoint.py)."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    train = {"step": torch.tensor(STEPS, dtype=torch.int32), "ntokens_seen": torch.tensor(128)}
    return {
        **run.model.state_dict(),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=options),
        "lr_scheduler": run.scheduler.state_dict(),
        "train_state": train,
    }


def saved_by_accelerate(safe: bool) -> Callable[[TrainedRun, Path], Path]:
    def save(run: TrainedRun, folder: Path) -> Path:
        accelerator = Accelerator(cpu=True)
        parts = accelerator.prepare(run.model, run.optimizer, run.scheduler)
        accelerator.save_state(str(folder / "state"), safe_serialization=safe)
        accelerator.free_memory(*parts)
        return folder / "state"

    return save


def saved_as_fsdp(kind: str) -> Callable[[TrainedRun, Path], Path]:
    """What accelerate writes for FSDP2, of one process: its type of run needs a GPU, its writers do not."""

    def save(run: TrainedRun, folder: Path) -> Path:
        PartialState(cpu=True)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        alone = SimpleNamespace(process_index=0, num_processes=1, is_fsdp2=True)
        place = folder / "fsdp"
        place.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fsdp_utils.save_fsdp_model(plugin, alone, run.model, str(place))
            fsdp_utils.save_fsdp_optimizer(plugin, alone, run.optimizer, run.model, str(place))
        torch.save(run.scheduler.state_dict(), place / "scheduler.bin")
        return place

    return save


def save_sharded(
    rank: int, world: int, config: Any, folder: Path, kind: str
) -> dict[tuple[str, str], Tensor]:
    """Train with torch's fully_shard on `world` ranks and save as accelerate does. Returns the whole weights and moments."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = model_of(config)
    for block in getattr(model.base_model, "layers", None) or model.base_model.h:
        fully_shard(block)
    fully_shard(model)
    wide, flat = (
        [weight for weight in model.parameters() if (weight.ndim > 1) is side]
        for side in (True, False)
    )
    rows = [{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    run = TrainedRun(
        model,
        optimizer := torch.optim.AdamW(rows, lr=1e-2),
        torch.optim.lr_scheduler.ConstantLR(optimizer),
    )
    for number in range(STEPS):
        run.step(world * number + rank)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    process = SimpleNamespace(
        process_index=rank, num_processes=world, is_fsdp2=True, wait_for_everyone=lambda: None
    )
    PartialState(cpu=True)
    fsdp_utils.save_fsdp_model(plugin, process, model, str(folder))
    fsdp_utils.save_fsdp_optimizer(plugin, process, optimizer, model, str(folder))
    whole = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=whole)
    moments = get_optimizer_state_dict(model, optimizer, options=whole)["state"]
    kinds = ("exp_avg", "exp_avg_sq")
    names = [name for name, _ in model.named_parameters()]  # each tied one once
    return {(name, "weight"): weights[name] for name in names if name in weights} | {
        (name, kind): moments[name][kind] for name in moments for kind in kinds
    }


def save_by_transformers(rank: int, world: int, folder: Path) -> dict[tuple[str, str], Tensor]:
    """Save a run as `save_pretrained(distributed_checkpoint=True)` and `save_optimizer_distributed` of transformers do."""
    from torch.distributed.fsdp import fully_shard
    from transformers.distributed import checkpoint

    run = run_of(GROUPED)
    truth = run.truth
    state = run.optimizer.state_dict()
    for block in run.model.base_model.layers:
        fully_shard(block)
    fully_shard(run.model)
    rows = [
        {
            "params": [weight for weight in run.model.parameters() if (weight.ndim > 1) is side],
            "weight_decay": decay,
        }
        for side, decay in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(rows, lr=1e-2)
    names = {weight: name for name, weight in run.model.named_parameters()}
    numbers = [names[weight] for row in rows for weight in row["params"]]
    whole = {
        "state": {numbers[at]: held for at, held in state["state"].items()},
        "param_groups": [
            {**row, "params": [numbers[at] for at in row.pop("params")]}
            for row in map(dict, state["param_groups"])
            if row.pop("initial_lr")
        ],
    }
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(run.model, optimizer, whole, options=options)
    checkpoint._save_model_checkpoint_distributed(run.model, folder)
    checkpoint.save_optimizer_distributed(run.model, optimizer, str(folder / "optimizer"))
    if rank == 0:
        run.model.config.save_pretrained(folder)
    return truth


MAKERS: dict[str, Callable[[TrainedRun, Path], Path]] = {
    "file": plain_file,
    "lightning": lightning_file,
    "file by torch_save_to_dcp": converted_by_torch(plain_file),
    "lightning by torch_save_to_dcp": converted_by_torch(lightning_file),
    "tutorial": saved_by_dcp(lambda run: {"app": App(run)}),
    "lightning in parts": saved_by_dcp(under("state_dict", "optimizer_0")),
    "model_state_dict": saved_by_dcp(under("model_state_dict", "optimizer_state_dict")),
    "torchtitan": saved_by_dcp(torchtitan),
    "accelerate": saved_by_accelerate(True),
    "accelerate with pickles": saved_by_accelerate(False),
    "accelerate FSDP in parts": saved_as_fsdp("SHARDED_STATE_DICT"),
    "accelerate FSDP": saved_as_fsdp("FULL_STATE_DICT"),
}


def trainer(folder: Path, config: Any, steps: int = 4, **more: Any) -> Trainer:
    """transformers' Trainer with a cosine and a warmup, which saves after two steps."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=steps,
        save_steps=STEPS,
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_steps=1,
        lr_scheduler_type="cosine",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **more,
    )
    return Trainer(model=model_of(config), args=arguments, train_dataset=Rows())


def losses_of(trained: Trainer) -> dict[int, tuple[float, float]]:
    """The loss and the learning rate of each step."""
    rows = [row for row in trained.state.log_history if "loss" in row]
    return {row["step"]: (row["loss"], row["learning_rate"]) for row in rows}


class Loaded:
    """A run of plain torch in the state in which torch's own loader of DCP leaves it."""

    def __init__(self, folder: Path, run: TrainedRun) -> None:
        weights, moments = get_state_dict(run.model, run.optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=str(folder))
        set_state_dict(
            run.model,
            run.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        schedule = {"lr_scheduler": run.scheduler.state_dict()}
        dcp.load(schedule, checkpoint_id=str(folder))
        run.scheduler.load_state_dict(schedule["lr_scheduler"])
        self.run = run
