"""Megatron-Core's own GPT in the shape of the native one, built from the config objects of the installed release."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn

from bridge.layout.architecture import Architecture
from compat.megatron import MegatronConfig, objects
from compat.megatron.objects.fields import DDP, OPTIMIZER, TRANSFORMER
from compat.megatron.runtime.real import built

RUN = (
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules", "distribute_saved_activations"),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("calculate_per_token_loss", "attention_softmax_in_fp32", "fp32_residual_connection"),
)
"""Fields of TransformerConfig beside those of ModelParallelConfig that tell of the run, not of the model."""

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
"""Kernels that only Apex, Transformer Engine or a GPU have: off. With them sums are rounded otherwise, and gelu is approximate.
"""


def transformer_config(config: MegatronConfig, shape: Architecture) -> Any:
    """The real TransformerConfig: the run as `config` says it, the model in the `shape` of the native one."""
    whole = objects.transformer({**config.args.flat(), **_sizes(shape)}, config.version)
    run = {name: whole[name] for name in (*config.model_parallel, *RUN)}
    return built(TRANSFORMER, {**run, **_sizes(shape), **_shape(shape), **KERNELS})


def ddp_config(config: MegatronConfig) -> Any:
    """The real DistributedDataParallelConfig."""
    return built(DDP, config.ddp)


def optimizer_config(config: MegatronConfig) -> Any:
    """The real OptimizerConfig."""
    return built(OPTIMIZER, config.optimizer)


def _sizes(shape: Architecture) -> dict[str, Any]:
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "ffn_hidden_size": shape.ffn,
        "kv_channels": shape.hidden // shape.heads,
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


class Norm:
    """Torch's norm, its weights marked as Megatron's own norms mark theirs, which need Apex or Transformer Engine: under
    sequence parallelism their gradients are summed over the tensor group.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **more: Any) -> nn.Module:  # type: ignore[misc]
        """As Megatron's spec of a layer asks for it."""
        norm = (nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm)(hidden_size, eps=eps)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def layer_spec(config: Any) -> ModuleSpec:
    """Megatron's spec of a layer of its own modules alone, with norms that know sequence parallelism."""
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    return spec


def chunks(config: Any, ddp: Any, shape: Architecture) -> list[Any]:
    """This rank's parts of the model, one for each virtual stage, as training wraps them."""
    virtual: int | None = config.virtual_pipeline_model_parallel_size
    places = [None] if virtual is None else list(range(virtual))
    found = [_part(config, shape, place) for place in places]
    return [DistributedDataParallel(config, ddp, part, disable_bucketing=index > 0) for index, part in enumerate(found)]


def _part(config: Any, shape: Architecture, place: int | None) -> nn.Module:
    layers = get_num_layers_to_build(config, place)
    part: Any = GPTModel(
        config,
        TransformerBlockSubmodules([layer_spec(config)] * layers, Norm),
        padded(shape, config.tensor_model_parallel_size),
        shape.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=place),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=place),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope" if shape.rotary else "learned_absolute",
        vp_stage=place,
    )
    if part.post_process:
        part.output_layer.register_forward_hook(_unpadded(shape.vocab))
    placed: nn.Module = part.to(torch.cuda.current_device())
    return Float16Module(config, placed) if config.fp16 or config.bf16 else placed


def padded(shape: Architecture, ranks: int) -> int:
    """The vocabulary, filled up to a multiple of the tensor ranks, which Megatron divides it by."""
    return -(-shape.vocab // ranks) * ranks


def _unpadded(vocab: int) -> Any:
    """Logits of padding never win, and pass no gradient: the loss is that of the vocabulary itself."""

    def hook(module: Any, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, rest = output
        first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        padding = torch.arange(first, first + logits.shape[-1], device=logits.device) >= vocab
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min) if padding.any() else logits, rest

    return hook


def bare(chunk: Any) -> Any:
    """The GPT itself, without what training wraps around it."""
    return bare(chunk.module) if hasattr(chunk, "module") else chunk


def named(chunks: list[Any]) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of all parts, each once, with layers by their number in the whole model."""
    for chunk in map(bare, chunks):
        layers = {str(index): layer.layer_number - 1 for index, layer in enumerate(chunk.decoder.layers)}
        for name, weight in chunk.named_parameters():
            yield _numbered(name, layers), weight


LAYERS = "decoder.layers."


def _numbered(name: str, layers: Mapping[str, int]) -> str:
    if not name.startswith(LAYERS):
        return name
    number, _, rest = name.removeprefix(LAYERS).partition(".")
    return f"{LAYERS}{layers[number]}.{rest}"
