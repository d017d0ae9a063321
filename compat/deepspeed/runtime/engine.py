"""DeepSpeed's engine, method for method, over the native one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from bridge.dialect import Config
from bridge.engine import buffers
from bridge.engine.checkpoint import LATEST, together
from bridge.engine.formats import TORCH
from bridge.engine.layers import loss_in
from bridge.engine.runner import Engine, fitting
from bridge.errors import BridgeError, ConfigError
from bridge.findings import Finding
from bridge.state.schema import read as read_state

EVALUATE = "evaluate"
EPOCHS = ("last_batch_iteration", "last_epoch")
"""What schedulers of DeepSpeed and torch call how far they have come."""
CLIENT, OWN = "client_state", "deepspeed"
NO_OPTIMIZER = "no optimizer: name one in the config, or pass optimizer to initialize"


def _converted(path: Path) -> dict[str, Any]:
    """What a checkpoint that was converted from DeepSpeed's says of scheduler and groups."""
    carried = read_state(path, path).carried
    groups: Any = carried.get("groups") or []
    return {"lr_scheduler": carried.get("schedule"), "groups": [group["settings"] for group in groups]}


class DeepSpeedEngine:
    """What `deepspeed.initialize` returns first. Attributes that it lacks are the model's.

    The native engine is `native`, what it does otherwise than the config says is `findings`.
    """

    def __init__(
        self,
        native: Engine,
        read: Config,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: Any,
        collate_fn: Callable[..., Any] | None = None,
        loss_fn: Callable[..., Any] | None = None,
        local_rank: int = 0,
    ) -> None:
        self.native, self.optimizer, self.lr_scheduler = native, optimizer, lr_scheduler
        self.collate_fn, self.loss_fn, self.local_rank = collate_fn, loss_fn, local_rank
        self.config, self._values = read.ds_config, read.effective  # type: ignore[attr-defined]
        self.training_dataloader: DataLoader[Any] | None = None
        self.device, self.global_rank, self.world_size = native.device, native.comm.rank, native.comm.world.size
        self.dp_world_size, self.mp_world_size = native.data.size, native.tensor.size
        self._iterator: Iterator[Any] | None = None
        self._last: Any = None
        self._applied, self._calls, self._moved = False, 0, self._epoch()
        self._stepping = self._told_twice = False

    def __getattr__(self, name: str) -> Any:
        """An attribute of the model."""
        if name.startswith("__") or name == "native":
            raise AttributeError(name)
        return getattr(self.native.module, name)

    # Training

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model's output for one microbatch."""
        return self.native(*inputs, **named)

    forward = __call__

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Gradients of a microbatch's mean loss; returns it divided by the number of microbatches, as DeepSpeed does."""
        self._needs_optimizer("backward")
        if retain_graph:
            raise BridgeError("backward: retain_graph is not there; add the losses up and call backward once")
        scale = 1 if scale_wrt_gas else self.gradient_accumulation_steps()
        return self.native.backward(loss * scale if scale > 1 else loss) / self.gradient_accumulation_steps()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update after the last microbatch of a step, and move the scheduler; before, count only."""
        self._needs_optimizer("step")
        if not self.native.is_gradient_accumulation_boundary():
            self._applied, self._calls = False, self._calls + 1
            return
        self._applied, self._calls = self.native.step(), 0
        if self._applied:
            self._tell(lr_kwargs or {})
        self._print()

    def train_batch(self, data_iter: Iterable[Any] | None = None) -> Tensor:
        """One step over the next microbatches of `data_iter` (default: the training data, over and over); the mean loss over
        all ranks.

        With a `loss_fn` of the model, as DeepSpeed's PipelineModule has, a batch is (inputs, labels); else it is what the
        model takes (a tuple or a mapping: argument by argument), and the model returns the loss.
        """
        self.train()
        source = self._batches() if data_iter is None else iter(fitting(data_iter, self.gradient_accumulation_steps()))
        for _ in range(self.gradient_accumulation_steps()):
            self.backward(self._loss(self._fed(source))[0])
            self.step()
        return torch.tensor(self.native.progress.loss, device=self.device)

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterable[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The mean loss over the next microbatches of `data_iter` and all ranks; with `return_logits`, outputs too.

        Without `compute_loss`: a list of outputs. `reduce_output` None: a list of this rank's losses.
        """
        training, source = self.native.module.training, iter(data_iter)
        self.eval()
        try:
            batches = [self._next(source) for _ in range(num_micro_batches or self.gradient_accumulation_steps())]
            if not compute_loss:
                return [self._output(batch) for batch in batches]
            found = [self._loss(batch) for batch in batches]
        finally:
            self.train(training)
        losses = [loss for loss, _ in found]
        answer = losses if reduce_output is None else self._mean(losses)
        return (answer, [output for _, output in found]) if return_logits else answer

    def train(self, mode: bool = True) -> None:
        """Set training mode."""
        self.native.train(mode)

    def eval(self) -> None:
        """Set evaluation mode."""
        self.native.eval()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing: the engine reduces gradients to their owners when its buffers ask for it, and counts microbatches itself."""
        yield

    def zero_grad(self) -> None:
        """Nothing: every step begins with gradients of its own."""

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current microbatch is the last of its step."""
        return self.native.is_gradient_accumulation_boundary() or self._calls + 1 == self.gradient_accumulation_steps()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Check that the script's own count of microbatches is that of the config, by which the engine goes."""
        place, number = self.native.microbatch + 1, self.gradient_accumulation_steps()
        if is_boundary != (place == number):
            raise BridgeError(
                f"set_gradient_accumulation_boundary: found {is_boundary} at microbatch {place} of {number}; set"
                " gradient_accumulation_steps to the number of backward() calls in a step"
            )

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed weights."""
        return self._applied

    # What a script asks

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.native.module

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the engine does otherwise than the config says."""
        return self.native.findings

    @property
    def global_steps(self) -> int:
        """Steps taken, skipped ones too."""
        return self.native.progress.steps + self.native.progress.skipped

    @property
    def skipped_steps(self) -> int:
        """Steps skipped for an overflow."""
        return self.native.progress.skipped

    @property
    def global_samples(self) -> int:
        """Samples consumed over all ranks."""
        return self.native.progress.samples

    @property
    def micro_steps(self) -> int:
        """Microbatches stepped over."""
        return self.global_steps * self.gradient_accumulation_steps() + self._calls

    @property
    def cur_scale(self) -> float:
        """The loss scale now."""
        return self.native.scaler.scale

    def train_batch_size(self) -> int:
        """Samples in a step over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.dp_world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples in a microbatch on one rank."""
        return int(self._values["train_micro_batch_size_per_gpu"])

    def gradient_accumulation_steps(self) -> int:
        """Microbatches in a step."""
        return self.native.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples in a step, samples in a microbatch on one rank, microbatches in a step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def get_lr(self) -> list[float]:
        """Learning rates, group by group."""
        return self._each("lr")

    def get_mom(self) -> list[Any]:
        """Momentum or betas, group by group."""
        return self._each("momentum" if isinstance(self.optimizer, torch.optim.SGD) else "betas")

    def get_global_grad_norm(self) -> float | None:
        """Norm of all gradients of the last step before clipping; None before the first."""
        return self.native.progress.grad_norm if self.global_steps else None

    def gradient_clipping(self) -> float:
        """Bound on the gradient norm; 0 is none."""
        return self.native.plan.optimizer.clip or 0.0

    def zero_optimization_stage(self) -> int:
        """ZeRO's level."""
        return int(self._values["zero_optimization.stage"])

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def fp16_enabled(self) -> bool:
        """Whether it computes in fp16."""
        return self.native.plan.precision.compute == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether it computes in bf16."""
        return self.native.plan.precision.compute == "bf16"

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.native.scaler.window is not None

    def loss_scale(self) -> float:
        """The constant loss scale; 0 stands for a dynamic one."""
        return 0 if self.dynamic_loss_scale() else self.cur_scale

    def get_data_parallel_rank(self) -> int:
        """This rank's place among data ranks."""
        return self.native.data.index

    def get_tensor_parallel_rank(self) -> int:
        """This rank's place among tensor ranks."""
        return self.native.tensor.index

    get_model_parallel_rank = get_tensor_parallel_rank

    # Data

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader of this rank's samples, in DeepSpeed's order: shuffled for training, the same in every epoch."""
        if not (isinstance(dataset, IterableDataset) or (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))):
            raise ConfigError(f"training_data: found {type(dataset).__name__}, expected a dataset of torch")
        sampler = None if isinstance(dataset, IterableDataset) else data_sampler or self._sampler(dataset, route == "train")
        return DataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            sampler=sampler,
            collate_fn=collate_fn or self.collate_fn,
            pin_memory=pin_memory and self.device.type == "cuda",
            drop_last=bool(self._values.get("dataloader_drop_last")),
            num_workers=num_local_io_workers or 0,
        )

    def _sampler(self, dataset: Any, shuffle: bool) -> DistributedSampler[Any]:
        return DistributedSampler(dataset, self.dp_world_size, self.native.data.index, shuffle=shuffle)

    # Checkpoints

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint of the native engine, with the scheduler and the optimizer's settings. All ranks must take part."""
        if exclude_frozen_parameters:
            raise BridgeError("save_checkpoint: exclude_frozen_parameters is not there; a checkpoint holds the whole model")
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        self.native.save_checkpoint(save_dir, name, {CLIENT: dict(client_state or {}), OWN: self._state()}, save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continue from a checkpoint of the native engine, of any layout; its path and the client's state.

        (None, None) with a warning where nothing was saved yet, as DeepSpeed has it.
        """
        if not load_module_strict or custom_load_fn is not None:
            raise BridgeError("load_checkpoint: names must match; leave load_module_strict and custom_load_fn as they are")
        if tag is None and not (Path(load_dir) / LATEST).is_file():
            warnings.warn(f"{load_dir}: no file {LATEST!r} there, so nothing is loaded", stacklevel=2)
            return None, None
        before = replace(self.native.progress)
        optimizer = load_optimizer_states and not load_module_only
        path, state = self.native.load_checkpoint(load_dir, None if tag is None else str(tag), optimizer)
        if load_module_only:
            self.native.progress = before
        else:
            self._restore(state.get(OWN) or _converted(path), load_optimizer_states, load_lr_scheduler_states)
            self._moved = self._epoch()
        return str(path), state.get(CLIENT, {}) if OWN in state else state

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole model as `torch.save` does: weights in the compute format, buffers as they are, and every name of a
        tensor that several share, so that a fresh model takes it strictly. All ranks must take part.
        """
        model = self.native.model
        BridgeError.raise_if(
            f"save_16bit_model: {name} of the model's state is no tensor; keep it in a buffer" for name in buffers.others(model)
        )
        compute = TORCH[self.native.plan.precision.compute or "fp32"]
        found = {name: weight.to(compute).cpu() for name, weight in self.native.state_dict()}
        found.update((name, held.cpu()) for name, held in buffers.whole(self.native))
        if exclude_frozen_parameters:
            found = {name: held for name, held in found.items() if name not in self._frozen()}
        whole = {alias: found[name] for alias, name in buffers.aliases(model).items() if name in found}
        with together(self.native):
            if self.global_rank == 0:
                _write(whole, Path(save_dir), save_filename)
        return True

    def _frozen(self) -> set[str]:
        return {parameter.name for parameter in self.native.parameters if not parameter.trainable}

    def destroy(self) -> None:
        """Leave the process group in good order."""
        self.native.close()

    # Parts

    def _state(self) -> dict[str, Any]:
        scheduler = self.lr_scheduler.state_dict() if hasattr(self.lr_scheduler, "state_dict") else None
        groups = self.optimizer.param_groups if self.optimizer else []
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        return {"lr_scheduler": scheduler, "groups": settings}

    def _restore(self, state: Mapping[str, Any], optimizer: bool, scheduler: bool) -> None:
        saved = state.get("groups", []) if optimizer and self.optimizer else []
        for group, settings in zip(self.optimizer.param_groups if saved and self.optimizer else [], saved, strict=False):
            group.update({name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()})
        if scheduler and self.lr_scheduler is not None and state.get("lr_scheduler"):
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])

    def _needs_optimizer(self, what: str) -> None:
        if self.optimizer is None:
            raise BridgeError(f"{what}: {NO_OPTIMIZER}")

    def _tell(self, lr_kwargs: Mapping[str, Any]) -> None:
        """Let the optimizer's own hooks run (it has no gradients of its own, so nothing else happens), then its scheduler."""
        assert self.optimizer is not None
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False
        if self.lr_scheduler is not None:
            self._twice()
            self.lr_scheduler.step(**lr_kwargs)
            self._moved = self._epoch()

    def stepping(self) -> bool:
        """Whether the engine itself calls the optimizer's `step` now."""
        return self._stepping

    def _epoch(self) -> Any:
        """How far the scheduler has come, where it says so."""
        return next((getattr(self.lr_scheduler, name) for name in EPOCHS if hasattr(self.lr_scheduler, name)), None)

    def _twice(self) -> None:
        """Say once if the script moves the scheduler too."""
        if self._moved is not None and self._epoch() != self._moved and not self._told_twice and self.global_rank == 0:
            self._told_twice = True
            said = "the script calls lr_scheduler.step(), and engine.step() does too: the rate moves twice"
            warnings.warn(f"step {self.global_steps}: {said}", stacklevel=4)

    def _print(self) -> None:
        every = self._values.get("steps_per_print")
        if every and self.global_rank == 0 and self.global_steps % every == 0:
            print(f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}", flush=True)

    def _each(self, name: str) -> list[Any]:
        return [group.get(name, 0.0) for group in self.optimizer.param_groups] if self.optimizer else []

    def _batches(self) -> Iterator[Any]:
        """The training data over and over."""
        if self.training_dataloader is None:
            raise BridgeError("train_batch: no data; pass an iterator, or training_data to initialize")
        if self._iterator is None:
            self._iterator = _repeated(self.training_dataloader)
        return self._iterator

    def _fed(self, source: Iterator[Any]) -> Any:
        """The next batch to train on; where there is none, the last one again: all ranks leave the step together at its end."""
        try:
            self._last = self._next(source)
        except BridgeError:
            if self._last is None:
                raise
            self.native.lack()
        return self._last

    def _next(self, source: Iterator[Any]) -> Any:
        try:
            return next(source)
        except StopIteration:
            number = self.gradient_accumulation_steps()
            raise BridgeError(f"data ended within a step of {number} microbatches; give more, or repeat it") from None

    def _output(self, batch: Any) -> Any:
        if self.loss_fn is not None:
            return self(batch[0])
        if isinstance(batch, Mapping):
            return self(**batch)
        return self(*batch) if isinstance(batch, list | tuple) else self(batch)

    def _loss(self, batch: Any) -> tuple[Tensor, Any]:
        """Loss and output of one batch."""
        output = self._output(batch)
        if self.loss_fn is not None:
            return self.loss_fn(output, batch[1]), output
        loss = loss_in(output)
        if not isinstance(loss, Tensor) or loss.dim():
            raise BridgeError("batch: the model returns no loss (one number); give it a loss_fn, or call backward(loss)")
        return loss, output

    def _mean(self, losses: list[Tensor]) -> Tensor:
        mean = torch.stack([loss.detach().double() for loss in losses]).mean()
        self.native.comm.all_reduce(EVALUATE, mean, self.native.data)()
        return (mean / self.dp_world_size).to(losses[0].dtype)


def _write(whole: Mapping[str, Tensor], folder: Path, name: str) -> None:
    """One file, put in place when it is whole."""
    beside = folder / f".{name}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            torch.save(dict(whole), file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(folder / name)
    except (OSError, RuntimeError) as error:
        beside.unlink(missing_ok=True)
        raise BridgeError(f"{folder / name}: not written ({error}); make room, or choose another folder") from None


def _repeated(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader
