"""Trains a native GPT under the real DeepSpeed, with a training script as users of DeepSpeed write
it.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from bridge.checkpoint.groups import FILE, build_groups
from bridge.engine import comm, device
from bridge.engine.compiling import disable_compile
from bridge.engine.environment import detect
from bridge.engine.interface import Step, Workload
from bridge.engine.layers import logits_in
from bridge.engine.learning_rate import learning_rate
from bridge.engine.models.dense import Attention, Dense, Embedding, model_to_train, native
from bridge.engine.models.gpt import mean_cross_entropy
from bridge.engine.optimizer import DEFAULTS
from bridge.errors import BridgeError
from bridge.layout.tensor import TensorPlan
from bridge.plan.plan import LearningRate
from compat.deepspeed.code import PASSES
from compat.deepspeed.runtime.tracing import DeepSpeedSource
from compat.deepspeed.schedule import settings_of_code, steers

if TYPE_CHECKING:
    from bridge.engine.rows import Batch
    from compat.deepspeed.dialect import DeepSpeedFile

QUIET = (
    *(
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "flops_profiler",
        "comms_logger",
        "autotuning",
        "timers",
        "nebula",
    ),
    *("wall_clock_breakdown", "memory_breakdown", "dump_state", "steps_per_print", "log_level"),
)
"""Keys and sections for logs and profiles. They are removed from a config before a run."""


def join() -> int:
    """Join DeepSpeed's process group and return the number of ranks in it. The group has all ranks
    that the launcher started, or one rank without a launcher.
    """
    here = comm.rank_and_world()
    environment = detect()
    rank = here[0] if here else environment.rank
    os.environ.update(LOCAL_RANK=str(rank if here else environment.local_rank))
    backend, deepspeed = (
        device.backend(device.local(int(os.environ["LOCAL_RANK"]))),
        load_deepspeed(),
    )
    comm.connect(environment.rank, environment.world, environment.address, backend)
    if not deepspeed.comm.is_initialized():
        # DeepSpeed asks for a group even on one rank; port 0 leaves the choice of a free one to the
        # system.
        alone = (
            {}
            if comm.rank_and_world()
            else {"init_method": "tcp://127.0.0.1:0", "rank": 0, "world_size": 1}
        )
        deepspeed.comm.init_distributed(backend, auto_mpi_discovery=False, verbose=False, **alone)
    return int(deepspeed.comm.get_world_size())


def load_deepspeed() -> Any:
    """Return the module `deepspeed`, prepared for a run.

    On CPU, DeepSpeed then does not compile its shared-memory collectives, which only inference
    uses, and accepts fp16 on any CPU, because torch can multiply fp16 matrices on any CPU, though
    slowly. DeepSpeed's Muon module is imported without compilation, because DeepSpeed itself
    imports this module to check the optimizer's type.
    """
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    with disable_compile(), suppress(ModuleNotFoundError):  # before 0.18 there is none
        import deepspeed.runtime.zero.muon.muon_optimizer
    import deepspeed
    import deepspeed.comm
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not torch.cuda.is_available():
        type(deepspeed.accelerator.get_accelerator()).is_fp16_supported = lambda accelerator: True
    return deepspeed


def open_trainer(config: DeepSpeedFile, workload: Workload) -> DeepSpeedTrainer:
    """Return a trainer for `config`, with DeepSpeed's plain engine or its pipeline engine, as the
    code part requires. Raises `BridgeError` if DeepSpeed refuses the config.
    """
    is_pipeline = (config.effective.get("code.pipeline_stages") or 1) > 1
    try:
        return (PipelineTrainer if is_pipeline else EngineTrainer)(config, workload)
    except BridgeError:
        raise
    except Exception as error:
        raise BridgeError(
            f"deepspeed: refused by DeepSpeed itself: {type(error).__name__}: {error}"
        ) from error


def settings(config: DeepSpeedFile, workload: Workload) -> dict[str, Any]:
    """Return the config to pass to `deepspeed.initialize`: without logs, and with a micro batch
    size if `config` sets no batch size. On CPU the config selects torch's Adam, which computes the
    same as DeepSpeed's kernels but always corrects the bias.
    """
    data = undealt({key: value for key, value in config.ds_config.items() if key not in QUIET})
    # DeepSpeed needs one of them, and derives the other.
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & data.keys():
        data["train_micro_batch_size_per_gpu"] = workload.micro
    if not torch.cuda.is_available() and config.effective.get("optimizer.type") in (
        "adam",
        "adamw",
    ):
        decay = config.effective.get("optimizer.params.weight_decay") or 0.0
        arguments = data["optimizer"].get("params") or {}
        same = {name: value for name, value in arguments.items() if name != "bias_correction"}
        if arguments.get("bias_correction") is False:
            raise BridgeError(
                "optimizer.params.bias_correction: found False, but on CPU torch's Adam runs,"
                " which always corrects the bias; leave the key out"
            )
        data["optimizer"] = {
            **data["optimizer"],
            "params": {**same, "weight_decay": decay, "torch_adam": True},
        }
    return data


def undealt(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without `round_robin_gradients`. This key changes no numbers, but it makes
    DeepSpeed's utilities look for masters at wrong positions (zero/stage_1_and_2.py:
    _link_all_hp_params).
    """
    zero = data.get("zero_optimization")
    if not isinstance(zero, Mapping) or not zero.get("round_robin_gradients"):
        return dict(data)
    return {
        **data,
        "zero_optimization": {
            key: value for key, value in zero.items() if key != "round_robin_gradients"
        },
    }


def build_optimizer(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Return the optimizer that a script builds if the config names none."""
    return torch.optim.AdamW(
        parameters, **{name: DEFAULTS[name] for name in ("lr", "betas", "eps", "weight_decay")}
    )


def decay_groups(model: nn.Module, config: DeepSpeedFile, workload: Workload) -> list[Any]:
    """Return the value for the argument `model_parameters` of `deepspeed.initialize`: the groups of
    a file if the workload has one, two groups if biases and norms do not decay, else a flat list.
    """
    if workload.groups:
        return build_groups(workload.groups, dict(model.named_parameters()), FILE)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    decay = config.effective.get("optimizer.params.weight_decay")
    if config.given.get("code.decay_scope") != "matrices" or not decay:
        return weights
    matrices, rest = (
        [weight for weight in weights if (weight.ndim > 1) is wide] for wide in (True, False)
    )
    return [{"params": matrices, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]


def scheduler_of(config: DeepSpeedFile) -> Callable[[torch.optim.Optimizer], Any] | None:
    """Return the value for the argument `lr_scheduler` of `deepspeed.initialize`: a function that
    makes a scheduler from the optimizer; None if the script does not have to build a schedule.
    """
    if not steers(config.given):
        return None
    schedule = LearningRate.model_validate(settings_of_code(config.given))
    peak = config.effective.get("optimizer.params.lr") or DEFAULTS["lr"]
    # LambdaLR multiplies the group's first rate, so the schedule's rate is divided by its peak.
    factor = lambda step: learning_rate(peak, schedule, step) / peak  # noqa: E731
    return partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=factor)


def exact(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's buffers before training, such as the angles of rotary positions."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def restore(model: nn.Module, copies: Mapping[str, Tensor]) -> None:
    """Set a model's buffers to the copies in `copies`, because DeepSpeed rounds buffers together with
    the weights.
    """
    for name, buffer in model.named_buffers():
        if name in copies:
            buffer.data = copies[name].to(buffer.device)


class DeepSpeedTrainer:
    """Base of the trainers for DeepSpeed's two engines. `bridge.engine.interface.Trainer` documents the
    methods.
    """

    def __init__(self, config: DeepSpeedFile, workload: Workload) -> None:
        self.config, self.workload, self.ds = config, workload, load_deepspeed()
        self._linear = F.linear  # which level 3 replaces by its own for the whole process (zero/partition_parameters.py: Init)
        model, data = self.model(workload), settings(config, workload)
        self.adapt(data)
        self.engine = self._initialize(model, data)
        self._gradients = 0
        # Gradients are counted right before the update, when those of the whole step are held.
        self._take_step, self.engine._take_model_step = (
            self.engine._take_model_step,
            self._watch_step,
        )

    def _watch_step(self, *arguments: Any, **keywords: Any) -> None:
        self.count()
        self._take_step(*arguments, **keywords)

    def count(self) -> None:
        """Count the bytes of the gradients that exist now, and keep the largest count."""
        self._gradients = max(self._gradients, _bytes(gradients(self.engine)))

    def _initialize(self, model: nn.Module, data: dict[str, Any]) -> Any:
        optimizer = None if self.config.effective.get("optimizer.type") else build_optimizer
        engine, *_ = self.ds.initialize(
            model=model,
            model_parameters=decay_groups(model, self.config, self.workload),
            optimizer=optimizer,
            lr_scheduler=scheduler_of(self.config),
            config=data,
            dist_init_required=False,
        )
        return engine

    def trace_source(self) -> DeepSpeedSource:
        """Return what a trace of this run reads."""
        return DeepSpeedSource(self.engine)

    @property
    def micro(self) -> int:
        return int(self.engine.train_micro_batch_size_per_gpu())

    @property
    def accumulation(self) -> int:
        return int(self.engine.gradient_accumulation_steps())

    @property
    @abstractmethod
    def data(self) -> tuple[int, int]:
        """Return this rank's index among the data ranks, and the number of data ranks."""

    @abstractmethod
    def model(self, workload: Workload) -> nn.Module:
        """Return the model that the script passes to `deepspeed.initialize`."""

    @abstractmethod
    def parameters_by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters with the names that they have in the whole model."""

    @abstractmethod
    def run(self, batches: list[Batch]) -> float:
        """Run one step. Return the step's mean loss over all ranks."""

    def adapt(self, data: dict[str, Any]) -> None:
        """Add the settings that depend on this model to the config."""

    def train_batch(self, batches: Iterable[Batch]) -> Step:
        lr, self._gradients, scale = (
            self.engine.get_lr()[0],
            0,
            getattr(self.engine.optimizer, "loss_scale", None),
        )
        loss = self.run(list(islice(batches, self.accumulation)))
        norm = self.engine.get_global_grad_norm()
        return Step(
            loss,
            None if norm is None else float(norm),
            float(lr),
            bool(self.engine.was_step_applied()),
            scale and float(scale),
        )

    def resume(self, place: Path) -> int:
        folder, _ = self.engine.load_checkpoint(str(place.parent), tag=place.name)
        BridgeError.raise_if(
            []
            if folder
            else [
                f"{place}: DeepSpeed found nothing to load in this folder; name the folder of a"
                " saved checkpoint"
            ]
        )
        return int(self.engine.global_steps)

    def weights(self) -> Mapping[str, Tensor]:
        copies = masters(self.engine)
        own = {
            name: _full_master(weight, copies).detach().float().cpu()
            for name, weight in self.parameters_by_name()
        }
        return self.join_parts(self._everyones(own))

    def join_parts(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return whole parameters, joined from the parts of all ranks."""
        return {name: tensor for part in reversed(parts) for name, tensor in part.items()}

    def _everyones(self, own: Any) -> list[Any]:
        answers: list[Any] = [None] * self.ds.comm.get_world_size()
        self.ds.comm.all_gather_object(answers, own)
        return answers

    def bytes(self) -> Mapping[str, int]:
        weights = list(local_weights(self.engine))
        return {
            "weights": _bytes(weights),
            "gradients": self._gradients,
            "optimizer": _bytes(state(self.engine), weights),
        }

    def close(self) -> None:
        F.linear = self._linear
        self.engine.destroy()
        self.ds.utils.groups._release_process_group_references()


class EngineTrainer(DeepSpeedTrainer):
    """Trains with DeepSpeed's plain engine: forward, backward and step for each microbatch. AutoTP
    splits the model if the config asks for it.
    """

    @property
    def passes(self) -> int:
        """Return the number of calls of `backward` for each call of `step`."""
        return PASSES if self.config.effective.get("code.manual_accumulation") else 1

    @property
    @override
    def accumulation(self) -> int:
        return super().accumulation * self.passes

    @property
    def tensor(self) -> int:
        """Return the number of ranks over which AutoTP splits the model."""
        sizes = (
            self.config.effective.get(path) or 1
            for path in ("code.tensor_parallel", "tensor_parallel.autotp_size")
        )
        return max(sizes)

    @property
    @override
    def data(self) -> tuple[int, int]:
        rank, world = self.ds.comm.get_rank(), self.ds.comm.get_world_size()
        return rank // self.tensor, world // self.tensor

    @override
    def model(self, workload: Workload) -> nn.Module:
        module: nn.Module = model_to_train(workload)
        return module

    @override
    def run(self, batches: list[Batch]) -> float:
        total = torch.zeros((), dtype=torch.float64)
        for at, (tokens, targets) in enumerate(batches):
            loss = mean_cross_entropy(logits_in(self.engine(tokens)), targets)
            self.engine.backward(loss / self.passes if self.passes > 1 else loss)
            total += loss.detach()
            self.count()
            if (at + 1) % self.passes == 0:
                self.engine.step()
        self.ds.comm.all_reduce(total)
        return total.item() / (self.accumulation * int(self.ds.comm.get_world_size()))

    @override
    def parameters_by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.engine.module.named_parameters())

    def adapt(self, data: dict[str, Any]) -> None:
        """Add to the config the rules by which AutoTP splits this model. AutoTP has built-in rules
        only for models of Hugging Face.
        """
        if self.tensor > 1:
            names, section = (
                self.workload.architecture.tensor_plan(self.tensor),
                data.get("tensor_parallel") or {},
            )
            if not section:  # the plan's tensor ranks: AutoTP would divide the total by them too
                data.pop("train_batch_size", None)
            kinds = {"column": names.columns, "row": names.rows}
            # The vocabulary is not split: AutoTP has no split of it that this loss could take.
            specs = [
                {"patterns": [f".*{end}\\.weight$" for end in ends], "partition_type": kind}
                for kind, ends in kinds.items()
            ]
            split = {"use_default_specs": False, "layer_specs": specs}
            data["tensor_parallel"] = {
                "partition_config": split,
                **section,
                "autotp_size": self.tensor,
            }

    def _initialize(self, model: nn.Module, data: dict[str, Any]) -> Any:
        copies = exact(model) if self.workload.folder else {}
        engine = super()._initialize(model, data)
        restore(engine.module, copies)
        if self.tensor > 1:
            for module in model.modules():
                if isinstance(module, Attention):
                    module.split_over(self.ds.comm.get_rank() % self.tensor, self.tensor)
        return engine

    @override
    def join_parts(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        if self.tensor == 1:
            return parts[0]
        names = self.workload.architecture.tensor_plan(self.tensor)
        group = parts[: self.tensor]
        return {
            name: _join_tensor(names, name, [part[name] for part in group]) for name in group[0]
        }


def _join_tensor(names: TensorPlan, name: str, parts: list[Tensor]) -> Tensor:
    module, _, kind = name.rpartition(".")
    if module.endswith(tuple(names.columns)):
        return torch.cat(parts)
    return (
        torch.cat(parts, 1) if module.endswith(tuple(names.rows)) and kind == "weight" else parts[0]
    )


class PipelineTrainer(DeepSpeedTrainer):
    """Trains with DeepSpeed's pipeline engine over a `PipelineModule` of the model's layers."""

    @property
    @override
    def data(self) -> tuple[int, int]:
        grid = self.engine.grid
        return int(grid.get_data_parallel_rank()), int(grid.get_data_parallel_world_size())

    @override
    def model(self, workload: Workload) -> nn.Module:
        from deepspeed.pipe import PipelineModule

        whole, values = native(workload), self.config.effective
        self.prefixes, layers = _pipeline_layers(whole)
        module: nn.Module = PipelineModule(
            layers=layers,
            num_stages=values["code.pipeline_stages"],
            loss_fn=mean_cross_entropy,
            partition_method=values.get("code.partition_method") or "parameters",
            activation_checkpoint_interval=values.get("pipeline.activation_checkpoint_interval")
            or 0,
        )
        first = whole.state_dict()
        with torch.no_grad():
            for name, weight in self._names_in_model(module):
                weight.copy_(first[name])
        return module

    @override
    def run(self, batches: list[Batch]) -> float:
        return float(self.engine.train_batch(iter(batches)))

    @override
    def parameters_by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._names_in_model(self.engine.module)

    def _names_in_model(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        for name, weight in module.named_parameters():
            layer, _, rest = name.removeprefix("tied_modules.").partition(".")
            yield f"{self.prefixes.get(layer, layer)}.{rest}", weight


def _pipeline_layers(model: Dense) -> tuple[dict[str, str], list[Any]]:
    """Return two things: a mapping from a layer's number to the layer's name in the whole model,
    and the layers for a PipelineModule. If embedding and head share their weights, both become the
    same tied layer.
    """
    names, layers = [name for name, _ in model.named_children()], list(model)
    if not model.architecture.tied:
        return {str(at): name for at, name in enumerate(names)}, layers
    from deepspeed.pipe import TiedLayerSpec

    parts = Embedding, model.model, model.architecture
    tied = partial(TiedLayerSpec, "embedding", *parts, tied_weight_attr="tokens.weight")
    head = model.get_submodule("head")
    line = [tied(), *layers[1:-1], head.norm, tied(forward_fn=partial(_logits, head))]
    return {str(at): name for at, name in enumerate([*names[:-1], "head.norm"])}, line


def _logits(head: Any, embedding: Any, stream: Tensor) -> Tensor:
    """Return the logits of normalized hidden states, with the embedding's weights as the output
    matrix.
    """
    logits = F.linear(stream * getattr(head, "scale", 1.0), embedding.tokens.weight)
    cap = getattr(head, "softcap", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


# What lives in a DeepSpeed engine


def masters(engine: Any) -> dict[int, Tensor]:
    """Return the fp32 masters of a half-precision optimizer without ZeRO, by the `id` of the
    parameter. Empty for other optimizers.
    """
    optimizer = None if engine.zero_optimization() else engine.optimizer
    halves, wholes = getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ())
    return {
        id(half): whole
        for low, high in zip(halves, wholes, strict=True)
        for half, whole in zip(low, high, strict=True)
    }


def _full_master(weight: nn.Parameter, copies: Mapping[int, Tensor]) -> Tensor:
    """Return the whole master of a parameter, or the parameter itself if it has no master. All data
    ranks must take part.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    whole: Tensor | None = safe_get_full_fp32_param(weight)
    return copies.get(id(weight), weight) if whole is None else whole


def local_weights(engine: Any) -> Iterator[Tensor]:
    """Yield the weights that this rank stores between uses: whole weights, or this rank's parts at
    ZeRO stage 3.
    """
    for weight in engine.module.parameters():
        yield weight.ds_tensor if hasattr(weight, "ds_tensor") else weight.data


def gradients(engine: Any) -> Iterator[Tensor]:
    """Yield the gradients that this rank stores: those of the parameters, and all tensors in the
    ZeRO optimizer's attributes with `grad` in the attribute's name.
    """
    yield from (weight.grad for weight in engine.module.parameters() if weight.grad is not None)
    if engine.zero_optimization() or engine.bfloat16_enabled():
        yield from _tensors(
            [value for name, value in vars(engine.optimizer).items() if "grad" in name]
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.dim():
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(inner)


def state(engine: Any) -> Iterator[Tensor]:
    """Yield the moments and the masters that the optimizer updates, without the step counts."""
    for weight, values in engine.basic_optimizer.state.items():
        yield weight.data
        yield from (value for value in values.values() if isinstance(value, Tensor) and value.dim())


def _bytes(tensors: Iterable[Tensor], beside: Iterable[Tensor] = ()) -> int:
    """Return the number of bytes in the storages of `tensors`. Each storage counts once, and
    storages that `beside` uses too do not count.
    """
    left_out = {tensor.untyped_storage().data_ptr() for tensor in beside}
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(size for place, size in sizes.items() if place not in left_out)
