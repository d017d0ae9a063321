"""DeepSpeed's BERT layer, computed with torch's operations.

The parameters have the same names, and the numbers are equal up to rounding. Source:
deepspeed/ops/transformer/transformer.py; csrc/transformer/ds_transformer_cuda.cpp for the order of
the operations; csrc/transformer/gelu_kernels.cu for the approximation of GELU.
"""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bridge.errors import BridgeError

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"]


class DeepSpeedTransformerConfig:
    """Sizes and settings of a BERT layer. Settings by which DeepSpeed's kernels save memory have no
    effect.
    """

    def __init__(
        self,
        batch_size: int = -1,
        hidden_size: int = -1,
        intermediate_size: int = -1,
        heads: int = -1,
        attn_dropout_ratio: float = -1,
        hidden_dropout_ratio: float = -1,
        num_hidden_layers: int = -1,
        initializer_range: float = -1,
        layer_norm_eps: float = 1e-12,
        local_rank: int = -1,
        seed: int = -1,
        fp16: bool = False,
        pre_layer_norm: bool = True,
        normalize_invertible: bool = False,
        gelu_checkpoint: bool = False,
        adjust_init_range: bool = True,
        attn_dropout_checkpoint: bool = False,
        stochastic_mode: bool = False,
        return_tuple: bool = False,
        training: bool = True,
    ) -> None:
        settings = {name: value for name, value in locals().items() if name != "self"}
        self.__dict__.update(settings)
        self.intermediate_size = intermediate_size if intermediate_size > 0 else 4 * hidden_size
        self.layer_id = -1

    @classmethod
    def from_dict(cls, json_object: dict[str, Any]) -> DeepSpeedTransformerConfig:
        """Return a config with the values of a dictionary."""
        config = cls()
        config.__dict__.update(json_object)
        return config

    @classmethod
    def from_json_file(cls, json_file: str) -> DeepSpeedTransformerConfig:
        """Return a config from a JSON file in UTF-16, the encoding in which DeepSpeed reads it."""
        return cls.from_dict(json.loads(Path(json_file).read_text(encoding="utf-16")))


class DeepSpeedTransformerLayer(nn.Module):
    """A BERT layer: attention and a feed-forward layer. With `pre_layer_norm` a norm comes before
    each of the two, else after each.
    """

    layer_id = 0
    attn_qkvw: Tensor
    attn_qkvb: Tensor
    attn_ow: Tensor
    attn_ob: Tensor
    attn_nw: Tensor
    attn_nb: Tensor
    inter_w: Tensor
    inter_b: Tensor
    output_w: Tensor
    output_b: Tensor
    norm_w: Tensor
    norm_b: Tensor

    def __init__(
        self, config: Any, initial_weights: Any = None, initial_biases: Any = None
    ) -> None:
        super().__init__()
        if initial_weights is not None or initial_biases is not None:
            raise BridgeError(
                "DeepSpeedTransformerLayer: found initial_weights or initial_biases, which are for DeepSpeed's own tests; copy"
                " values into the layer's parameters instead"
            )
        if config.hidden_size % config.heads:
            raise BridgeError(
                f"DeepSpeedTransformerLayer: found hidden_size {config.hidden_size} and heads"
                f" {config.heads}; make hidden_size a multiple of heads"
            )
        self.config: Any = config
        config.layer_id = DeepSpeedTransformerLayer.layer_id
        DeepSpeedTransformerLayer.layer_id += 1
        wide, inner = config.hidden_size, config.intermediate_size
        shapes = {
            "attn_qkvw": (3 * wide, wide),
            "attn_qkvb": (3 * wide,),
            "attn_ow": (wide, wide),
            "attn_ob": (wide,),
            "attn_nw": (wide,),
            "attn_nb": (wide,),
            "inter_w": (inner, wide),
            "inter_b": (inner,),
            "output_w": (wide, inner),
            "output_b": (wide,),
            "norm_w": (wide,),
            "norm_b": (wide,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.init_transformer_weights(config.adjust_init_range)

    def init_transformer_weights(self, adjust_init_range: bool = False) -> None:
        """Set the initial weights. With `adjust_init_range`, the matrices that write into the
        residual stream get smaller values, but as in DeepSpeed only on the first local rank.
        """
        config = self.config
        spread = lead = config.initializer_range
        if adjust_init_range and config.local_rank == 0:
            lead = spread / sqrt(2.0 * config.num_hidden_layers)
        for name, weight in self.named_parameters():
            if name in ("attn_nw", "norm_w"):
                weight.data.fill_(1.0)
            elif weight.dim() == 1:
                weight.data.zero_()
            else:
                weight.data.normal_(0.0, lead if name in ("attn_ow", "output_w") else spread)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Any = None,
        layer_head_mask: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        grads: Any = None,
    ) -> Any:
        """Compute the layer's output for inputs of shape (batch, tokens, features); the output has
        the same shape.

        The mask is added to the attention scores. The other arguments have no effect, as in
        DeepSpeed.
        """
        before, stream = self.config.pre_layer_norm, hidden_states
        first, second = (self.norm_w, self.norm_b), (self.attn_nw, self.attn_nb)
        stream = stream + self._apply_attention(
            self._apply_norm(stream, *first) if before else stream, attention_mask
        )
        norm = self._apply_norm(stream, *second)
        inner = functional.gelu(
            functional.linear(norm, self.inter_w, self.inter_b), approximate="tanh"
        )
        update = self._apply_dropout(functional.linear(inner, self.output_w, self.output_b))
        output = stream + update if before else self._apply_norm(norm + update, *first)
        return (output,) if self.config.return_tuple else output

    def _apply_norm(self, stream: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(
            stream, stream.shape[-1:], weight, bias, self.config.layer_norm_eps
        )

    def _apply_attention(self, stream: Tensor, mask: Tensor | None) -> Tensor:
        config = self.config
        shape = (*stream.shape[:2], 3, config.heads, config.hidden_size // config.heads)
        query, key, value = (
            functional.linear(stream, self.attn_qkvw, self.attn_qkvb)
            .view(shape)
            .permute(2, 0, 3, 1, 4)
        )
        dropout = max(config.attn_dropout_ratio, 0.0) if self.training else 0.0
        attention = functional.scaled_dot_product_attention(query, key, value, mask, dropout)
        return self._apply_dropout(
            functional.linear(attention.transpose(1, 2).flatten(2), self.attn_ow, self.attn_ob)
        )

    def _apply_dropout(self, stream: Tensor) -> Tensor:
        return functional.dropout(stream, max(self.config.hidden_dropout_ratio, 0.0), self.training)
