"""Traces unmodified Megatron-Core models, with the names and shapes of the native GPT."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from bridge.engine.comm import Comm
from bridge.errors import BridgeError
from bridge.layout.architecture import Architecture
from bridge.layout.mesh import Mesh
from bridge.plan.plan import Parallel
from bridge.trace.hook import Hook
from bridge.trace.placement import Placement
from bridge.trace.record import Unit
from bridge.trace.source import Held, Kind, Moment, Now
from bridge.trace.tracer import is_recomputing
from compat.megatron import live
from compat.megatron.rules.table import ORDERS
from compat.megatron.runtime import model
from compat.megatron.runtime.states import States
from compat.megatron.runtime.weights import Share, pieces

GATHER = "whole tensors of the trace"
TIED = "embedding.tokens.weight"
"""Name of the parameter of which the last pipeline rank has a copy if the embeddings are tied."""
TOKENS = 1
"""Index of the dimension of native activations (batch, sequence, width) that sequence parallelism
splits."""


def takes(target: Any) -> bool:
    """Whether `target` is a chunk of a model as Megatron's training wraps it."""
    return hasattr(target, "ddp_config")


def source_of(chunks: Any, optimizer: Any, accumulation: int | None) -> MegatronSource:
    """Return the source of traces of `chunks`, a model chunk or a list with one for each virtual
    stage.

    Raises `BridgeError` if the optimizer or the number of microbatches is not given.
    """
    if optimizer is None or accumulation is None:
        raise BridgeError(
            "attach: chunks of Megatron-Core need optimizer=, and accumulation= (microbatches per "
            "step)"
        )
    return MegatronSource(
        chunks if isinstance(chunks, list | tuple) else [chunks], optimizer, accumulation
    )


class Window(nn.Module):
    """Stands for a native layer on top of Megatron's modules.

    Its hooks get the input of Megatron's module `first` and the output of Megatron's module `last`.
    Both are in the native shape: (batch, sequence, width) instead of (sequence, batch, width). If
    `first` and `last` are None, the layer is on another rank, and hooks are never called.
    """

    def __init__(
        self,
        first: nn.Module | None = None,
        last: nn.Module | None = None,
        columns: int | None = None,
    ) -> None:
        super().__init__()
        self._ends, self._columns = (first, last), columns

    def register_forward_pre_hook(self, hook: Callable[..., Any], **more: Any) -> Any:
        """Call `hook` with (input,) before each forward pass.

        The input that the hook gets is in the autograd graph, so the hook can watch the gradient of
        the input.
        """

        def call_with_window(
            module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
        ) -> Any:
            hidden = inputs[0] if inputs else keywords.get(HIDDEN)
            if hidden is None or not hidden.is_floating_point():
                hook(module, ())
                return None
            native = hidden.transpose(0, 1)
            hook(module, (native,))
            back = native.transpose(0, 1)
            return (
                ((back, *inputs[1:]), keywords) if inputs else (inputs, {**keywords, HIDDEN: back})
            )

        first = self._ends[0]
        return (
            first.register_forward_pre_hook(Hook(call_with_window), with_kwargs=True)
            if first
            else Nothing()
        )

    def register_forward_hook(self, hook: Callable[..., Any], **more: Any) -> Any:
        """Call `hook` with the output after each forward pass."""

        def call_with_window(module: nn.Module, inputs: Any, output: Any) -> None:
            stream = output[0] if isinstance(output, tuple) else output
            hook(module, inputs, stream.transpose(0, 1)[..., : self._columns])

        last = self._ends[1]
        return last.register_forward_hook(Hook(call_with_window)) if last else Nothing()


HIDDEN = "hidden_states"
"""Name of the keyword argument with a layer's input."""


class Nothing:
    """Stands in for a hook's handle if another rank has the layer: there is no hook to remove."""

    def remove(self) -> None:
        """Do nothing."""


class MegatronSource:
    """Source of traces of a training run with Megatron-Core's GPT.

    `chunks` are the wrapped model parts (DistributedDataParallel), one for each virtual stage.
    `optimizer` comes from `get_megatron_optimizer`; each of its steps follows `accumulation`
    microbatches of Megatron's schedules. `shape` is the shape of the native GPT; it is needed if
    the vocabulary is padded, because the chunks only have the padded size. Weights are the masters
    that the optimizer updates. State that the distributed optimizer shards is gathered, so all data
    ranks have to read it together.

    Raises `BridgeError` if the loss is averaged per token, because the weight of a microbatch is
    then known only at the end of a step. `bridge.trace.source.TraceSource` documents the methods.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        accumulation: int = 1,
        shape: Architecture | None = None,
    ) -> None:
        self.chunks, self.optimizer, self.accumulation = list(chunks), optimizer, accumulation
        self.models = [model.bare(chunk) for chunk in self.chunks]
        if self.chunks[0].ddp_config.use_megatron_fsdp:
            raise BridgeError(
                "attach: this Megatron-Core run shards its weights (Megatron-FSDP); "
                "trace a run without it"
            )
        self.states, self.shape = States(optimizer), shape or _shape(self.models[0])
        if self.models[0].config.calculate_per_token_loss:
            raise BridgeError(
                "attach: this Megatron-Core run averages its loss per token; "
                "trace a run with a loss per microbatch"
            )
        self._step, self._running = 1, 0
        self._norm: float | None = None
        self._passes = [0] * len(self.chunks)
        self._batch: tuple[Tensor, ...] = ()
        self._calls: dict[Moment, list[Callable[[], None]]] = {
            "reduced": [],
            "updated": [],
            "ended": [],
        }
        for index, chunk in enumerate(self.chunks):
            chunk.register_forward_pre_hook(Hook(self._entering(index)), with_kwargs=True)
        self._watch()

    def _entering(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
            if module.training and torch.is_grad_enabled() and not is_recomputing():
                self._running = index
                self._passes[index] += 1
                arguments = (*inputs[:1], keywords.get("input_ids"), keywords.get("labels"))
                self._batch = tuple(tensor for tensor in arguments if isinstance(tensor, Tensor))

        return hook

    def _watch(self) -> None:
        """Notify observers when gradients are reduced, weights are updated and a step has ended.
        Megatron reduces gradients before the optimizer's step begins.
        """
        step = self.optimizer.step

        def step_and_report(*arguments: Any, **keywords: Any) -> Any:
            self._tell("reduced")
            result = step(*arguments, **keywords)
            self._norm = result[1] if isinstance(result, tuple) and len(result) > 1 else None
            self._tell("updated")
            self._tell("ended")
            self._step += 1
            self._passes = [0] * len(self.chunks)
            return result

        self.optimizer.step = step_and_report

    def _tell(self, moment: Moment) -> None:
        for call in self._calls[moment]:
            call()

    @cached_property
    def comm(self) -> Comm:
        """Megatron's groups."""
        return comm()

    @cached_property
    def layers(self) -> Mapping[str, nn.Module]:
        """All layers of the model; the hooks on layers of other pipeline ranks are never called."""
        return {name: Window() for name in self.shape.names} | dict(self._windows())

    def _windows(self) -> Iterator[tuple[str, nn.Module]]:
        for part in self.models:
            if part.pre_process:
                yield self.shape.names[0], Window(part.embedding, part.embedding)
            for layer in part.decoder.layers:
                yield self.shape.names[layer.layer_number], Window(layer, layer)
            if part.post_process:
                yield (
                    self.shape.names[-1],
                    Window(part.decoder.final_layernorm, part.output_layer, self._columns),
                )

    @property
    def entrance(self) -> str:
        return next(self._windows())[0]

    @property
    def at_hand(self) -> bool:
        """Whether weights and gradients can be read without communication between ranks."""
        return not self.states.sharded

    @property
    def recomputes(self) -> bool:
        return bool(self.models[0].config.recompute_granularity == "full")

    @property
    def holders(self) -> Sequence[tuple[int, ...]]:
        """The first and the last pipeline rank, if the embeddings are tied."""
        return [self._tied] if self._tied else ()

    @cached_property
    def _tied(self) -> tuple[int, ...]:
        """The pipeline ranks that have copies of the tied embedding; empty for a single copy."""
        ranks = self.comm.mesh.sizes["pipeline"]
        return (0, ranks - 1) if self.shape.tied and ranks > 1 else ()

    @property
    def share(self) -> Share:
        """The index of this rank among the tensor ranks, and their number."""
        group = self.comm.group("tensor")
        return Share(group.index, group.size)

    @property
    def _columns(self) -> int:
        """Number of tokens of the vocabulary, without padding, whose logits this rank computes."""
        rows = model.padded_vocabulary(self.shape, self.share.ranks) // self.share.ranks
        return max(0, min(rows, self.shape.vocab - self.share.index * rows))

    def now(self) -> Now:
        ranks = self.comm.group("data")
        place = max(self._passes[self._running] - 1, 0) % self.accumulation
        return Now(self._step, place * ranks.size + ranks.index, self.accumulation * ranks.size)

    def factors(self) -> Mapping[Unit, float]:
        """Return the factors by which recorded tensors differ from tensors of an unscaled loss.

        Gradients of activations contain the loss scale. Gradients of parameters are read after
        clipping, which Megatron does within its step.
        """
        scale = float(self.optimizer.get_loss_scale())
        return {
            "parameter": (self.clip or 1.0) / scale,
            "activation": 1 / scale / self.comm.group("data").size,
        }

    @property
    def clip(self) -> float | None:
        """The factor by which Megatron's clipping multiplied all gradients of the step that ends;
        None if its step told no norm.
        """
        clip = float(getattr(getattr(self.optimizer, "config", None), "clip_grad", 0.0) or 0.0)
        if not clip:
            return 1.0
        return None if self._norm is None else min(1.0, clip / (float(self._norm) + 1e-6))

    def activation(self, layer: str, tensor: Tensor, output: bool) -> Placement:
        """Return the position of a recorded activation in the whole tensor.

        Logits are split by vocabulary. Other activations are split by tokens if sequence
        parallelism is on.
        """
        shape, (index, ranks) = tuple(tensor.shape), (self.share.index, self.share.ranks)
        if ranks == 1:
            return Placement.full(shape)
        if output and layer == self.shape.names[-1]:
            start = index * (model.padded_vocabulary(self.shape, ranks) // ranks)
            return Placement.box(
                (*shape[:-1], self.shape.vocab), (*(0 for _ in shape[:-1]), start), shape
            )
        split = self.models[0].config.sequence_parallel
        return (
            Placement.full(shape).split(TOKENS, index, ranks)
            if split
            else Placement.full(shape, ("tensor",))
        )

    def tensors(self, kind: Kind) -> Iterator[Held]:
        if kind == "state":
            yield self._counters()
        elif kind in ("weight", "gradient", "moment") or (
            kind == "replica" and self._gathers_by_end
        ):
            for name, weight in model.parameters_by_name(self.chunks):
                if self._tied or not getattr(weight, "shared", False):
                    yield from self._local_tensors(name, weight, kind)

    @property
    def _gathers_by_end(self) -> bool:
        """Whether sharded weights are gathered by the end of a step.

        If the gathering is overlapped, it takes place in the next step.
        """
        return self.states.sharded and not self.chunks[0].ddp_config.overlap_param_gather

    def _local_tensors(self, name: str, weight: nn.Parameter, kind: Kind) -> Iterator[Held]:
        """Yield the native parameters that one of Megatron's parameters consists of."""
        replicas = () if self.states.sharded and kind != "replica" else ("data",)
        for part, tensor in self._of(weight, kind):
            for piece in pieces(name, self.shape, self.share):
                local = piece.of(tensor)
                layer, _, rest = piece.name.partition(".")
                label = ".".join(word for word in (rest, part) if word)
                tied = self._tied if piece.name == TIED else ()
                axes = (*replicas, *(("pipeline",) if tied else ()))
                yield Held(
                    layer, kind, label, local, piece.placement(tuple(local.shape), axes), tied
                )

    def _of(self, weight: nn.Parameter, kind: Kind) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors of one kind (weight, replica, gradient or moment) for a
        parameter. Each tensor comes with a suffix for the parameter's name.
        """
        states = self.states
        if kind == "replica":
            yield "", weight.detach()
        elif kind == "moment":
            yield from (
                (name, self._whole(weight, value)) for name, value in states.moments(weight).items()
            )
        else:
            yield (
                "",
                self._whole(
                    weight, states.master(weight) if kind == "weight" else states.gradient(weight)
                ),
            )

    def _whole(self, weight: nn.Parameter, shard: Tensor) -> Tensor:
        """Return a whole tensor of a parameter from `shard`, the elements on this rank. Elements on
        other data ranks are gathered.
        """
        if not self.states.sharded:
            return shard.detach().view(weight.shape)
        whole = self.states.fill_shape(weight, shard.detach())
        self.comm.all_reduce(GATHER, whole, self.comm.group("data"))()
        return whole

    def _counters(self) -> Held:
        rates = (float(group["lr"]) for group in self.optimizer.param_groups)
        numbers = torch.tensor(
            [self._step, float(self.optimizer.get_loss_scale()), *rates], dtype=torch.float64
        )
        return Held(
            "",
            "state",
            "counters",
            numbers,
            Placement.full(tuple(numbers.shape), tuple(self.comm.mesh.sizes)),
        )

    def batch(self) -> Iterator[Held]:
        """Yield the tensors of the current microbatch. All tensor ranks have the same microbatch."""
        for index, tensor in enumerate(self._batch):
            yield Held(
                "", "input", str(index), tensor, Placement.full(tuple(tensor.shape), ("tensor",))
            )

    def on(self, moment: Moment, call: Callable[[], None]) -> None:
        self._calls[moment].append(call)

    def settings(self) -> Mapping[str, object]:
        configs = {"model": self.models[0].config, "optimizer": self.states.part.config}
        pairs = (
            (f"{part}.{name}", value)
            for part, config in configs.items()
            for name, value in vars(config).items()
        )
        return {name: value for name, value in pairs if live.is_plain(value)}

    def about(self) -> Mapping[str, object]:
        formats = {
            str(weight.dtype).removeprefix("torch.")
            for chunk in self.chunks
            for weight in chunk.parameters()
        }
        return {
            "engine": "Megatron-Core",
            "mesh": dict(self.comm.mesh.sizes),
            "accumulation": self.accumulation,
            "formats": sorted(formats),
            "settings": {name: str(value) for name, value in self.settings().items()},
        }


def comm() -> Comm:
    """Return the communication groups of the mesh. Data ranks come before or after pipeline ranks,
    as in Megatron's own groups.
    """
    sizes = {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
    }
    mine = tuple(dist.get_process_group_ranks(parallel_state.get_data_parallel_group()))
    meshes = (
        Mesh.of(Parallel(**sizes, order=order), dist.get_world_size()) for order in ORDERS.values()
    )
    mesh = next(mesh for mesh in meshes if mesh.group(dist.get_rank(), "data") == mine)
    return Comm(mesh, dist.get_rank())


def _shape(part: Any) -> Architecture:
    """Return the shape of the native GPT that corresponds to a GPT of Megatron."""
    config = part.config
    return Architecture(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_query_groups,
        ffn=config.ffn_hidden_size,
        vocab=part.vocab_size,
        sequence=part.max_sequence_length,
        norm="rms" if config.normalization == "RMSNorm" else "layer",
        gated=config.gated_linear_unit,
        rotary=part.position_embedding_type == "rope",
        tied=part.share_embeddings_and_output_weights,
        bias=config.add_bias_linear,
        qkv_bias=config.add_bias_linear or config.add_qkv_bias,
    )
