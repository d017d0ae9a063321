"""DeepSpeed's engine class with all of its methods, implemented by the native engine."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from bridge.checkpoint import tagged_json
from bridge.checkpoint.schema import read_state as read_state
from bridge.engine import buffers
from bridge.engine.absence import drop_gradient
from bridge.engine.checkpoint import LATEST, together
from bridge.engine.formats import TORCH
from bridge.engine.layers import GUARDS, Arguments, loss_in
from bridge.engine.runner import Engine, fitting
from bridge.errors import BridgeError, ConfigError
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from compat.deepspeed.runtime import client
from compat.deepspeed.runtime.names import parts
from compat.deepspeed.runtime.names.zero import (
    WITHIN,
    GatheredParameters,
    ParameterOffload,
    ZeroParamStatus,
    mark,
)

EVALUATE = "evaluate"
AWAY = ZeroParamStatus.NOT_AVAILABLE
EPOCHS = ("last_batch_iteration", "last_epoch")
"""Attributes in which schedulers of DeepSpeed and torch store the number of their last step."""
CLIENT, OWN = "client_state", "deepspeed"
NO_OPTIMIZER = "no optimizer: name an optimizer in the config, or pass optimizer to initialize"


def _convert_state(path: Path, scheduler: Any) -> dict[str, Any]:
    """Return the scheduler's state and the settings of the optimizer's groups from a checkpoint
    that stagebridge converted. If the checkpoint has no scheduler state, DeepSpeed's own schedulers
    continue from the number of updates.
    """
    state = read_state(path, path)
    extras: Any = tagged_json.decode_value(state.carried)
    steps = state.progress.steps
    groups: Any = extras.get("groups") or []
    epochs = {EPOCHS[0]: steps - 1} if steps and hasattr(scheduler, EPOCHS[0]) else None
    return {
        "lr_scheduler": extras.get("schedule") or epochs,
        "groups": [group["settings"] for group in groups],
    }


class Guard:
    """A function that the engine puts into a model. A copy of the model, or a pickled one, has
    `instead` in its place, because no engine holds the copy.
    """

    def __init__(self, call: Callable[..., Any], instead: Callable[..., Any]) -> None:
        self.call, self.instead = call, instead
        setattr(self, GUARDS, getattr(instead, GUARDS, instead))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.call(*arguments, **keywords)

    def __reduce__(self) -> Any:
        return _itself, (self.instead,)


def _itself(value: Any) -> Any:
    return value


def _ignore(*_: Any) -> None:
    """Stand in a copy of a model for a hook of the engine."""


class Closed:
    """Stands for the native engine of an engine whose layers were given to another engine."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __getattr__(self, name: str) -> Any:
        """Raise `BridgeError`, because the engine has no weights any more."""
        raise BridgeError(
            f"engine.{name}: deepspeed.initialize was called again with {self.__dict__['name']}, which"
            " ended this engine; use the new engine, or give each engine layers of its own"
        )

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self.forward()


class DeepSpeedEngine(nn.Module):
    """The engine that `deepspeed.initialize` returns. It is a module that contains the model, and
    it also has the model's attributes. `native` is the native engine. `findings` lists the
    differences between the run and the config.
    """

    native: Engine
    optimizer: Any
    lr_scheduler: Any
    loss_fn: Callable[..., Any] | None

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
        super().__init__()
        self.__dict__.update(optimizer=optimizer, lr_scheduler=lr_scheduler, loss_fn=loss_fn)
        self._stepping, self._inside = False, False
        self._remake: Callable[[Arguments], Engine] | None = None
        self._loaded: tuple[Any, ...] = ()
        self._attach(native)
        self.collate_fn, self.local_rank = collate_fn, local_rank
        self.training = native.model.training
        self.config, self._values = read.ds_config, read.effective  # type: ignore[attr-defined]
        self.training_dataloader: DataLoader[Any] | None = None
        self.device, self.global_rank, self.world_size = (
            native.device,
            native.comm.rank,
            native.comm.world.size,
        )
        self.dp_world_size, self.mp_world_size = native.data.size, native.tensor.size
        self._iterator: Iterator[Any] | None = None
        self._last: Any = None
        self._applied, self._calls, self._moved, self._skipped = False, 0, self._epoch(), 0
        self._bounded = False
        self._told_twice = False
        self._idle: frozenset[str] | None = None
        self._told_idle = False
        self._norm: float | None = None
        self.micro_steps = 0
        """Microbatches stepped over since this engine was made."""
        self.tput_timer = Throughput(self.train_batch_size)

    def _attach(self, native: Engine) -> None:
        """Take `native` as the native engine, and put hooks and attributes into its model."""
        parts.note(native)
        mark(native)
        self._modules["module"] = native.model
        self.__dict__["native"] = native
        model: Any = native.model
        optimizer = self.optimizer
        self._asks = model.register_state_dict_pre_hook(Guard(self._whole_or_refused, _ignore))
        self._takes = model.register_load_state_dict_pre_hook(
            Guard(self._reaching_masters, _ignore)
        )
        self._guards = list(self._guard_model()) if self._in_turns() else []
        if self._guards and native.comm.rank and native.line.size == 1:
            model.state_dict = Guard(partial(self._show_absent, model.state_dict), model.state_dict)
        self._watch_zero_grad()
        native.closing.append(self._close)
        if optimizer is not None:
            native.closing.append(client.guard(optimizer, self.stepping))
            optimizer.overflow = False
            optimizer.cur_scale = optimizer.loss_scale = native.scaler.scale
            if native.plan.zero.effective_stage == 3:
                optimizer.parameter_offload = ParameterOffload(model)

    def cut_later(self, remake: Callable[[Arguments], Engine]) -> None:
        """Have the first call divide the model into layers: only the call shows which arguments the
        model takes. `remake` makes another native engine from them.
        """
        self._remake = remake

    def _cut(self, arguments: Arguments) -> None:
        """Give the model to a native engine that has it in layers, with all state of this one."""
        remake, self._remake = self._remake, None
        assert remake is not None
        model: Any = self._modules["module"]
        training = model.training
        try:
            with self._ours(), torch.enable_grad():
                parts.take_back(model)
                self._attach(remake(arguments))
                model.train(training)
        except BaseException:  # an interruption: the next call tries again
            self._remake = remake
            raise
        if self._loaded:
            self.load_checkpoint(*self._loaded)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute `name` of the model."""
        if name.startswith("__") or name == "native":
            raise AttributeError(name)
        if name in self.__dict__.get("_parameters", {}) or name in self.__dict__.get(
            "_buffers", {}
        ):
            return super().__getattr__(name)
        return getattr(self.native.module, name)

    # Training

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Return the model's output for one microbatch."""
        if self._remake is not None and not torch.is_inference_mode_enabled():
            self._cut(Arguments(inputs, keywords))
        with self._ours():
            return self.native(*inputs, **keywords)

    def _guard_model(self) -> Iterator[Any]:
        """Guard the model against calls that the engine does not make itself: replace the model's
        `forward`, and yield the hooks that are added to its modules. A call of the whole model
        gathers its weights first, or raises an error if this is not possible. A call of a single
        module raises an error if the module's weights are not gathered.
        """
        model = self.native.model
        for name, part in model.named_modules():
            if isinstance(part, torch.jit.ScriptModule) and any(True for _ in part.parameters()):
                raise ConfigError(
                    f"model: {name or type(part).__name__} is a module of TorchScript, which would read"
                    " weights that are not whole; use zero_optimization.stage 2, or leave"
                    " torch.jit.script out"
                )
        by_itself = model.forward

        @wraps(by_itself)
        def forward(*inputs: Any, **keywords: Any) -> Any:
            if self._inside:
                return by_itself(*inputs, **keywords)
            if torch.is_grad_enabled() and model.training:
                raise BridgeError(
                    "model(...): each layer's weights are whole only while that layer runs; call"
                    " engine(...) to train"
                )
            if self.native.line.size == 1:
                away = [
                    weight
                    for weight in model.parameters()
                    if getattr(weight, "ds_status", None) is AWAY
                ]
                with self._ours(), GatheredParameters(away):
                    return by_itself(*inputs, **keywords)
            raise BridgeError(
                "model(...): some layers of the model are on other pipeline ranks; call"
                " engine.eval_batch(batches)"
            )

        model.forward = Guard(forward, by_itself)
        for name, part in model.named_modules():
            weights = [
                weight for weight in part.parameters(recurse=False) if hasattr(weight, "ds_status")
            ]
            if weights:
                yield part.register_forward_pre_hook(Guard(self._guard(name, weights), _ignore))

    def _guard(self, name: str, weights: list[Any]) -> Callable[..., None]:
        def guard(module: nn.Module, inputs: Any) -> None:
            if not self._inside and any(weight.ds_status is AWAY for weight in weights):
                raise BridgeError(
                    f"{name}(...): the module's weights are whole only while its layer runs; call"
                    " engine(...), or call the module within"
                    " zero.GatheredParameters(module.parameters())"
                )

        return guard

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Compute the gradients of a microbatch's mean loss. Returns the loss divided by the number
        of microbatches, as DeepSpeed does.
        """
        self._needs_optimizer("backward")
        if self.native.microbatch > self._calls:
            self._refuse_to_count(
                "backward", "a second backward pass", "the sum of the losses ran backward"
            )
        scale = 1 if scale_wrt_gas else self.gradient_accumulation_steps()
        with self._ours():
            return (
                self.native.backward(loss * scale if scale > 1 else loss, retain_graph)
                / self.gradient_accumulation_steps()
            )

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update the weights and advance the scheduler, if this was the last microbatch of a step.
        Otherwise only count the microbatch.
        """
        self._needs_optimizer("step")
        self.micro_steps += 1
        self.native.count_by_hand()
        if self.native.microbatch <= self._calls:
            self._refuse_to_count("step", "a second call of step", "each backward pass")
        if not self.native.is_gradient_accumulation_boundary():
            self._applied, self._calls = False, self._calls + 1
            return
        self._announce(client.prepare_step)
        self._applied, self._calls, self._bounded = self.native.step(), 0, False
        self._record_step(lr_kwargs or {})

    def _refuse_to_count(self, call: str, found: str, after: str) -> None:
        """Raise `BridgeError` where calls of `step` are not as many as backward passes, unless the script
        says itself where a step ends: DeepSpeed counts calls, and the engine passes.
        """
        number = self.gradient_accumulation_steps()
        if number > 1 and not self._bounded:
            raise BridgeError(
                f"{call}: found {found} between two microbatches, where DeepSpeed ends a step after"
                f" gradient_accumulation_steps={number} calls of step(); call engine.step() once after"
                f" {after}, or set gradient_accumulation_steps to 1"
            )

    def _record_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        """Record a finished step in the engine's counters, the optimizer and the scheduler. Print a
        line of progress if the config asks for one after this step.
        """
        self._skipped, self._norm = self.native.progress.skipped, self.native.progress.grad_norm
        self.native.weights.settle()  # scripts hold parameters of their own and read them
        if self._applied:
            self._name_idle()
            self._tell(lr_kwargs)
        if self.optimizer is not None:
            self.optimizer.overflow = not self._applied
            self.optimizer.cur_scale = self.optimizer.loss_scale = self.cur_scale
        every = self._values.get("steps_per_print")
        if every and self.global_rank == 0 and self.global_steps % every == 0:
            line = f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}"
            print(line, flush=True)

    def _name_idle(self) -> None:
        """Warn once on the first rank of a weight that got no gradient in this step, where DeepSpeed
        changes it: its gradient is zero there, by which decay and moments move it
        (runtime/engine.py: _get_gradients_for_reduction).
        """
        now = self.native.without_gradient
        before = now if self._idle is None else self._idle  # in none of the steps before
        self._idle = now & before
        late = now if any(self._each("weight_decay")) else now - before
        if late and not self._told_idle and self.global_rank == 0:
            self._told_idle = True
            warnings.warn(
                f"step {self.global_steps}: {min(late)} got no gradient and stays as it is, as in torch;"
                " DeepSpeed would take a gradient of zero, and move it by weight decay and moments"
                f" ({Effect.NUMBERS.value}); give it a part in the loss, or freeze it",
                stacklevel=4,
            )

    def train_batch(self, data_iter: Iterable[Any] | None = None) -> Tensor:
        """Run one step over the next microbatches of `data_iter` (default: the training data,
        repeated without end). Return the step's mean loss over all ranks. If the model has a
        `loss_fn`, as DeepSpeed's PipelineModule does, a batch is (inputs, labels). Otherwise a
        batch holds the model's arguments (a tuple, a mapping or a single value), and the model
        returns the loss.
        """
        self.train()
        if self.native.line.size > 1:
            return self._run_pipeline(self._batches() if data_iter is None else data_iter)
        source = (
            self._batches()
            if data_iter is None
            else iter(fitting(data_iter, self.gradient_accumulation_steps()))
        )
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
        """Return the mean loss over the next microbatches of `data_iter` and over all ranks. With
        `return_logits` return a pair of this loss and the list of outputs. Without `compute_loss`
        return only the list of outputs. If `reduce_output` is None, return the list of this rank's
        losses instead of the mean loss.
        """
        training, source = self.native.module.training, iter(data_iter)
        self.eval()
        try:
            batches = [
                self._next(source)
                for _ in range(num_micro_batches or self.gradient_accumulation_steps())
            ]
            if not compute_loss:
                return [self._output(batch) for batch in batches]
            pairs = [self._loss(batch) for batch in batches]
        finally:
            self.train(training)
        losses = [loss for loss, _ in pairs]
        answer: Any = losses
        if reduce_output is not None:
            # In fp64, so that the mean is rounded only once.
            mean = torch.stack([loss.detach().double() for loss in losses]).mean()
            self.native.comm.all_reduce(EVALUATE, mean, self.native.data)()
            answer = (mean / self.dp_world_size).to(losses[0].dtype)
        return (answer, [output for _, output in pairs]) if return_logits else answer

    def _run_pipeline(self, batches: Iterable[Any]) -> Tensor:
        """Run one step of a model in pipeline stages, and return the mean loss. One call runs all
        microbatches of the step.
        """
        self._needs_optimizer("train_batch")
        self._announce(client.prepare_step)
        with self._ours():
            loss = self.native.train_batch(batches)
        self.micro_steps += self.gradient_accumulation_steps()
        self._applied = self.native.progress.skipped == self._skipped
        self._record_step({})
        return torch.tensor(loss, device=self.device)

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Set training mode."""
        self.training = mode
        self.native.train(mode)
        return self

    def compile(self, *_: Any, **__: Any) -> None:
        """Raise `BridgeError`, because a compiled model would bypass the engine's hooks on module
        calls.
        """
        raise BridgeError(
            "engine.compile: the engine cannot compile a model that it holds; compile the model's"
            " blocks before initialize"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DeepSpeedEngine:
        """Raise `BridgeError` if `fn` would change the device or the format of a parameter. torch
        calls this method for `to`, `cuda`, `half` and `float`.
        """
        for name, weight in self.native.model.named_parameters():
            result = fn(torch.empty(0, dtype=weight.dtype, device=weight.device))
            if result.device != weight.device or result.dtype != weight.dtype:
                raise BridgeError(
                    f"engine.to: {name} would change from {weight.dtype} on {weight.device} to"
                    f" {result.dtype} on {result.device}, but every parameter has to stay in the"
                    " engine's buffers; set the format in the config, and let initialize choose"
                    " the device"
                )
        return self

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing, because the engine reduces gradients only at the end of a step and counts
        microbatches itself.
        """
        yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that other backward passes than the engine's own left in the parameters. Below
        ZeRO level 2 also forget the microbatches of this step that have run, as DeepSpeed does. Every
        step begins with new gradients.
        """
        if self.native.is_gradient_accumulation_boundary() and not self.native.drop():
            raise BridgeError(
                "zero_grad: called between the last backward and step, whose update it would undo; call it"
                " after engine.step()"
            )
        for weight in self.native.model.parameters():
            drop_gradient(weight)
        if (self.native.plan.zero.effective_stage or 0) < 2:
            self._forget()

    def _forget(
        self, drop: Callable[..., None] = _ignore, *arguments: Any, **keywords: Any
    ) -> None:
        """Call `drop`, and forget the microbatches of this step that have run, if there are any left."""
        self.native.gradients.show()
        drop(*arguments, **keywords)
        if not self.native.is_gradient_accumulation_boundary():
            self.native.gradients.forget()
        else:
            self.native.drop()

    def _watch_zero_grad(self) -> None:
        """Have `zero_grad` of the model and of the optimizer forget microbatches at those levels at
        which DeepSpeed's do (runtime/zero/stage_1_and_2.py, stage3.py).
        """
        level, model = self.native.plan.zero.effective_stage or 0, self.native.model
        if level < 2:
            model.zero_grad = Guard(partial(self._forget, model.zero_grad), model.zero_grad)  # type: ignore[method-assign]
        if level != 2 and self.optimizer is not None:
            self.optimizer.zero_grad = partial(self._forget, self.optimizer.zero_grad)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all groups."""
        self._needs_optimizer("set_lr")
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["lr"] = lr

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing, because gradients are reduced with the last microbatch of a step."""

    def offload_states(self, *_: Any, **__: Any) -> None:
        """Warn that all state stays on the device, which costs memory and changes no numbers."""
        warnings.warn(
            "offload_states: masters and moments stay on the device (memory or speed)", stacklevel=2
        )

    def reload_states(self, *_: Any, **__: Any) -> None:
        """Do nothing, because `offload_states` moves nothing."""

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current microbatch is the last one of its step."""
        return (
            self.native.is_gradient_accumulation_boundary()
            or self._calls + 1 == self.gradient_accumulation_steps()
        )

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next microbatch is the last one of its step, so that a step may end
        early. The gradients of a shorter step are nevertheless divided by the config's number of
        microbatches, as in DeepSpeed. Raises `BridgeError` if the step would be longer than in the
        config.
        """
        place, number = self.native.microbatch + 1, self.gradient_accumulation_steps()
        self._bounded = True
        if is_boundary and place < number:
            self.native.last()
        elif is_boundary != (place == number):
            raise BridgeError(
                f"set_gradient_accumulation_boundary: found {is_boundary} at microbatch {place}"
                f" of {number}, but a step cannot be longer than in the config; set"
                " gradient_accumulation_steps to the number of backward() calls in a step"
            )

    def was_step_applied(self) -> bool:
        """Return whether the last call of `step` changed the weights."""
        return self._applied

    # What a script asks

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.native.module

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings about differences between the engine and the config."""
        return self.native.findings

    @property
    def global_steps(self) -> int:
        """Number of steps, including skipped ones."""
        return self.native.progress.steps + self.native.progress.skipped

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were skipped because of an overflow."""
        return self.native.progress.skipped

    @property
    def global_samples(self) -> int:
        """Number of samples that all ranks together have consumed."""
        return self.native.progress.samples

    @property
    def cur_scale(self) -> float:
        """The loss scale now."""
        return self.native.scaler.scale

    def train_batch_size(self) -> int:
        """Return the number of samples in a step over all ranks."""
        return (
            self.train_micro_batch_size_per_gpu()
            * self.gradient_accumulation_steps()
            * self.dp_world_size
        )

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples in a microbatch on one rank."""
        return int(self._values["train_micro_batch_size_per_gpu"])

    def gradient_accumulation_steps(self) -> int:
        """Return the number of microbatches in a step."""
        return self.native.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return three numbers: samples in a step, samples in a microbatch on one rank, and
        microbatches in a step.
        """
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        return self._each("lr")

    def get_mom(self) -> list[Any]:
        """Return the momentum (SGD) or the betas of each group."""
        return self._each("momentum" if isinstance(self.optimizer, torch.optim.SGD) else "betas")

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of all gradients of the last step before clipping; None before the first
        step of this engine, which a checkpoint does not change.
        """
        return self._norm

    def gradient_clipping(self) -> float:
        """Return the largest allowed norm of all gradients; 0 means that gradients are not clipped."""
        return self.native.plan.optimizer.clip or 0.0

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO level."""
        return int(self._values["zero_optimization.stage"])

    def zero_optimization(self) -> bool:
        """Return whether ZeRO shards anything in this run."""
        return self.zero_optimization_stage() > 0

    def optimizer_name(self) -> str | None:
        """Return the optimizer's type in the config, in lower case."""
        kind = self._values.get("optimizer.type")
        return kind.lower() if kind else None

    def scheduler_name(self) -> str | None:
        """Return the scheduler's type in the config."""
        name: str | None = self._values.get("scheduler.type")
        return name

    def steps_per_print(self) -> Any:
        """Return the number of steps between two lines of progress."""
        return self._values.get("steps_per_print")

    def wall_clock_breakdown(self) -> bool:
        """Return whether the config asks for the times of forward, backward and step. The engine
        itself does not measure these times.
        """
        return bool(self._values.get("wall_clock_breakdown"))

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return whether the config asks for whole weights in a saved model."""
        return bool(self._values.get("zero_optimization.stage3_gather_16bit_weights_on_model_save"))

    @property
    def data_parallel_group(self) -> Any:
        """Torch's process group of the data ranks."""
        return self.native.data.handle or torch.distributed.group.WORLD

    dp_process_group = seq_data_parallel_group = data_parallel_group

    @property
    def communication_data_type(self) -> torch.dtype:
        """The format in which ranks exchange gradients."""
        return TORCH[self.native.layout.flats[0].exchange]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the format of the weights and the format of accumulated gradients."""
        flat = self.native.layout.flats[0]
        return TORCH[flat.dtype], TORCH[flat.reduce]

    def fp16_enabled(self) -> bool:
        """Return whether the engine computes in fp16."""
        return self.native.plan.precision.compute == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Return whether the engine computes in bf16."""
        return self.native.plan.precision.compute == "bf16"

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale adapts to overflows."""
        return self.native.scaler.window is not None

    def loss_scale(self) -> float:
        """Return the constant loss scale; 0 if the loss scale is dynamic."""
        return 0 if self.dynamic_loss_scale() else self.cur_scale

    def get_data_parallel_rank(self) -> int:
        """Return this rank's index among the data ranks."""
        return self.native.data.index

    def get_tensor_parallel_rank(self) -> int:
        """Return this rank's index among the tensor ranks."""
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
        """Return a loader of this rank's samples in DeepSpeed's order. Training data is shuffled
        once, and every epoch has the same order.
        """
        if not (
            isinstance(dataset, IterableDataset)
            or (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))
        ):
            raise ConfigError(
                f"training_data: found {type(dataset).__name__}, expected a torch dataset"
            )
        sampler = None
        if not isinstance(dataset, IterableDataset):
            index, shuffle = self.native.data.index, route == "train"
            sampler = data_sampler or DistributedSampler(
                dataset, self.dp_world_size, index, shuffle=shuffle
            )
        return DataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            sampler=sampler,
            collate_fn=collate_fn or self.collate_fn,
            pin_memory=pin_memory and self.device.type == "cuda",
            drop_last=bool(self._values.get("dataloader_drop_last")),
            num_workers=num_local_io_workers or 0,
        )

    # Checkpoints

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint of the native engine, with the state of the scheduler and the
        optimizer's settings. All ranks must take part. Frozen parameters are written too: with
        `exclude_frozen_parameters` the first rank warns of the larger files.
        """
        if exclude_frozen_parameters and self._frozen() and self.global_rank == 0:
            warnings.warn(
                "save_checkpoint: frozen parameters are written too, as a checkpoint holds the whole"
                " model (memory or speed)",
                stacklevel=2,
            )
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        self.native.save_checkpoint(
            save_dir, name, {CLIENT: dict(client_state or {}), OWN: self._state()}, save_latest
        )
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
        """Continue from a checkpoint of the native engine, which any layout of ranks may have
        written. Return the checkpoint's path and the state that the script saved as `client_state`.
        If there is no checkpoint yet, warn and return (None, None), as DeepSpeed does. Without
        `load_module_strict` too, every name of the model must be in the checkpoint.
        """
        if custom_load_fn is not None:
            raise BridgeError(
                "load_checkpoint: every name in a checkpoint must be a name in the model; leave"
                " custom_load_fn at its default"
            )
        if tag is None and not (Path(load_dir) / LATEST).is_file():
            warnings.warn(
                f"{load_dir}: found no file {LATEST!r} in this folder, so nothing is loaded",
                stacklevel=2,
            )
            return None, None
        before = replace(self.native.progress), self.native.optimizer.ahead
        optimizer = load_optimizer_states and not load_module_only
        path, state = self.native.load_checkpoint(
            load_dir, None if tag is None else str(tag), optimizer
        )
        if not optimizer:
            self._round_masters()
        if load_module_only:
            if self.zero_optimization_stage() == 3 and self.global_rank == 0:
                warnings.warn(
                    "load_checkpoint: load_module_only=True loads the weights; at ZeRO 3 DeepSpeed 0.19.8"
                    f" keeps those that it had ({Effect.NUMBERS.value})",
                    stacklevel=2,
                )
            self.native.progress, self.native.optimizer.ahead = before
        else:
            self._restore(
                state.get(OWN) or _convert_state(path, self.lr_scheduler),
                load_optimizer_states,
                load_lr_scheduler_states,
            )
            self._moved = self._epoch()
        if self._remake is not None:
            more = load_optimizer_states, load_lr_scheduler_states, load_module_only
            self._loaded = (path.parent, path.name, True, *more)
        return str(path), state.get(CLIENT, {}) if OWN in state else state

    def _round_masters(self) -> None:
        """Round masters to the compute format: without the optimizer, DeepSpeed makes them from its
        weights (runtime/zero/stage_1_and_2.py: _restore_from_bit16_weights).
        """
        for flat, shard in zip(self.native.layout.flats, self.native.weights.shards, strict=True):
            shard.copy_(shard.to(TORCH[flat.dtype]))

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the model's state dictionary. Below ZeRO level 3 the values are the model's own
        tensors. At level 3 they are whole copies, and all ranks must take part.
        """
        frozen = self._frozen() if exclude_frozen_parameters else set()
        if not self._in_turns():
            entries = self.native.module.state_dict(prefix=prefix, keep_vars=keep_vars)
        else:
            entries = {f"{prefix}{name}": value for name, value in self._whole().items()}
        entries = {
            name: value for name, value in entries.items() if name[len(prefix) :] not in frozen
        }
        if destination is None:
            return entries
        destination.update(entries)
        return destination  # type: ignore[no-any-return]

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Any = None,
        **_: Any,
    ) -> None:
        """Set weights, masters and buffers to the values in a state dictionary of the model. All
        ranks must take part.
        """
        if custom_load_fn is not None:
            raise BridgeError(
                "load_module_state_dict: custom_load_fn is not supported; rename the entries first"
            )
        names = buffers.aliases(self.native.model)
        missing, strange = (
            [name for name in names if name not in state_dict],
            [name for name in state_dict if name not in names],
        )
        if strict:
            BridgeError.raise_if(
                f"load_module_state_dict: the given state lacks {name}, which the model has; add"
                " this entry, or pass strict=False"
                for name in missing
            )
            BridgeError.raise_if(
                f"load_module_state_dict: the model has no {name}; remove this entry from the"
                " given state, or pass strict=False"
                for name in strange
            )
        places = {
            place[2]: place
            for weight in self.native.model.parameters()
            if (place := parts.place_of(weight))
        }
        values = {names[name]: value for name, value in state_dict.items() if name in names}
        parts.set_masters(
            self.native,
            [(*places[name][1:], value) for name, value in values.items() if name in places],
        )
        for name, buffer in buffers.buffers(self.native.model).items():
            if name in values:
                buffer.copy_(values[name])

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Set weights, masters and buffers to the values in a state dictionary that the engine's
        `state_dict` returned.
        """
        if assign:
            raise BridgeError(
                "load_state_dict: assign=True would replace weights that are in the engine's"
                " buffers; leave assign out"
            )
        self.load_module_state_dict(
            {name.removeprefix("module."): value for name, value in state_dict.items()}, strict
        )

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """Return the whole model in the compute format on the CPU of the first rank, and None on
        other ranks. All ranks must take part.
        """
        entries = self._whole("cpu", not exclude_frozen_parameters)
        return entries if self.global_rank == 0 else None

    def _whole(self, device: str | None = None, frozen: bool = True) -> dict[str, Tensor]:
        """Return the whole model by name, weights in the compute format, and each buffer in its own.
        A tensor with several names appears under each of its names. Without `frozen`, frozen weights
        are left out.
        """
        model, compute = self.native.model, TORCH[self.native.plan.precision.compute or "fp32"]
        names = set() if frozen else self._frozen()
        entries = {
            name: weight.to(device or weight.device, compute, copy=True)
            for name, weight in self.native.state_dict()
        }
        entries.update((name, one.to(device)) for name, one in buffers.whole(self.native))
        with self._ours():
            return {
                alias: entries[name]
                for alias, name in buffers.aliases(model).items()
                if name in entries and name not in names
            }

    def _in_turns(self) -> bool:
        """Return whether some weights are not whole on this rank between steps. Such weights are
        whole only while their layer runs, or are on other pipeline ranks.
        """
        flats = range(len(self.native.layout.flats))
        return self.native.line.size > 1 or any(
            parts.in_turns(self.native, index) for index in flats
        )

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """Context for calls of the model by the engine itself, which the hooks on module calls
        allow.
        """
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def _whole_or_refused(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Raise `BridgeError` if a state dictionary would contain weights that are not whole. The
        memory of such weights may contain anything.
        """
        if self._inside or keep_vars or not self._in_turns():
            return
        absent = [
            name
            for name, weight in module.named_parameters()
            if getattr(weight, "ds_status", None) is AWAY
        ]
        if absent or self.native.line.size > 1:
            name = (absent or [next(iter(dict(module.named_parameters())))])[0]
            raise BridgeError(
                f"state_dict: {name} is whole only while its layer runs; call"
                " engine.module_state_dict() or engine.save_16bit_model(folder) on all ranks, or"
                " call state_dict() within zero.GatheredParameters(model.parameters())"
            )

    def _show_absent(self, usual: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Return the model's state dictionary with an empty tensor for each weight that is not whole, as
        DeepSpeed does, if `save_pretrained` asks: on ranks other than the first, which alone has the
        whole state, it writes nothing.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "save_pretrained":
            frame = frame.f_back
        if self._inside or keywords.get("keep_vars") or frame is None:
            return usual(*arguments, **keywords)
        state = usual(*arguments, **{**keywords, "keep_vars": True})
        for name, value in state.items():
            if isinstance(value, Tensor):
                away = getattr(value, "ds_status", None) is AWAY
                state[name] = value.new_empty(0) if away else value.detach()
        return state

    def _reaching_masters(self, module: nn.Module, *_: Any) -> None:
        """Raise `BridgeError` if weights that are loaded into the model would not reach its masters."""
        flats = self.native.layout.flats
        within = any(hasattr(weight, WITHIN) for weight in module.parameters())
        if not within and not all(flat.master_is_weight for flat in flats):
            raise BridgeError(
                "load_state_dict: the engine keeps master weights apart from the model, which the next step"
                " would bring back; call engine.load_module_state_dict(state)"
            )

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model with `torch.save`: weights in the compute format, and each buffer
        in its own format.

        A tensor with several names appears under each name, so that strict loading into a new model
        works. All ranks must take part.
        """
        BridgeError.raise_if(
            f"save_16bit_model: {name} in the model's state is not a tensor; make it a buffer"
            for name in buffers.others(self.native.model)
        )
        whole = self._whole("cpu", not exclude_frozen_parameters)
        with together(self.native):
            if self.global_rank == 0:
                write(whole, Path(save_dir), save_filename)
        return True

    def _frozen(self) -> set[str]:
        return {parameter.name for parameter in self.native.parameters if not parameter.trainable}

    def destroy(self) -> None:
        """Remove the hooks, and end the native engine. The process group stays, as other engines may
        use it. At ZeRO level 3 the weights stay sharded: `zero.GatheredParameters` makes them whole,
        and `initialize` takes the model again.
        """
        if not isinstance(self.native, Closed):
            self.native.end("after engine.destroy()")

    def _close(self, successor: str) -> None:
        """Remove from the model what this engine put there. `successor` names a parameter that
        another engine takes, if there is one.
        """
        for hook in (self._asks, self._takes, *self._guards):
            hook.remove()
        model = self.native.model
        for name in ("forward", "zero_grad", "state_dict"):
            put = model.__dict__.get(name)
            if isinstance(put, Guard):
                delattr(model, name)
                if getattr(model, name) != put.instead:
                    setattr(model, name, put.instead)
        vars(self.optimizer or self).pop("zero_grad", None)
        if successor:
            self.__dict__["native"] = Closed(successor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise `BridgeError`, because an engine has process groups and no copy could have them."""
        raise BridgeError(
            "engine: an engine cannot be copied or pickled; copy engine.module, or call"
            " engine.save_checkpoint(folder)"
        )

    # Parts

    def _state(self) -> dict[str, Any]:
        scheduler = (
            self.lr_scheduler.state_dict() if hasattr(self.lr_scheduler, "state_dict") else None
        )
        groups = self.optimizer.param_groups if self.optimizer else []
        settings = [
            {name: value for name, value in group.items() if name != "params"} for group in groups
        ]
        own = {id(weight): name for name, weight in self.native.model.named_parameters()}
        names = [[own.get(id(weight)) for weight in group["params"]] for group in groups]
        names_entry = {} if any(None in group for group in names) else {"names": names}
        return {"lr_scheduler": scheduler, "groups": settings, **names_entry}

    def _restore(self, state: Mapping[str, Any], optimizer: bool, scheduler: bool) -> None:
        groups = state.get("groups", []) if optimizer and self.optimizer else []
        for group, settings in zip(
            self.optimizer.param_groups if groups and self.optimizer else [], groups, strict=False
        ):
            group.update(
                {
                    name: tuple(value) if isinstance(value, list) else value
                    for name, value in settings.items()
                }
            )
        if scheduler and self.lr_scheduler is not None and state.get("lr_scheduler"):
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])

    def _needs_optimizer(self, what: str) -> None:
        if self.optimizer is None:
            raise BridgeError(f"{what}: {NO_OPTIMIZER}")

    def _tell(self, lr_kwargs: Mapping[str, Any]) -> None:
        """Run the hooks of the optimizer's `step`, and then the scheduler's `step`."""
        self._announce(client.announce_step)
        if self.lr_scheduler is not None:
            self._twice()
            try:
                self.lr_scheduler.step(**lr_kwargs)
            except TypeError:  # one that wants a number: runtime/engine.py, _take_model_step
                self.lr_scheduler.step(self.train_batch_size())
            self._moved = self._epoch()

    def _announce(self, call: Callable[[torch.optim.Optimizer], None]) -> None:
        assert self.optimizer is not None
        self._stepping = True
        try:
            call(self.optimizer)
        finally:
            self._stepping = False

    def stepping(self) -> bool:
        """Return whether the engine itself is calling the optimizer's `step`."""
        return self._stepping

    def _epoch(self) -> Any:
        """Return the number of the scheduler's last step; None if the scheduler does not store this
        number.
        """
        return next(
            (
                getattr(self.lr_scheduler, name)
                for name in EPOCHS
                if hasattr(self.lr_scheduler, name)
            ),
            None,
        )

    def _twice(self) -> None:
        """Warn once if the script calls the scheduler's `step` although the engine does so too."""
        if (
            self._moved is not None
            and self._epoch() != self._moved
            and not self._told_twice
            and self.global_rank == 0
        ):
            self._told_twice = True
            message = (
                "the script calls lr_scheduler.step(), and engine.step() calls it too: the"
                " scheduler makes two steps at once; remove the script's call"
            )
            warnings.warn(f"step {self.global_steps}: {message}", stacklevel=4)

    def _each(self, name: str) -> list[Any]:
        return (
            [group.get(name, 0.0) for group in self.optimizer.param_groups]
            if self.optimizer
            else []
        )

    def _batches(self) -> Iterator[Any]:
        """Yield the batches of the training data, epoch after epoch without end."""
        if self.training_dataloader is None:
            raise BridgeError(
                "train_batch: found no data; pass an iterator to train_batch, or training_data"
                " to initialize"
            )
        if self._iterator is None:
            # Not `cycle`: every epoch asks the loader anew, and `cycle` would keep all batches of
            # the first.
            loader = self.training_dataloader
            self._iterator = (batch for epoch in count() for batch in loader)
        return self._iterator

    def _fed(self, source: Iterator[Any]) -> Any:
        """Return the next batch to train on. If the data has ended, return the last batch again, so
        that all ranks fail together at the end of the step.
        """
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
            raise BridgeError(
                f"the data ended before a step of {number} microbatches was complete; pass more"
                " batches, or repeat the data"
            ) from None

    def _output(self, batch: Any) -> Any:
        if self.loss_fn is not None:
            return self(batch[0])
        if isinstance(batch, Mapping):
            return self(**batch)
        return self(*batch) if isinstance(batch, list | tuple) else self(batch)

    def _loss(self, batch: Any) -> tuple[Tensor, Any]:
        """Return loss and output of one batch."""
        output = self._output(batch)
        if self.loss_fn is not None:
            return self.loss_fn(output, batch[1]), output
        loss = loss_in(output)
        if not isinstance(loss, Tensor) or loss.dim():
            raise BridgeError(
                "batch: found no loss in the model's output, expected a tensor with one number;"
                " give the model a loss_fn, or call backward(loss) yourself"
            )
        return loss, output


PipelineEngine = DeepSpeedEngine
"""DeepSpeed's name for its pipeline engine. One class runs models with and without pipeline stages.
"""


class Throughput:
    """The engine's `tput_timer`: counts epochs and steps. DeepSpeed's own timer also prints speeds,
    which `stagebridge train` prints here.
    """

    def __init__(self, batch_size: Callable[[], int]) -> None:
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.batch_size = batch_size

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0


def write(whole: Mapping[str, Tensor], folder: Path, name: str) -> None:
    """Write the tensors `whole` into the file `name` in `folder`. The file appears only when it is
    complete.
    """
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
        raise BridgeError(
            f"{folder / name}: could not be written ({error}); free disk space, or choose another"
            " folder"
        ) from None
