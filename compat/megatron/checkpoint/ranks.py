"""The order of parameters on each tensor rank and stage of Megatron's GPT, and the slices of each
parameter that a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from bridge.checkpoint.lazy import ElementRun, Joined, Lazy, Placed
from bridge.checkpoint.parameter_names import Shape, Shapes
from bridge.errors import SourceError
from bridge.layout.boxes import Box

SPLIT: Mapping[str, int] = {
    "linear_proj.weight": 1,
    "linear_fc2.weight": 1,
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_fc1.weight": 0,
    "linear_fc1.bias": 0,
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
}
"""The dimension that tensor ranks split, by suffix of the name; all other parameters are replicated."""
WORDS, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
LAYERS = "decoder.layers."
OWN_ORDER = (
    *(
        "input_layernorm",
        "self_attention.linear_qkv.layer_norm_",
        "self_attention.linear_proj",
        "self_attention.linear_qkv",
    ),
    *(
        "self_attention.q_layernorm",
        "self_attention.k_layernorm",
        "pre_mlp_layernorm",
        "mlp.linear_fc1.layer_norm_",
    ),
    *("mlp.router", "mlp.linear_fc1", "mlp.linear_fc2"),
)
"""Modules of a layer in the order of Megatron's own spec: each norm comes before the linear layer that it feeds."""
ENGINE_ORDER = (
    *(
        "input_layernorm",
        "self_attention.linear_proj",
        "self_attention.linear_qkv.layer_norm_",
        "self_attention.linear_qkv",
    ),
    *(
        "self_attention.q_layernorm",
        "self_attention.k_layernorm",
        "pre_mlp_layernorm",
        "mlp.router",
        "mlp.linear_fc1.layer_norm_",
    ),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
)
"""Modules of a layer in the order of the Transformer Engine spec, whose norms are part of the next linear layer."""
UNEVEN = (
    *(
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "pipeline_model_parallel_layout",
    ),
    *(
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "num_virtual_stages_per_pipeline_rank",
    ),
    *("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"),
)
"""Arguments that make the split into stages uneven or interleaved."""


@dataclass(frozen=True)
class Parallel:
    """The numbers of tensor ranks, stages and layers."""

    tensor: int
    pipeline: int
    layers: int

    @classmethod
    def of(cls, args: Mapping[str, Any], layers: int, where: str) -> Parallel:
        """Return the layout that the saved arguments describe. Raises `SourceError` for unequal
        stages and for expert parallelism.
        """
        names = [name for name in UNEVEN if args.get(name)]
        names += (
            ["expert_model_parallel_size"]
            if (args.get("expert_model_parallel_size") or 1) > 1
            else []
        )
        SourceError.raise_if(
            f"{where}: {name} {args[name]!r} in the arguments of the run, which is not supported; save the run with "
            "--ckpt-format torch_dist and --dist-ckpt-optim-fully-reshardable"
            for name in names
        )
        tensor, pipeline = (
            args.get(f"{name}_model_parallel_size") or 1 for name in ("tensor", "pipeline")
        )
        if layers % pipeline:
            raise SourceError(
                f"{where}: found {layers} layers on {pipeline} stages; expected equal shares; the checkpoint is damaged"
            )
        return cls(tensor, pipeline, layers)

    def of_stage(self, stage: int) -> range:
        """Return the indices of the layers of a stage."""
        share = self.layers // self.pipeline
        return range(stage * share, (stage + 1) * share)


def order_parameters(
    shapes: Shapes, parallel: Parallel, stage: int, order: Sequence[str]
) -> list[str]:
    """Return the names of a stage's parameters in the order of its modules.

    With tied embeddings, the last stage has a copy of the word embedding.
    """
    first, last = stage == 0, stage == parallel.pipeline - 1
    names = [
        name for name in (WORDS, "embedding.position_embeddings.weight") if name in shapes and first
    ]
    for layer in parallel.of_stage(stage):
        top = f"{LAYERS}{layer}."
        inside = [name.removeprefix(top) for name in shapes if name.startswith(top)]
        names += [f"{top}{rest}" for rest in sorted(inside, key=lambda rest: _place(rest, order))]
    if last:
        names += [name for name in shapes if name.startswith("decoder.final_layernorm.")]
        if OUTPUT in shapes:
            names.append(OUTPUT)
        elif not first:
            names.append(WORDS)
    return names


def _place(rest: str, order: Sequence[str]) -> tuple[int, bool]:
    """Return the key by which parameters of a layer are sorted: by module, weights before biases."""
    fits = [number for number, module in enumerate(order) if rest.startswith(module)]
    if not fits:
        raise SourceError(
            f"{rest}: found a parameter that is in no dense layer; its position in the file is not"
            " known"
        )
    # The longest name that fits: "mlp.linear_fc1" also begins "mlp.linear_fc1.layer_norm_weight".
    return max(fits, key=lambda number: len(order[number])), rest.endswith("bias")


def is_gated(name: str, shapes: Shapes) -> bool:
    """Whether `name` is the first matrix of a gated feed-forward layer, or the bias of that matrix.

    A gated matrix has twice as many rows as the feed-forward layer is wide.
    """
    second = shapes.get(name.rpartition("linear_fc1")[0] + "linear_fc2.weight", ())
    return (
        "linear_fc1." in name
        and "layer_norm_" not in name
        and bool(second)
        and shapes[name][0] == 2 * second[-1]
    )


def boxes(name: str, shapes: Shapes, index: int, ranks: int) -> Iterator[Box]:
    """Yield the slices (boxes) of a parameter that a tensor rank holds, in the order in which the
    rank's tensor stacks them.
    """
    shape = shapes[name]
    dim = next((dim for end, dim in SPLIT.items() if name.endswith(end)), None)
    parts = 2 if is_gated(name, shapes) else 1
    if dim is None or ranks == 1:
        yield Box((0,) * len(shape), shape)
        return
    # Gate and up projection are stacked, and a rank holds its part of each.
    size, odd = divmod(shape[dim], parts * ranks)
    if odd:
        raise SourceError(
            f"{name}: found {shape[dim]} rows or columns; expected a multiple of {ranks} tensor ranks; the checkpoint is damaged"
        )
    for part in range(parts):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = (part * ranks + index) * size, size
        yield Box(tuple(offsets), tuple(sizes))


def local(name: str, shapes: Shapes, ranks: int) -> Shape:
    """Return the shape of the tensor that each tensor rank holds of a parameter."""
    parts = list(boxes(name, shapes, 0, ranks))
    # Several boxes are stacked along the first dimension; all ranks have the same shape.
    return (
        (sum(box.sizes[0] for box in parts), *parts[0].sizes[1:])
        if len(parts) > 1
        else parts[0].sizes
    )


def place_slices(
    name: str, shapes: Shapes, index: int, ranks: int, tensor: Lazy
) -> Iterator[Placed]:
    """Yield the slices (boxes) of the whole parameter that `tensor`, the tensor of one rank,
    consists of. `tensor` may be flat.
    """
    at = 0
    for box in boxes(name, shapes, index, ranks):
        count = prod(box.sizes)
        yield Placed(box, Joined((ElementRun(tensor, at, at + count),), box.sizes, tensor.dtype))
        at += count


def renumber_layer(name: str, number: Callable[[int], int]) -> str:
    """Return the name of a parameter with the number of its layer replaced."""
    if not name.startswith(LAYERS):
        return name
    layer, _, rest = name.removeprefix(LAYERS).partition(".")
    return f"{LAYERS}{number(int(layer))}.{rest}"
