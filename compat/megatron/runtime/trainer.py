"""Trains on Megatron-Core itself: process groups, model, optimizer, schedules, and native names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor, nn

from bridge.engine import device
from bridge.engine.comm import Comm, connect, rank_and_world
from bridge.engine.environment import Environment, detect
from bridge.engine.interface import Step, Workload
from bridge.engine.models.dense import native
from bridge.engine.rows import IGNORED, Batch
from bridge.errors import BridgeError, ConfigError
from bridge.layout.architecture import Architecture
from bridge.layout.mesh import Mesh
from bridge.plan.plan import Plan
from bridge.translation.lift import lift
from compat.megatron.dialect import MegatronConfig
from compat.megatron.runtime import fsdp, model
from compat.megatron.runtime.cpu import redirect_cuda
from compat.megatron.runtime.resuming import load_checkpoint
from compat.megatron.runtime.states import States
from compat.megatron.runtime.tracing import MegatronSource
from compat.megatron.runtime.weights import Share, WeightPiece, pieces, wholes

LOSS = "mean loss"
EXPORT = "whole weights"
PIPELINE_LAST = "tp-cp-ep-dp-pp"
DATA_LAST = "tp-cp-ep-pp-dp"


class MegatronTrainer:
    """Trains Megatron-Core's GPT as `config` says.

    The initial weights are those of the workload's native GPT. A model that is described by a
    folder gets its weights from the checkpoint that the run resumes. `samples` is the number of
    samples per step in the run that wrote this checkpoint; the default is the number in this run.
    `bridge.engine.interface.Trainer` documents the methods.
    """

    def __init__(
        self, config: MegatronConfig, workload: Workload, samples: int | None = None
    ) -> None:
        here = rank_and_world()
        place = Environment(*here) if here else detect()
        self._samples = samples or config.args.get("global_batch_size") or 1
        self.config, self.plan, self.workload = config, lift(config), workload
        section = workload.model if workload.folder is not None else None
        self.shape = workload.architecture if section is None else Architecture.of(section)
        mesh = Mesh.of(self.plan.parallel, place.world)
        self.micro = self.plan.batch.micro or workload.micro
        batch, samples_at_once = self.plan.batch, self.micro * mesh.sizes["data"]
        whole = (batch.global_ or samples_at_once) // samples_at_once
        self.accumulation = batch.accumulation or max(1, whole)
        self._alone = _join(place)
        self.comm = Comm(mesh, place.rank)
        try:
            with self.running():
                self._open(workload.seed)
        except BaseException:
            self.close()
            raise

    def _open(self, seed: int) -> None:
        args = self.config.args
        _groups(self.plan, args)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        has_model = self.workload.model is not None
        self.settings = (
            model.config_of_flags(self.config)
            if has_model
            else model.transformer_config(self.config, self.shape)
        )
        places = model.positions(args) if has_model else {}
        parts = model.parts(self.settings, self.shape, places)
        self._weights = list(model.parameters_by_name(parts))
        exact = self._load(self._first())
        wrap = fsdp.wrap_chunks if self._fully_sharded else model.wrap_chunks
        self.chunks = wrap(self.settings, model.ddp_config(self.config), parts)
        # Without overrides of its own Megatron spares biases and norms from weight decay, as its trainer does.
        self.optimizer = get_megatron_optimizer(
            model.optimizer_config(self.config),
            self.chunks,
            config_overrides=None,
            use_gloo_process_groups=False,
        )
        self.states = (fsdp.Shards if self._fully_sharded else States)(self.optimizer, self.chunks)
        for weight, values in exact.items():
            self.states.master(weight).copy_(values.view(-1)[self.states.elements_of(weight)])
        # Without either flag, Megatron refuses to resume unless the checkpoint's schedule equals
        # the run's.
        from_checkpoint = bool(args.get("use_checkpoint_opt_param_scheduler"))
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            **_learning_rate(args),
            use_checkpoint_opt_param_scheduler=from_checkpoint,
            override_opt_param_scheduler=not from_checkpoint,
        )
        self.settings.grad_scale_func = self.optimizer.scale_loss
        self.settings.finalize_model_grads_func = finalize_model_grads
        for field, method in _overlaps(args):
            calls = [getattr(chunk, method) for chunk in self.chunks]
            setattr(self.settings, field, calls if len(calls) > 1 else calls[0])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager for calls of Megatron. Without CUDA, requests for CUDA are redirected to
        the CPU. Megatron's refusals are raised as `ConfigError`.
        """
        with ExitStack() as stack:
            if not torch.cuda.is_available():
                stack.enter_context(redirect_cuda())
                stack.enter_context(
                    fsdp.redirect_collectives() if self._fully_sharded else nullcontext()
                )
            try:
                yield
            except (AssertionError, ValueError) as error:
                raise ConfigError(
                    f"megatron: refused by Megatron-Core itself: {type(error).__name__}: {error}"
                ) from error

    @property
    def _fully_sharded(self) -> bool:
        return bool(self.config.args.get("use_megatron_fsdp"))

    def trace_source(self) -> MegatronSource:
        """Return what a trace of this run reads. Raises `BridgeError` for a run that cannot be traced."""
        return MegatronSource(self.chunks, self.optimizer, self.accumulation, self.shape)

    @property
    def data(self) -> tuple[int, int]:
        group = self.comm.group("data")
        return group.index, group.size

    @property
    def share(self) -> Share:
        """The index of this rank among the tensor ranks, and their number."""
        group = self.comm.group("tensor")
        return Share(group.index, group.size)

    def train_batch(self, batches: Iterable[Batch]) -> Step:
        microbatches = list(islice(batches, self.accumulation))
        if len(microbatches) < self.accumulation:
            raise BridgeError(
                f"train_batch: found {len(microbatches)} microbatches, expected {self.accumulation}; give more"
            )
        with self.running():
            for chunk in self.chunks:
                chunk.train()
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = self._pass(microbatches)
            lr, scale = self.optimizer.param_groups[0]["lr"], self.optimizer.get_loss_scale()
            success, norm, _ = self.optimizer.step()
            if success:
                self.scheduler.step(1)
            return Step(self._mean(losses), norm, lr, bool(success), float(scale))

    def _pass(self, batches: list[Batch]) -> list[tuple[Tensor, Tensor]]:
        """Run all microbatches forward and backward with Megatron's own schedule.

        On the last stage, returns the loss of each microbatch with its weight; on other stages, an
        empty list.
        """
        rows, tokens = batches[0][1].shape
        losses: list[tuple[Tensor, Tensor]] = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=[iter(batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=self.accumulation,
            seq_length=tokens,
            micro_batch_size=rows,
        )
        return losses

    def _forward(self, batches: Iterator[Batch], part: Any) -> tuple[Tensor, Any]:
        current = torch.cuda.current_device()
        tokens, targets = (tensor.to(current) for tensor in next(batches))
        arguments = (
            self.workload.rows.model_arguments(tokens)
            if self.workload.rows
            else {"input_ids": tokens}
        )
        tokens, mask = arguments["input_ids"], arguments.get("attention_mask")
        positions = arguments.get(
            "position_ids", torch.arange(tokens.shape[1], device=current).expand_as(tokens)
        )
        unseen = None if mask is None else _unseen(mask)
        return part(tokens, positions, unseen, labels=targets.clamp(min=0)), partial(
            self._loss, targets
        )

    def _loss(self, targets: Tensor, losses: Tensor) -> tuple[Any, ...]:
        """Return the loss in the form of Megatron's own loss function: a sum with a count, or a
        mean.
        """
        counts = targets != IGNORED
        total, count = (losses.float() * counts).sum(), counts.sum()
        if self.settings.calculate_per_token_loss:
            return total, count.int(), (total.detach().clone(), count)
        mean = total / count.clamp(min=1)
        return mean, (mean.detach().clone(), torch.ones_like(count))

    def _mean(self, losses: list[tuple[Tensor, Tensor]]) -> float:
        """Return the weighted mean of the losses of all microbatches and data ranks."""
        total = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
        # Tensor ranks compute the same loss, so only the first of them adds it.
        if self.share.index == 0:
            for loss, weight in losses:
                total += torch.stack([loss.double(), weight.double()])
        self.comm.all_reduce(LOSS, total, self.comm.world)()
        return float(total[0] / total[1].clamp(min=1))

    def parameters_with_pieces(self) -> Iterator[tuple[nn.Parameter, tuple[WeightPiece, ...]]]:
        """Yield this rank's parameters, each with the native parameters that it consists of."""
        for name, weight in self._weights:
            yield weight, tuple(pieces(name, self.shape, self.share))

    def _first(self) -> Mapping[str, Tensor] | None:
        """Return the initial weights by native name; None if they come from the resumed checkpoint."""
        if self.workload.first is not None or self.workload.folder is not None:
            return self.workload.first
        return dict(native(self.workload).named_parameters())

    @torch.no_grad()
    def _load(self, wholes: Mapping[str, Tensor] | None) -> Mapping[nn.Parameter, Tensor]:
        """Copy `wholes` into the weights, and return the values before rounding, which become the
        master weights.
        """
        masters: dict[nn.Parameter, Tensor] = {}
        for weight, parts in self.parameters_with_pieces() if wholes is not None else ():
            exact = masters[weight] = torch.zeros_like(weight, dtype=torch.float32)
            for piece in parts:
                piece.load(exact, wholes[piece.name].to(exact))  # type: ignore[index]
            weight.copy_(exact)
        return masters

    @torch.no_grad()
    def resume(self, place: Path) -> int:
        """Load a checkpoint, and convert its scheduler's counts of samples into steps."""
        BridgeError.raise_if(
            [f"{place}: Megatron-FSDP loads only its own format; resume without Megatron-FSDP"]
            if self._fully_sharded
            else []
        )
        with self.running():
            content = load_checkpoint(place, self.chunks, self.optimizer)
            schedule = content["opt_param_scheduler"]
            counts = {
                name: value / self._samples
                for name, value in schedule.items()
                if name.endswith("_steps")
            }
            self.scheduler.load_state_dict({**schedule, **counts})
        return int(content["iteration"])

    def weights(self) -> Mapping[str, Tensor]:
        """Return all weights by native name, on every rank."""
        whole = torch.zeros(sum(map(prod, self._shapes.values())))
        flat = torch.split(whole, [prod(shape) for shape in self._shapes.values()])
        tensors = {
            name: part.view(shape)
            for (name, shape), part in zip(self._shapes.items(), flat, strict=True)
        }
        for weight, parts in self.parameters_with_pieces():
            # The ranks are summed below, so each weight is added once: by the first data rank, and
            # not by the later stage of a tied weight.
            is_owner = (self.states.sharded or self.data[0] == 0) and not getattr(
                weight, "shared", False
            )
            for piece in parts if is_owner else ():
                local = piece.of(self.states.fill_shape(weight, self.states.master(weight)))
                if piece.dim is not None or self.share.index == 0:
                    piece.within(tensors[piece.name], local.shape).copy_(local)
        there = whole.to(torch.cuda.current_device()) if torch.cuda.is_available() else whole
        self.comm.all_reduce(EXPORT, there, self.comm.world)()
        whole.copy_(there)
        return tensors

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the native GPT's parameters, by name."""
        return wholes(self.shape)

    def bytes(self) -> Mapping[str, int]:
        weights = list(self.states.weights())
        pointers = {weight.untyped_storage().data_ptr() for weight in weights}
        return {
            "weights": _bytes(weights),
            "gradients": _bytes(self.states.gradients()),
            "optimizer": _bytes(
                tensor
                for tensor in self.states.optimizer_tensors()
                if tensor.untyped_storage().data_ptr() not in pointers
            ),
        }

    def close(self) -> None:
        """Destroy Megatron's process groups, and the default one if it has only this rank."""
        groups = [
            group for group in parallel_state._global_process_group_list or () if group is not None
        ]
        parallel_state.destroy_model_parallel()
        for group in groups:
            dist.destroy_process_group(group)
        if self._alone:
            dist.destroy_process_group()


def _unseen(mask: Tensor) -> Tensor:
    """Return a mask (samples, 1, tokens, tokens) that is true where a token does not attend to
    another.

    The given mask (samples, tokens) is 0 at padding. Each token attends to itself at least, so that
    the softmax is defined at padding.
    """
    tokens = mask.shape[1]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).triu(1)
    own = torch.eye(tokens, dtype=torch.bool, device=mask.device)
    return ((later | (mask == 0)[:, None, :]) & ~own)[:, None]


def _join(place: Environment) -> bool:
    """Join the process group, and return whether a group of one rank had to be created. Megatron
    needs a group.
    """
    backend = device.backend(device.local(place.local_rank))
    if place.world > 1 or rank_and_world():
        connect(place.rank, place.world, place.address, backend)
        return False
    dist.init_process_group(
        backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    return True


def _groups(plan: Plan, args: Mapping[str, Any]) -> None:
    """Create Megatron's process groups as its own initialization does."""
    parallel = plan.parallel
    parallel_state.initialize_model_parallel(
        parallel.tensor or 1,
        parallel.pipeline or 1,
        args.get("virtual_pipeline_model_parallel_size"),
        num_distributed_optimizer_instances=args.get("num_distributed_optimizer_instances") or 1,
        order=DATA_LAST if args.get("use_tp_pp_dp_mapping") else PIPELINE_LAST,
        create_gloo_process_groups=False,
    )


def _overlaps(args: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each config field that takes a callback for overlapping collectives, with the chunk's
    method that serves as the callback (training.py: train).
    """
    if args.get("overlap_grad_reduce"):
        yield "no_sync_func", "no_sync"
        if args.get("align_grad_reduce"):
            yield "grad_sync_func", "start_grad_sync"
    if args.get("overlap_param_gather") and args.get("align_param_gather"):
        yield "param_sync_func", "start_param_sync"


def _learning_rate(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scheduler's arguments in optimizer steps (training.py:
    get_optimizer_param_scheduler).
    """
    total = (
        args.get("lr_decay_iters")
        or args.get("train_iters")
        or _iterations(args, "lr_decay")
        or _iterations(args, "train")
    )
    if total is None and args["lr_decay_style"] != "constant":
        raise ConfigError(
            f"lr_decay_style: found {args['lr_decay_style']}, without the length of the decay; "
            "set train_iters or lr_decay_iters"
        )
    total = total or ENDLESS
    fraction, batch = args.get("lr_warmup_fraction"), args.get("global_batch_size") or 1
    warmup = args.get("lr_warmup_iters") or (args.get("lr_warmup_samples") or 0) / batch
    decay = args.get("lr_wsd_decay_iters") or _iterations(args, "lr_wsd_decay")
    return {
        "init_lr": args["lr_warmup_init"],
        "max_lr": args["lr"],
        "min_lr": args["min_lr"],
        "lr_warmup_steps": warmup if fraction is None else fraction * total,
        "lr_decay_steps": total,
        "lr_decay_style": args["lr_decay_style"],
        "start_wd": args["start_weight_decay"],
        "end_wd": args["end_weight_decay"],
        "wd_incr_steps": total,
        "wd_incr_style": args["weight_decay_incr_style"],
        "wsd_decay_steps": decay,
        "lr_wsd_decay_style": args["lr_wsd_decay_style"],
    }


ENDLESS = 1 << 40
"""Number of steps that stands for a schedule without an end."""


def _iterations(args: Mapping[str, Any], name: str) -> float | None:
    samples, batch = args.get(f"{name}_samples"), args.get("global_batch_size")
    return samples / batch if samples and batch else None


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the number of bytes in the storages of the tensors. A storage that several tensors
    share is counted once.
    """
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())
