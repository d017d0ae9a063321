"""The native parameters in each parameter of Megatron's GPT, and the location of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from bridge.layout.architecture import Architecture
from bridge.trace.placement import Placement
from compat.megatron.checkpoint.names import IN_LAYER

LAYERS = "decoder.layers."
"""Prefix before the layer's index in the names of Megatron's parameters."""


@dataclass(frozen=True, slots=True)
class Share:
    """The index of a tensor rank, and the number of tensor ranks."""

    index: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class WeightPiece:
    """The location of this rank's part of a native parameter in a Megatron parameter.

    `pick` returns the part as a view of Megatron's tensor. `whole` is the shape of the full native
    parameter; the part begins at index `start` of dimension `dim`. If `dim` is None, every tensor
    rank holds the full parameter.
    """

    name: str
    whole: tuple[int, ...]
    dim: int | None
    start: int
    pick: Callable[[Tensor], Tensor]

    def of(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of `tensor` (a parameter, gradient or state), in the native
        shape.
        """
        return self.pick(tensor).reshape(-1, *tensor.shape[1:])

    def load(self, tensor: Tensor, whole: Tensor) -> None:
        """Copy this rank's part of the native tensor `whole` into Megatron's `tensor`."""
        view = self.pick(tensor)
        view.copy_(self.within(whole, self.of(tensor).shape).reshape(view.shape))

    def within(self, whole: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return this rank's part of the whole native tensor `whole`. `shape` is the shape of the
        part.
        """
        return whole if self.dim is None else whole.narrow(self.dim, self.start, shape[self.dim])

    def placement(self, shape: tuple[int, ...], replicas: tuple[str, ...] = ()) -> Placement:
        """Return the position in the whole tensor of a part with the given shape."""
        offsets = tuple(self.start * (dim == self.dim) for dim in range(len(self.whole)))
        return Placement.box(
            self.whole,
            offsets,
            tuple(shape),
            (*(("tensor",) if self.dim is None else ()), *replicas),
        )


def wholes(shape: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the native model's parameters by name. Names of expert parameters
    contain the index of the expert.
    """
    parts = [part for layer in shape.indices for part in shape.parts(layer)]
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        for name, size in part.shapes.items():
            if EXPERTS not in name:
                shapes[name] = size
                continue
            # A part of experts stands for all of them, which have one shape.
            for number in range(part.copies):
                shapes[name.replace(EXPERTS, f"{EXPERTS}{number}.")] = size
    return shapes


EXPERTS = ".mlp.experts."


def pieces(name: str, shape: Architecture, share: Share) -> Iterator[WeightPiece]:
    """Yield the native parameters inside the parameter `name` of Megatron's GPT.

    The name contains the layer's index in the whole model.
    """
    sizes = wholes(shape)
    for native, dim, pick in _within(name, shape, share):
        whole = sizes[native]
        rows = _rows(shape, share) if native in VOCABULARY else whole[dim or 0] // share.ranks
        yield WeightPiece(native, whole, dim, 0 if dim is None else share.index * rows, pick)


Found = tuple[str, int | None, Callable[[Tensor], Tensor]]

VOCABULARY = ("embedding.tokens.weight", "head.logits.weight")
SPLIT = {"linear_proj.weight": 1, "linear_fc2.weight": 1, "linear_qkv": 0, "linear_fc1": 0}
"""The dimension in which a parameter is split over tensor ranks. The key is a part of the
parameter's name in its layer. All other parameters of a layer are replicated.
"""


def _within(name: str, shape: Architecture, share: Share) -> Iterator[Found]:
    if name.startswith(LAYERS):
        number, _, rest = name.removeprefix(LAYERS).partition(".")
        yield from (
            (f"block{number}.{native}", dim, pick)
            for native, dim, pick in _in_layer(rest, shape, share)
        )
    elif name == "embedding.position_embeddings.weight":
        yield "embedding.positions.weight", None, _all
    elif name.startswith("decoder.final_layernorm."):
        yield name.replace("decoder.final_layernorm", "head.norm"), None, _all
    else:
        tied = shape.tied or name.startswith("embedding.")
        yield VOCABULARY[0 if tied else 1], 0, _rows_without_padding(shape, share)


def _in_layer(rest: str, shape: Architecture, share: Share) -> Iterator[Found]:
    module, _, kind = rest.rpartition(".")
    dim = next((dim for part, dim in SPLIT.items() if part in rest), None)
    if module == "mlp.shared_experts" and kind == "gate_weight":
        yield "mlp.shared_gate.weight", None, _all
    elif module in IN_LAYER:
        yield f"{IN_LAYER[module]}.{kind}", dim, _all
    elif module.endswith("linear_fc2"):
        yield f"{_native(module)}.down.{kind}", dim, _all
    else:
        parts = (
            _heads(shape, share)
            if module == "self_attention.linear_qkv"
            else _halves(shape, _native(module))
        )
        yield from ((f"{native}.{kind}", dim, pick) for native, pick in parts)


def _heads(shape: Architecture, share: Share) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yield the native projections inside linear_qkv, and a function that picks each.

    Megatron stores the queries of a group, then its key, then its value
    (attention.py: get_query_key_value_tensors).
    """
    groups, queries, width = (
        shape.kv_heads // share.ranks,
        shape.heads // shape.kv_heads,
        shape.head,
    )

    def rows(first: int, last: int) -> Callable[[Tensor], Tensor]:
        return lambda tensor: tensor.view(groups, queries + 2, width, *tensor.shape[1:])[
            :, first:last
        ]

    yield "attention.query", rows(0, queries)
    yield "attention.key", rows(queries, queries + 1)
    yield "attention.value", rows(queries + 1, queries + 2)


def _native(module: str) -> str:
    """Return the native name of a feed-forward layer: the dense layer of a block, an expert, or the
    shared experts.
    """
    return (
        module.rpartition(".")[0]
        .replace("experts.local_experts", "experts")
        .replace("shared_experts", "shared")
    )


def _halves(shape: Architecture, name: str) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yield the native matrices inside linear_fc1, and a function that picks each.

    A tensor rank stores its part of the gate, then its part of the up projection (mlp.py: glu).
    """
    if not shape.gated:
        yield f"{name}.up", _all
        return
    yield f"{name}.gate", lambda tensor: tensor[: len(tensor) // 2]
    yield f"{name}.up", lambda tensor: tensor[len(tensor) // 2 :]


def _rows(shape: Architecture, share: Share) -> int:
    """Return the number of rows of the padded vocabulary on each tensor rank."""
    return -(-shape.vocab // share.ranks)


def _rows_without_padding(shape: Architecture, share: Share) -> Callable[[Tensor], Tensor]:
    """Return a function that picks the rows of this rank that are not padding."""
    count = max(0, min(_rows(shape, share), shape.vocab - share.index * _rows(shape, share)))
    return lambda tensor: tensor[:count]


def _all(tensor: Tensor) -> Tensor:
    return tensor
