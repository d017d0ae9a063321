"""Builds Megatron-Core's own GPT in the shape of the native GPT, from real config objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn

from bridge.layout.architecture import Architecture
from compat.megatron import objects
from compat.megatron.checkpoint.ranks import renumber_layer
from compat.megatron.dialect import MegatronConfig
from compat.megatron.objects.fields import DDP, OPTIMIZER, TRANSFORMER, defaults
from compat.megatron.runtime.config_objects import build_object

RUN = (
    *(
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "distribute_saved_activations",
    ),
    *(
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
    ),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("calculate_per_token_loss", "attention_softmax_in_fp32", "fp32_residual_connection"),
)
"""Names of fields of TransformerConfig that describe the run rather than the model; all fields of
ModelParallelConfig do so too."""

KERNELS: Mapping[str, Any] = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "cross_entropy_loss_fusion": False,
    "tp_comm_overlap": False,
}
"""Settings that switch off kernels which need Apex, Transformer Engine or a GPU. Without these
kernels, sums are rounded differently."""


STATES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Names of the settings of number formats that the precision-aware optimizer has."""

EXPERTS: Mapping[str, Any] = {
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_permute_fusion": False,
}
"""Settings with which experts need no GPU kernels: one expert after the other, on gathered tokens.
"""


def config_of_flags(config: MegatronConfig) -> Any:
    """Build the TransformerConfig of a launch whose flags describe the model. Only dropout and
    kernels differ from the launch.
    """
    args = {**config.args.flat(), "hidden_dropout": 0.0, "attention_dropout": 0.0}
    whole = objects.transformer(args, config.version)
    kernels = {**KERNELS, FUSED: whole[FUSED] and whole["activation_func"] == "gelu"}
    return build_object(
        TRANSFORMER,
        {
            **{name: whole[name] for name in defaults(config.version, TRANSFORMER)},
            **kernels,
            **EXPERTS,
        },
    )


FUSED = "bias_activation_fusion"
"""Name of the setting of a fused kernel that needs no GPU. It computes the approximate GELU, so the
model differs without it."""


def transformer_config(config: MegatronConfig, shape: Architecture) -> Any:
    """Build a TransformerConfig with the run settings of `config` and a model of the given shape."""
    whole = objects.transformer({**config.args.flat(), **_sizes(shape)}, config.version)
    run = {name: whole[name] for name in (*config.model_parallel, *RUN)}
    return build_object(TRANSFORMER, {**run, **_sizes(shape), **_shape(shape), **KERNELS})


def ddp_config(config: MegatronConfig) -> Any:
    """Build the DistributedDataParallelConfig."""
    return build_object(DDP, config.ddp)


def optimizer_config(config: MegatronConfig) -> Any:
    """Build the OptimizerConfig.

    Megatron's precision-aware optimizer needs Transformer Engine. Without Transformer Engine,
    torch's optimizer is used if all state is fp32, because both then compute the same. Without a
    GPU, offload is switched off, because the state is in the host's memory anyway.
    """
    settings = config.optimizer.flat()
    formats = {str(settings[name]) for name in STATES if name in settings}
    if find_spec("transformer_engine") is None and formats <= {"torch.float32"}:
        settings = {**settings, "use_precision_aware_optimizer": False}
    if not torch.cuda.is_available() and "optimizer_cpu_offload" in settings:
        settings = {**settings, "optimizer_cpu_offload": False}
    return build_object(OPTIMIZER, settings)


def _sizes(shape: Architecture) -> dict[str, Any]:
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "ffn_hidden_size": shape.ffn,
        "kv_channels": shape.head,
    }


def _shape(shape: Architecture) -> dict[str, Any]:
    return {
        "activation_func": "silu" if shape.gated else "gelu",
        "gated_linear_unit": shape.gated,
        "normalization": {"layer": "LayerNorm", "rms": "RMSNorm"}[shape.norm],
        "layernorm_epsilon": 1e-5,
        "add_bias_linear": shape.bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


class Norm(nn.Module):
    """A norm in plain torch, zero-centred if the config says so.

    Megatron's own norms need Apex or Transformer Engine. Like those norms, this class marks its
    weights, so that sequence parallelism sums the gradients of the weights over the tensor group.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **more: Any) -> None:
        super().__init__()
        self.eps, self.rms = eps, config.normalization == "RMSNorm"
        # Zero-centred weights are kept as their difference from 1.
        self.centre = float(config.layernorm_zero_centered_gamma)
        self.weight = nn.Parameter(torch.full((hidden_size,), 1.0 - self.centre))
        self.bias = None if self.rms else nn.Parameter(torch.zeros(hidden_size))
        for weight in self.parameters():
            weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        weight = self.weight + self.centre if self.centre else self.weight
        if self.rms:
            return nn.functional.rms_norm(x, weight.shape, weight, self.eps)
        return nn.functional.layer_norm(x, weight.shape, weight, self.bias, self.eps)


def block_spec(config: Any, place: int | None) -> Any:
    """Return Megatron's local spec for the layers of this rank, with `Norm` for all norms."""
    return _with_norm(
        get_gpt_decoder_block_spec(
            config,
            False,
            normalization=config.normalization,
            vp_stage=place,
            **({"qk_l2_norm": True} if getattr(config, "qk_l2_norm", False) else {}),
        )
    )


def _with_norm(spec: Any) -> Any:
    """Return the spec with `Norm` instead of Megatron's wrapper of torch's norms."""
    if spec is WrappedTorchNorm:
        return Norm
    if isinstance(spec, list):
        return [_with_norm(part) for part in spec]
    if is_dataclass(spec) and not isinstance(spec, type):
        return replace(
            spec, **{part.name: _with_norm(getattr(spec, part.name)) for part in fields(spec)}
        )
    return spec


def parts(config: Any, shape: Architecture, positions: Mapping[str, Any]) -> list[nn.Module]:
    """Build the model chunks of this rank, one for each virtual stage."""
    virtual: int | None = config.virtual_pipeline_model_parallel_size
    places = [None] if virtual is None else list(range(virtual))
    return [_part(config, shape, place, positions) for place in places]


def wrap_chunks(config: Any, ddp: Any, parts: list[nn.Module]) -> list[Any]:
    """Wrap the model chunks as Megatron's training does."""
    return [
        DistributedDataParallel(config, ddp, part, disable_bucketing=index > 0)
        for index, part in enumerate(parts)
    ]


def positions(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of GPTModel about positions. These arguments are no fields of the
    model's config.
    """
    return {
        "rotary_percent": args["rotary_percent"],
        "rotary_base": args["rotary_base"],
        "rope_scaling": bool(args.get("use_rope_scaling")),
        "rope_scaling_factor": args.get("rope_scaling_factor") or 8.0,
        "seq_len_interpolation_factor": args.get("rotary_seq_len_interpolation_factor"),
    }


def _part(
    config: Any, shape: Architecture, place: int | None, positions: Mapping[str, Any]
) -> nn.Module:
    kind = "rope" if shape.rotary else "learned_absolute" if shape.rows else "none"
    part: Any = GPTModel(
        config,
        block_spec(config, place),
        padded_vocabulary(shape, config.tensor_model_parallel_size),
        shape.rows or shape.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=place),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=place),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type=kind,
        vp_stage=place,
        **positions,
    )
    if part.post_process:
        part.output_layer.register_forward_hook(_mask_padding(shape.vocab))
    module: nn.Module = part.to(torch.cuda.current_device())
    return Float16Module(config, module) if config.fp16 or config.bf16 else module


def padded_vocabulary(shape: Architecture, ranks: int) -> int:
    """Return the size of the vocabulary, rounded up to a multiple of the number of tensor ranks."""
    return -(-shape.vocab // ranks) * ranks


def _mask_padding(vocab: int) -> Any:
    """Return a hook that masks the logits of padded vocabulary entries, so that the padding does
    not change the loss.
    """

    def hook(module: Any, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, rest = output
        # Tensor ranks hold equal runs of the padded vocabulary: this one begins at word `first`.
        first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        padding = torch.arange(first, first + logits.shape[-1], device=logits.device) >= vocab
        return logits.masked_fill(
            padding, torch.finfo(logits.dtype).min
        ) if padding.any() else logits, rest

    return hook


def bare(chunk: Any) -> Any:
    """Return the GPT without the wrappers that training adds."""
    return bare(chunk.module) if hasattr(chunk, "module") else chunk


def parameters_by_name(chunks: list[Any]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter of all parts once, with the layer's index in the whole model in its
    name.
    """
    for chunk in map(bare, chunks):
        # A rank numbers its own layers from 0; `layer_number` counts those of the whole model from
        # 1.
        layers = {index: layer.layer_number - 1 for index, layer in enumerate(chunk.decoder.layers)}
        for name, weight in chunk.named_parameters():
            yield renumber_layer(name, layers.__getitem__), weight
