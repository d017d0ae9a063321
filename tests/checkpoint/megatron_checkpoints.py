"""Real checkpoints of Megatron-Core in small: runs that save as Megatron-LM's own training does, and that go on from one."""

from __future__ import annotations

import queue
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import compat
from bridge.engine.interface import Workload
from bridge.engine.rows import IGNORED
from bridge.layout.architecture import Architecture
from bridge.plan.plan import Plan
from bridge.translation.lift import lift
from compat.megatron.checkpoint.dist import iteration
from compat.megatron.runtime import backend
from compat.megatron.runtime.backend import BACKEND
from tests.checkpoint.checkpoints import ADAM, LENGTH, VOCABULARY, Figures, config_for, tokens_of

RISING = {"lr_warmup_init": 1e-3, "lr_warmup_steps": 9}
"""Learning rates of DeepSpeed's WarmupLR from 0.2 to 1 over 8 steps, which begins a step later."""


SCALE = {
    f"precision.loss_scale.{name}": value
    for name, value in {"initial": 2.0**17, "window": 3, "hysteresis": 1}.items()
}
"""A loss scale that overflows in the first steps, and doubles within the next ones."""


@dataclass(frozen=True)
class Launch:
    """What is trained by Megatron-Core: a model of transformers' `kind`, on a layout, saved with a sharding of the optimizer."""

    kind: str = "llama"
    parallel: Mapping[str, int] = field(default_factory=dict)
    zero: int = 1
    precision: str = "fp32"
    sharding: str = "fully_reshardable"
    batch: int = 4
    load: Path | None = None
    save: Path | None = None
    first: int = 0
    last: int = 3
    form: str = "torch_dist"


@contextmanager
def on_cpu() -> Iterator[None]:
    """What Megatron asks of CUDA, and the processes that it starts, stood in for."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    writer = filesystem_async.FileSystemWriterAsync
    waiting: queue.Queue[Any] = queue.Queue()
    with ExitStack() as stack:
        stack.enter_context(
            patch.object(
                writer, "write_preloaded_data_multiproc", staticmethod(partial(_written, writer))
            )
        )
        stack.enter_context(
            patch.object(filesystem_async, "_get_write_results_queue", lambda: waiting)
        )
        stack.enter_context(patch.object(torch.cuda, "synchronize", lambda device=None: None))
        yield


def _written(
    writer: Any, transforms: Any, use_msc: bool, rank: int, buckets: Any, results: queue.Queue[Any]
) -> None:
    """Megatron's own writing, in this process: ranks of a pool may start none."""
    done: queue.Queue[Any] = queue.Queue()
    counted: queue.Queue[Any] = queue.Queue()
    for number, bucket in enumerate(buckets):
        counted.put(number)
        writer.write_preloaded_data(transforms, number, bucket, done, counted, use_fsync=False)
    results.put(dict(done.get() for _ in buckets))


def plan_of(launch: Launch) -> tuple[Plan, Workload]:
    """The run in the plan's words, and the model that transformers has."""
    described = lift(compat.load("huggingface").read(config_for(launch.kind).to_dict())).model
    values = {
        "batch.micro": 2,
        "batch.global_": launch.batch,
        "precision.compute": launch.precision,
        "optimizer.lr": ADAM["lr"],
        "optimizer.betas": tuple(ADAM["betas"]),
        "optimizer.eps": ADAM["eps"],
        "optimizer.weight_decay": ADAM["weight_decay"],
        "optimizer.decay_scope": "matrices",
        "optimizer.clip": 0.5,
        "zero.stage": launch.zero,
        **(SCALE if launch.precision == "fp16" else {}),
        **{f"parallel.{name}": size for name, size in launch.parallel.items()},
    }
    return Plan.of(values), Workload(
        replace(Architecture.of(described), sequence=LENGTH), 7, model=described
    )


def megatron(rank: int, world: int, launch: Launch) -> Figures:
    """Train with Megatron-Core from step `first` to `last`."""
    plan, workload = plan_of(launch)
    trainer = BACKEND.open(plan, workload)
    try:
        _warm(trainer, launch)
        if launch.load:
            assert trainer.resume(iteration(launch.load)) == launch.first
        found = [
            trainer.train_batch(fed(launch, trainer, step))
            for step in range(launch.first, launch.last)
        ]
        if launch.save:
            with trainer.running():
                (save if launch.form == "torch_dist" else save_parts)(trainer, launch)
        return np.array([(step.loss, step.grad_norm) for step in found])
    finally:
        trainer.close()


def _warm(trainer: Any, launch: Launch) -> None:
    """A scheduler that counts samples, as Megatron-LM's own does (training.py: train_step)."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    scheduler = OptimizerParamScheduler(
        trainer.optimizer,
        init_lr=RISING["lr_warmup_init"],
        max_lr=ADAM["lr"],
        min_lr=0.0,
        lr_warmup_steps=RISING["lr_warmup_steps"] * launch.batch,
        lr_decay_steps=10**6,
        lr_decay_style="constant",
        start_wd=ADAM["weight_decay"],
        end_wd=ADAM["weight_decay"],
        wd_incr_steps=10**6,
        wd_incr_style="constant",
        override_opt_param_scheduler=True,
        use_checkpoint_opt_param_scheduler=False,
    )
    trainer.scheduler = Counting(scheduler, launch.batch)


@dataclass(frozen=True)
class Counting:
    """A scheduler that is told of steps, and takes as many samples for each."""

    scheduler: Any
    batch: int

    def step(self, increment: int) -> None:
        """So many steps more."""
        self.scheduler.step(increment * self.batch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A state that counts steps."""
        counts = {key: value * self.batch for key, value in state.items() if key.endswith("_steps")}
        self.scheduler.load_state_dict({**state, **counts})


def fed(launch: Launch, trainer: Any, step: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's microbatches of a step, the same over all ranks on any layout."""
    rank, ranks = trainer.data
    tokens = tokens_of(launch, step, rank, ranks)  # type: ignore[arg-type]
    targets = torch.cat((tokens[:, 1:], torch.full((len(tokens), 1), IGNORED)), 1)
    return list(zip(tokens.split(trainer.micro), targets.split(trainer.micro), strict=True))


def metadata_of(launch: Launch) -> dict[str, Any]:
    """What Megatron-LM gives the makers of sharded state dicts (checkpointing.py: _build_sharded_state_dict_metadata)."""
    from megatron.core import parallel_state

    sharding = {"distrib_optim_sharding_type": launch.sharding} if launch.zero else {}
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {
        **sharding,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": group,
    }


def state_of(trainer: Any, launch: Launch) -> dict[str, Any]:
    """What Megatron-LM saves (checkpointing.py: generate_state_dict)."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing import ShardedObject

    from compat.megatron.runtime.model import bare

    metadata = metadata_of(launch)
    state: dict[str, Any] = {
        "args": args_of(launch),
        "checkpoint_version": 3.0,
        "iteration": launch.last,
    }
    state["num_floating_point_operations_so_far"] = 17
    for number, chunk in enumerate(trainer.chunks):
        state["model" if len(trainer.chunks) == 1 else f"model{number}"] = bare(
            chunk
        ).sharded_state_dict(metadata=metadata)
    state["optimizer"] = trainer.optimizer.sharded_state_dict(state, metadata=metadata)
    state["opt_param_scheduler"] = trainer.scheduler.scheduler.state_dict()
    random = {
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    stages = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    state["rng_state"] = ShardedObject("rng_state", [random], stages, place, replica_id=replica)
    return state


def flags_of(launch: Launch, ranks: int) -> str:
    """The flags of the run, as a file has them."""
    plan, workload = plan_of(launch)
    with patch.object(backend, "_world", lambda: ranks):
        return BACKEND.config(plan, workload).text("flags")


def args_of(launch: Launch) -> Namespace:
    """The arguments that Megatron-LM keeps with a checkpoint, as far as the model and the layout go."""
    plan, workload = plan_of(launch)
    args = dict(BACKEND.config(plan, workload).args.flat())
    args["consumed_train_samples"] = launch.batch * launch.last
    args["padded_vocab_size"] = -(
        -VOCABULARY // launch.parallel.get("tensor", 1)
    ) * launch.parallel.get("tensor", 1)
    args["seq_length"] = args["max_position_embeddings"] = LENGTH
    args["params_dtype"] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
        launch.precision
    ]
    return Namespace(**args)


def save(trainer: Any, launch: Launch) -> None:
    """Save into `save/iter_NNNNNNN` and name it in the tracker, as Megatron-LM does."""
    from megatron.core import dist_checkpointing

    assert launch.save is not None
    place = launch.save / f"iter_{launch.last:07d}"
    place.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    with on_cpu():
        content = {key: value for key, value in metadata_of(launch).items() if key != "dp_cp_group"}
        ordinary = partial(_without, ("args",))
        state = state_of(trainer, launch)
        dist_checkpointing.save(
            state,
            str(place),
            preprocess_common_before_consistancy_check=ordinary,
            content_metadata=content,
        )
    (launch.save / "latest_checkpointed_iteration.txt").write_text(str(launch.last))
    torch.distributed.barrier()


def save_parts(trainer: Any, launch: Launch) -> None:
    """Save a file for each rank, as Megatron-LM does with --ckpt-format torch (checkpointing.py: get_checkpoint_name)."""
    from megatron.core import parallel_state

    from compat.megatron.runtime.model import bare

    assert launch.save is not None
    tensor, stage = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    name = f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if stages > 1 else "")
    place = launch.save / f"iter_{launch.last:07d}" / name
    place.mkdir(parents=True, exist_ok=True)
    args = args_of(launch)
    args.rank = torch.distributed.get_rank()
    state = {"args": args, "checkpoint_version": 3.0, "iteration": launch.last}
    state["model"] = bare(trainer.chunks[0]).state_dict_for_save_checkpoint()
    state["optimizer"] = trainer.optimizer.state_dict()
    state["opt_param_scheduler"] = trainer.scheduler.scheduler.state_dict()
    if parallel_state.get_data_parallel_rank() == 0:
        torch.save(state, place / "model_optim_rng.pt")
    (launch.save / "latest_checkpointed_iteration.txt").write_text(str(launch.last))
    torch.distributed.barrier()


def _without(keys: tuple[str, ...], state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in keys}
