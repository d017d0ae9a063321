"""A decoder as a list of layers, built from the model section of a plan: norms, positions, heads,
activations and experts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import ceil, floor, log, pi, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bridge.engine.interface import Workload
from bridge.engine.models.experts import SCORES, Routed
from bridge.engine.models.pretrained import open_model
from bridge.engine.randomness import seed_of
from bridge.errors import ConfigError
from bridge.layout.architecture import Architecture
from bridge.layout.tensor import TensorPlan
from bridge.plan.model import Model, Rotary, RotaryScaling
from bridge.plan.plan import Plan

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}
EPS, BASE = 1e-5, 10_000.0
"""Default values for the epsilon of norms and the base of rotary positions."""
SPREAD = 0.02
"""Default standard deviation of initial weights."""


class Dense(nn.Sequential):
    """Embedding, blocks and head. Takes tokens (batch, sequence), and returns logits (batch,
    sequence, vocab).

    The parameters have the names and shapes of `Architecture`. An initial weight depends only on
    `seed` and on the name of the parameter.
    """

    leading = 1
    trailing = 1

    def __init__(self, model: Model, seed: int = 1234) -> None:
        shape = Architecture.of(model)
        ConfigError.raise_if((*shape.problems(), *_beyond(model, shape)))
        embedding = Embedding(model, shape)
        layers: list[tuple[str, nn.Module]] = [("embedding", embedding)]
        layers += [(f"block{index}", Block(model, shape, index)) for index in range(shape.layers)]
        layers.append(("head", Head(model, shape, embedding)))
        super().__init__(OrderedDict(layers))
        self.architecture = shape
        presence = {
            "model.attention.norm": shape.head_norm != "none",
            "model.embedding.softcap": model.embedding.softcap is not None,
        }
        self.model = model
        self.whole = frozenset(path for path, there in presence.items() if there)
        for name, weight in self.named_parameters():
            _initialize(name, weight, model, seed)
        if embedding.tokens.padding_idx is not None:
            with torch.no_grad():
                embedding.tokens.weight[embedding.tokens.padding_idx] = 0.0

    def tensor_plan(self, ranks: int) -> TensorPlan:
        """Return the tensor plan that splits this model over `ranks` tensor ranks. Raises
        `ConfigError` if the model cannot be split.
        """
        if ranks > 1:
            ConfigError.raise_if(
                f"{path}: {why}; leave parallel.tensor at 1"
                for path, why in WHOLE.items()
                if path in self.whole
            )
        return self.architecture.tensor_plan(ranks)


def native(workload: Workload) -> Any:
    """Return the model to train: the model in the workload's folder, or the native model of the
    workload's plan, or else a GPT of the workload's shape.
    """
    if workload.folder is not None:
        return open_model(workload.folder, workload.seed, drops=workload.rows is None)
    return Dense(workload.model or model_of(workload.architecture), workload.seed)


def model_of(architecture: Architecture) -> Model:
    """Return the model section of a plan with the sizes of `architecture`. Raises `ConfigError` if the
    engine's own model does not support it.
    """
    ConfigError.raise_if((*architecture.problems(), *_unnamed(architecture)))
    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence", "tied", "dropout")
    positions = "rotary" if architecture.rotary else "learned" if architecture.rows else "none"
    settings = {
        **{name: getattr(architecture, name) for name in sizes},
        "attention.head_size": architecture.head_size,
        "attention.dropout": architecture.attention_dropout,
        "attention.qkv_bias": architecture.has_bias("qkv_bias"),
        "attention.output_bias": architecture.has_bias("output_bias"),
        "mlp.bias": architecture.has_bias("mlp_bias"),
        "mlp.gated": architecture.gated,
        "norm.kind": architecture.norm,
        "norm.bias": architecture.has_bias("norm_bias"),
        "embedding.positions": positions,
        "embedding.max_positions": architecture.rows or None,
        "embedding.dropout": architecture.dropout,
        "init.scaled": True,
    }
    return Plan.of({f"model.{path}": value for path, value in settings.items()}).model


def _unnamed(architecture: Architecture) -> Iterator[str]:
    """Yield a problem for each part of an architecture that `model_of` does not support."""
    options = {
        "model.experts": architecture.experts,
        "model.attention.latent": architecture.latent,
        "model.attention.norm": architecture.head_norm != "none",
        "model.attention.sinks": architecture.sinks,
        "model.norm.place": architecture.place != "before",
        "model.norm.shared": architecture.shared_norm,
        "model.embedding.width": architecture.width not in (None, architecture.hidden),
        "model.embedding.norm": architecture.embedding_norm,
        "model.embedding.output_bias": architecture.logits_bias,
    }
    yield from (
        f"{path}: the engine's own model does not support this setting; pass a model that does, or leave the setting out"
        for path in options
        if options[path]
    )


def model_to_train(workload: Workload) -> Any:
    """Return the model to train. If the workload has rows of the user's own batch, the model takes
    whole microbatches of these rows.
    """
    return native(workload) if workload.rows is None else workload.rows.fed(native(workload))


WHOLE = {
    "model.attention.norm": "this norm needs all heads, but a tensor rank has only some of them",
    "model.embedding.softcap": "the engine cannot cap logits that tensor ranks split by vocabulary",
}
"""Plan fields with which the model cannot be split over tensor ranks, with the reason."""


def _beyond(model: Model, shape: Architecture) -> Iterator[str]:
    """Yield a problem for each field of the plan that this model does not support."""
    scaling, row = model.rotary.scaling.kind, model.embedding.padding
    if not (row in (None, "none") or (isinstance(row, int) and row < shape.vocab)):
        yield f"model.embedding.padding: found {row}; expected a number below the vocabulary ({shape.vocab}), or none"
    options = {
        "model.moe.score": model.moe.score not in (None, *SCORES),
        "model.moe.groups": (model.moe.groups or 1) > 1,
        "model.moe.balance_bias": model.moe.balance_bias,
        "model.moe.aux_loss": model.moe.aux_loss,
        "model.moe.z_loss": model.moe.z_loss,
        "model.moe.capacity": model.moe.capacity,
        "model.attention.latent": shape.latent,
        "model.attention.sinks": shape.sinks,
        "model.embedding.positions": model.embedding.positions == "alibi",
        "model.embedding.width": shape.width not in (None, shape.hidden),
        "model.embedding.norm": shape.embedding_norm,
        "model.mlp.activation": model.mlp.activation not in (None, *ACTIVATIONS),
        "model.mlp.clamp": model.mlp.clamp or model.mlp.offset,
        "model.rotary.scaling.kind": scaling in ("dynamic", "longrope"),
        "model.predicted": model.predicted,
        "model.embedding.logit_scale": model.embedding.logit_scale if shape.logits_bias else None,
    }
    yield from (
        f"{path}: the engine's dense model does not support this setting; pass a model that does"
        for path in options
        if options[path]
    )


@torch.no_grad()
def _initialize(name: str, weight: Tensor, model: Model, seed: int) -> None:
    if weight.dim() < 2:
        offset = model.norm.zero_centred or name.endswith("bias")
        weight.fill_(0.0 if offset else 1.0)
        return
    spread = SPREAD if model.init.std is None else model.init.std
    # Two layers of each block add to the residual stream. Their variances sum up over the depth, so
    # each gets its part.
    if model.init.scaled and name.endswith(("out.weight", "down.weight")):
        spread /= sqrt(2 * (model.layers or 1))
    weight.normal_(0.0, spread, generator=torch.Generator().manual_seed(seed_of(seed, name)))


def _scale(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else tensor * factor


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension. Zero-centred weights are stored as their
    difference from one.
    """

    def __init__(self, model: Model, shape: Architecture, size: int) -> None:
        super().__init__()
        self.rms, self.centre = shape.norm == "rms", float(bool(model.norm.zero_centred))
        self.eps = EPS if model.norm.eps is None else model.norm.eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if shape.has_bias("norm_bias") else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.centre if self.centre else self.weight
        if self.rms:
            result = F.rms_norm(x, weight.shape, weight, self.eps)
            return result if self.bias is None else result + self.bias
        return F.layer_norm(x, weight.shape, weight, self.bias, self.eps)


class Embedding(nn.Module):
    """Turns tokens (batch, sequence) into vectors (batch, sequence, hidden)."""

    def __init__(self, model: Model, shape: Architecture) -> None:
        super().__init__()
        row = model.embedding.padding
        self.tokens = nn.Embedding(shape.vocab, shape.hidden, row if isinstance(row, int) else None)
        self.positions = nn.Embedding(shape.rows, shape.hidden) if shape.rows else None
        self.first, self.scale = model.embedding.offset or 0, model.embedding.scale or 1.0
        self.dropout = nn.Dropout(model.embedding.dropout or 0.0)

    def forward(self, tokens: Tensor) -> Tensor:
        vectors = _scale(self.tokens(tokens), self.scale)
        if self.positions is not None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            vectors = vectors + self.positions(places + self.first)
        result: Tensor = self.dropout(vectors)
        return result


class Block(nn.Module):
    """Attention and MLP with the residual stream (batch, sequence, hidden), and norms before them,
    after them, or both.
    """

    def __init__(self, model: Model, shape: Architecture, index: int) -> None:
        super().__init__()
        self.place, self.parallel = shape.place, bool(model.norm.parallel)
        self.norm1 = Norm(model, shape, shape.hidden)
        self.norm2 = None if shape.shared_norm else Norm(model, shape, shape.hidden)
        self.norm3, self.norm4 = (
            Norm(model, shape, shape.hidden) if shape.place == "both" else None for _ in range(2)
        )
        self.attention = Attention(model, shape, index)
        self.mlp = feed_forward(model, shape, index)
        self.dropout, self.scale = (
            nn.Dropout(model.dropout or 0.0),
            model.embedding.residual_scale or 1.0,
        )

    def forward(self, stream: Tensor) -> Tensor:
        second = self.norm2 or self.norm1
        if self.parallel:
            return (
                stream
                + self._scale_residual(self.attention(self.norm1(stream)))
                + self._scale_residual(self.mlp(second(stream)))
            )
        stream = stream + self._behind(self.attention, self.norm1, self.norm3, stream)
        return stream + self._behind(self.mlp, second, self.norm4, stream)

    def _behind(self, layer: nn.Module, norm: Norm, after: Norm | None, stream: Tensor) -> Tensor:
        """Return what `layer` adds to the stream, with a norm before the layer, a norm after it, or
        both.
        """
        if self.place == "after":
            return self._scale_residual(norm(layer(stream)))
        out: Tensor = layer(norm(stream))
        return self._scale_residual(out if after is None else after(out))

    def _scale_residual(self, out: Tensor) -> Tensor:
        return _scale(self.dropout(out), self.scale)


class Attention(nn.Module):
    """Causal attention of block `index`, in which groups of heads share keys and values. `heads` and
    `kv_heads` are the numbers on this rank.
    """

    def __init__(self, model: Model, shape: Architecture, index: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = shape.heads, shape.kv_heads, shape.head
        self.group = shape.heads // shape.kv_heads
        self.first_head = self.first_kv_head = 0
        outer, inner = self.heads * self.width, self.kv_heads * self.width
        qkv, output = shape.has_bias("qkv_bias"), shape.has_bias("output_bias")
        self.query = nn.Linear(shape.hidden, outer, qkv)
        self.key, self.value = (nn.Linear(shape.hidden, inner, qkv) for _ in range(2))
        self.out = nn.Linear(outer, shape.hidden, output)
        self.again = False
        attention = model.attention
        has_window = attention.windowed is None or attention.windowed[index]
        turns = model.rotary.layers is None or model.rotary.layers[index]
        self.core = Core(
            attention.window if has_window else None,
            attention.softcap,
            attention.scale,
            attention.dropout or 0.0,
        )
        self.turn = (
            Turn(model.rotary, self.width, bool(attention.window and has_window))
            if shape.rotary and turns
            else None
        )
        self.kind = shape.head_norm
        sizes = (self.width, self.width) if self.kind == "head" else (outer, inner)
        self.query_norm, self.key_norm = (
            Norm(model, shape, size) if self.kind != "none" else None for size in sizes
        )

    def forward(self, stream: Tensor) -> Tensor:
        query = self._apply_norm(self.query(stream), self.heads, self.query_norm)
        key = self._apply_norm(self.key(stream), self.kv_heads, self.key_norm)
        value = self._split(self.value(stream), self.kv_heads)
        if self.turn is not None:
            query, key = self.turn(query), self.turn(key)
        return self.mix_values(query, key, value)

    def _apply_norm(self, vectors: Tensor, heads: int, norm: Norm | None) -> Tensor:
        if norm is None:
            return self._split(vectors, heads)
        if self.kind == "width":
            return self._split(norm(vectors), heads)
        if self.kind == "head":
            result: Tensor = norm(self._split(vectors, heads))
            return result
        # A norm of each head's vectors, with weights of their own for each head.
        each = norm.weight.view(heads, 1, self.width)
        split = self._split(vectors, heads)
        return F.layer_norm(split, (self.width,), eps=norm.eps) * (each + norm.centre)

    def mix_values(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output of attention, (batch, sequence, hidden), after the output layer.
        Queries, keys and values have the shape (batch, heads, sequence, width).
        """
        if self.group > 1:
            key, value = self._spread(key), self._spread(value)
        again = self.again and torch.is_grad_enabled()
        values = (
            checkpoint(self.core, query, key, value, use_reentrant=False)
            if again
            else self.core(query, key, value)
        )
        result: Tensor = self.out(values.transpose(1, 2).flatten(2))
        return result

    def split_over(self, rank: int, ranks: int) -> None:
        """Keep only the heads of this rank. Key and value heads that cannot be divided stay on
        every rank.
        """
        self.heads //= ranks
        self.first_head = rank * self.heads
        if self.kv_heads % ranks == 0:
            self.kv_heads //= ranks
            self.first_kv_head = rank * self.kv_heads

    def compute_again(self) -> None:
        """From now on, recompute the core in backward instead of storing its scores."""
        self.again = True

    def _spread(self, vectors: Tensor) -> Tensor:
        """Return the key or value head that belongs to each of this rank's heads: (batch, heads,
        sequence, width).
        """
        # Heads are numbered among all ranks', and the tensor begins with the first one that this
        # rank has.
        heads = range(self.first_head, self.first_head + self.heads)
        return vectors[:, [head // self.group - self.first_kv_head for head in heads]]

    def _split(self, vectors: Tensor, heads: int) -> Tensor:
        return vectors.view(*vectors.shape[:-1], heads, self.width).transpose(1, 2)


class Core(nn.Module):
    """Softmax of scores times values, each of shape (batch, heads, sequence, width). A token
    attends to the last `window` tokens, itself included. Selective recomputation runs this part
    again in backward, because it is cheap and its scores take much memory.
    """

    def __init__(
        self, window: int | None, softcap: float | None, scale: float | None, dropout: float
    ) -> None:
        super().__init__()
        self.window, self.softcap, self.scale, self.dropout = window, softcap, scale, dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        dropout, sequence = self.dropout if self.training else 0.0, query.shape[-2]
        if self.window is None and self.softcap is None:  # torch has faster kernels for this case
            return F.scaled_dot_product_attention(
                query, key, value, None, dropout, True, scale=self.scale
            )
        # Row: the token that looks; column: the one that it sees.
        mask = torch.ones(sequence, sequence, dtype=torch.bool, device=query.device).tril()
        if self.window is not None:
            mask = mask.triu(1 - self.window)
        # Torch's kernel cannot cap scores, so that this case is spelled out.
        if self.softcap is None:
            return F.scaled_dot_product_attention(
                query, key, value, mask, dropout, scale=self.scale
            )
        scores = query @ key.transpose(-1, -2) * (self.scale or query.shape[-1] ** -0.5)
        logits = self.softcap * torch.tanh(scores / self.softcap)
        return F.dropout(logits.masked_fill(~mask, -torch.inf).softmax(-1), dropout) @ value


class Turn(nn.Module):
    """Rotary positions for tensors of shape (batch, heads, sequence, width): rotates pairs of
    elements by an angle that depends on the position.
    """

    def __init__(self, rotary: Rotary, width: int, local: bool) -> None:
        super().__init__()
        base = (rotary.local_base if local else None) or rotary.base or BASE
        scaling = RotaryScaling() if local and rotary.local_base else rotary.scaling
        share = 1.0 if rotary.share is None else rotary.share
        self.part, self.pairs = int(width * share), bool(rotary.interleaved)
        # No buffer: a model in bf16 would have rates in bf16.
        self.rates, self.factor = scale_rates(
            base ** (-torch.arange(0, self.part, 2, dtype=torch.float64) / self.part), scaling, base
        )
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def _on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the rates on a device. They are copied once: the host waits for each copy."""
        if (device, dtype) not in self._copies:
            self._copies[device, dtype] = self.rates.to(device, dtype)
        return self._copies[device, dtype]

    def forward(self, heads: Tensor) -> Tensor:
        exact = torch.float64 if heads.dtype == torch.float64 else torch.float32
        places = torch.arange(heads.shape[-2], device=heads.device, dtype=exact)
        angles = torch.outer(places, self._on(heads.device, exact))
        cos, sin = (
            (result * self.factor).to(heads.dtype) for result in (angles.cos(), angles.sin())
        )
        turning, still = heads[..., : self.part], heads[..., self.part :]
        # The elements of a pair are neighbours if interleaved, else half a width apart.
        first, second = (
            (turning[..., 0::2], turning[..., 1::2]) if self.pairs else turning.chunk(2, -1)
        )
        one, two = first * cos - second * sin, second * cos + first * sin
        result = (
            torch.stack((one, two), -1).flatten(-2) if self.pairs else torch.cat((one, two), -1)
        )
        return torch.cat((result, still), -1)


def scale_rates(rates: Tensor, scaling: RotaryScaling, base: float) -> tuple[Tensor, float]:
    """Return the angular frequencies of rotary positions, shape (width / 2,), scaled for longer
    sequences, and the factor by which cosines and sines are multiplied.
    """
    factor = scaling.factor or 1.0
    if scaling.kind == "linear":
        return rates / factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(rates, scaling, factor), 1.0
    if scaling.kind == "yarn":
        return _yarn(rates, scaling, factor, base), _attention_factor(scaling, factor)
    return rates, 1.0


def _llama3(rates: Tensor, scaling: RotaryScaling, factor: float) -> Tensor:
    """Return frequencies scaled as in Llama 3: low ones are divided by `factor`, high ones stay,
    and those between are interpolated (_compute_llama3_parameters of transformers).
    """
    low, high, original = scaling.low or 1.0, scaling.high or 4.0, scaling.original or 8192
    # Turns of a pair over the length that the model was trained on. A `share` of 1: as it is; 0:
    # divided by the factor.
    turns = original * rates / (2 * pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return rates * (share + (1 - share) / factor)


def _yarn(rates: Tensor, scaling: RotaryScaling, factor: float, base: float) -> Tensor:
    """Return frequencies scaled as in YaRN (_compute_yarn_parameters of transformers). A pair of
    elements that rotates at least `fast` times over the original length keeps its frequency. A pair
    that rotates at most `slow` times has its frequency divided by `factor`. Frequencies between
    these are interpolated.
    """
    width, original = 2 * len(rates), scaling.original or 4096
    fast, slow = scaling.fast or 32.0, scaling.slow or 1.0
    # Pair i turns original * base ** (-2 i / width) / (2 pi) times. Solved for i, that is the pair
    # which turns so many times.
    low, high = (
        width * log(original / (turns * 2 * pi)) / (2 * log(base)) for turns in (fast, slow)
    )
    if scaling.truncate is not False:
        low, high = float(floor(low)), float(ceil(high))
    low, high = max(low, 0.0), min(high, width - 1.0)
    # 0.001 instead of 0, as in transformers: a ramp without length is a step.
    ramp = ((torch.arange(len(rates), dtype=rates.dtype) - low) / ((high - low) or 0.001)).clamp(
        0, 1
    )
    return rates * (1 - ramp) + rates / factor * ramp


def _attention_factor(scaling: RotaryScaling, factor: float) -> float:
    """Return the factor by which YaRN multiplies cosines and sines: the factor in the plan, or a
    quotient if both `mscale` fields are set, or else 0.1 ln(factor) + 1.
    """
    if scaling.attention is not None:
        return scaling.attention

    def of(weight: float) -> float:
        return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0

    return (
        of(scaling.mscale) / of(scaling.mscale_all)
        if scaling.mscale and scaling.mscale_all
        else of(1.0)
    )


def feed_forward(model: Model, shape: Architecture, index: int) -> nn.Module:
    """Return the feed-forward part of block `index`: an MLP, or experts."""
    if shape.experts is None or not shape.has_experts(index):
        return MLP(model, shape, shape.ffn)
    return Routed(shape.hidden, shape.experts, model.moe, partial(MLP, model, shape))


class MLP(nn.Module):
    """Two layers with an activation between them, or three with a gate."""

    def __init__(self, model: Model, shape: Architecture, ffn: int) -> None:
        super().__init__()
        hidden, bias = shape.hidden, shape.has_bias("mlp_bias")
        self.up = nn.Linear(hidden, ffn, bias)
        self.gate = nn.Linear(hidden, ffn, bias) if shape.gated else None
        self.down = nn.Linear(ffn, hidden, bias)
        self.activation = ACTIVATIONS[model.mlp.activation or ("silu" if shape.gated else "gelu")]

    def forward(self, stream: Tensor) -> Tensor:
        up = self.up(stream)
        inner = (
            self.activation(up) if self.gate is None else self.activation(self.gate(stream)) * up
        )
        out: Tensor = self.down(inner)
        return out


class Head(nn.Module):
    """Turns vectors (batch, sequence, hidden) into logits (batch, sequence, vocab)."""

    def __init__(self, model: Model, shape: Architecture, embedding: Embedding) -> None:
        super().__init__()
        self.norm = Norm(model, shape, shape.hidden)
        self.logits = nn.Linear(shape.hidden, shape.vocab, bias=shape.logits_bias)
        if shape.tied:
            self.logits.weight = embedding.tokens.weight
        self.scale, self.softcap = model.embedding.logit_scale or 1.0, model.embedding.softcap

    def forward(self, stream: Tensor) -> Tensor:
        logits: Tensor = self.logits(_scale(self.norm(stream), self.scale))
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
