"""A small GPT as a list of layers: grouped queries, rotary or learned positions, two norms, plain
or gated MLP.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bridge.engine.randomness import seed_of
from bridge.engine.rows import IGNORED
from bridge.engine.tensor_parallel import SplitLogits
from bridge.errors import ConfigError
from bridge.layout.architecture import Architecture as Architecture
from bridge.layout.tensor import TensorPlan

SPREAD = 0.02
"""Standard deviation of initial weights."""


class GPT(nn.Sequential):
    """Embedding, blocks and head. Takes tokens (batch, sequence), and returns logits (batch,
    sequence, vocab).

    An initial weight depends only on `seed` and on the name of the parameter, not on the order in
    which layers are made.
    """

    leading = 1
    trailing = 1

    def __init__(self, architecture: Architecture, seed: int = 1234) -> None:
        ConfigError.raise_if((*architecture.problems(), *_beyond(architecture)))
        embedding = Embedding(architecture)
        layers: list[tuple[str, nn.Module]] = [("embedding", embedding)]
        layers += [(f"block{index}", Block(architecture)) for index in range(architecture.layers)]
        layers.append(("head", Head(architecture, embedding)))
        super().__init__(OrderedDict(layers))
        for name, weight in self.named_parameters():
            _initialize(name, weight, seed, architecture.layers)
        self.architecture = architecture

    def tensor_plan(self, ranks: int) -> TensorPlan:
        """Return the tensor plan that splits this model over `ranks` tensor ranks. Raises
        `ConfigError` if `ranks` does not divide the heads.
        """
        return self.architecture.tensor_plan(ranks)


def _beyond(architecture: Architecture) -> Iterator[str]:
    """Yield a problem for each part of the architecture that this model does not support."""
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


@torch.no_grad()
def _initialize(name: str, weight: Tensor, seed: int, layers: int) -> None:
    if weight.dim() < 2:
        weight.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    spread = SPREAD / sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else SPREAD
    weight.normal_(0.0, spread, generator=torch.Generator().manual_seed(seed_of(seed, name)))


class Embedding(nn.Module):
    """Turns tokens (batch, sequence) into vectors (batch, sequence, hidden)."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.tokens = nn.Embedding(architecture.vocab, architecture.hidden)
        rows = architecture.rows
        self.positions = nn.Embedding(rows, architecture.hidden) if rows else None
        self.dropout = nn.Dropout(architecture.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        vectors: Tensor = self.tokens(tokens)
        if self.positions is not None:
            vectors = vectors + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        result: Tensor = self.dropout(vectors)
        return result


class Block(nn.Module):
    """Attention and MLP, each after a norm, added to the residual stream (batch, sequence, hidden)."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(architecture), _norm(architecture)
        self.attention = Attention(architecture)
        self.mlp = MLP(architecture)
        self.dropout = nn.Dropout(architecture.dropout)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.dropout(self.attention(self.norm1(stream)))
        result: Tensor = stream + self.dropout(self.mlp(self.norm2(stream)))
        return result


class Core(nn.Module):
    """Softmax of scores times values. Selective recomputation runs this part again in backward,
    because it is cheap and its scores take much memory.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention output. Each tensor is (batch, heads, sequence, width)."""
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, None, dropout, True)


class Attention(nn.Module):
    """Causal attention in which groups of heads share keys and values. `heads` and `kv_heads` are
    the numbers on this rank.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.heads, self.kv_heads = architecture.heads, architecture.kv_heads
        self.rotary = architecture.rotary
        self.width = architecture.head
        self.group = architecture.heads // architecture.kv_heads
        self.first_head = self.first_kv_head = 0
        hidden, outer, inner = (
            architecture.hidden,
            self.heads * self.width,
            self.kv_heads * self.width,
        )
        qkv, output = architecture.has_bias("qkv_bias"), architecture.has_bias("output_bias")
        self.query = nn.Linear(hidden, outer, qkv)
        self.key = nn.Linear(hidden, inner, qkv)
        self.value = nn.Linear(hidden, inner, qkv)
        self.out = nn.Linear(outer, hidden, output)
        self.core: nn.Module = Core(architecture.attention_dropout)
        self.again = False

    def forward(self, stream: Tensor) -> Tensor:
        query, key = (
            self._split(self.query(stream), self.heads),
            self._split(self.key(stream), self.kv_heads),
        )
        value = self._split(self.value(stream), self.kv_heads)
        if self.rotary:
            query, key = rotate_heads(query), rotate_heads(key)
        return self.mix_values(query, key, value)

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


class MLP(nn.Module):
    """Two layers with GELU between them, or three with a SiLU gate."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, ffn, bias = architecture.hidden, architecture.ffn, architecture.has_bias("mlp_bias")
        self.up = nn.Linear(hidden, ffn, bias)
        self.gate = nn.Linear(hidden, ffn, bias) if architecture.gated else None
        self.down = nn.Linear(ffn, hidden, bias)

    def forward(self, stream: Tensor) -> Tensor:
        up = self.up(stream)
        inner = F.gelu(up) if self.gate is None else F.silu(self.gate(stream)) * up
        out: Tensor = self.down(inner)
        return out


class Head(nn.Module):
    """Turns vectors (batch, sequence, hidden) into logits (batch, sequence, vocab)."""

    def __init__(self, architecture: Architecture, embedding: Embedding) -> None:
        super().__init__()
        self.norm = _norm(architecture)
        self.logits = nn.Linear(architecture.hidden, architecture.vocab, bias=False)
        if architecture.tied:
            self.logits.weight = embedding.tokens.weight

    def forward(self, stream: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(stream))
        return logits


def rotate_heads(heads: Tensor, base: float = 10_000.0) -> Tensor:
    """Return `heads` (batch, heads, sequence, width) with rotary positions: each element of
    the first half of a head, and the element at the same place in the second half, are rotated by
    an angle that depends on the position.
    """
    half = heads.shape[-1] // 2
    # Angles in fp32 at least: bf16 has 8 binary digits, and cannot tell position 257 from 256.
    exact = torch.float64 if heads.dtype == torch.float64 else torch.float32
    places = torch.arange(heads.shape[-2], device=heads.device, dtype=exact)
    rates = base ** (-torch.arange(half, device=heads.device, dtype=exact) / half)
    angles = torch.outer(places, rates)
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def mean_cross_entropy(logits: Tensor | SplitLogits, targets: Tensor) -> Tensor:
    """Return the mean loss of all tokens whose target is not `IGNORED`."""
    total, count = sum_cross_entropy(logits, targets)
    return total / count


def sum_cross_entropy(logits: Tensor | SplitLogits, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the tokens whose target is not `IGNORED`, and the number of these
    tokens.

    Takes logits (batch, sequence, vocab), whole or split by vocabulary, and targets (batch,
    sequence).
    """
    count = (targets != IGNORED).sum()
    if isinstance(logits, SplitLogits):
        return logits.losses(targets, IGNORED).sum(), count
    exact = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(exact, targets.flatten(), ignore_index=IGNORED, reduction="sum"), count


def _norm(architecture: Architecture) -> nn.Module:
    if architecture.norm == "rms":
        return nn.RMSNorm(architecture.hidden, eps=1e-5)
    return nn.LayerNorm(architecture.hidden, eps=1e-5, bias=architecture.has_bias("norm_bias"))
