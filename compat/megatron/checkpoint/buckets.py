"""Finds the offset of each parameter in the buckets of the distributed optimizer
(`dp_reshardable`). The offsets are verified: weights must equal the masters at these offsets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from bridge.checkpoint.lazy import Boxed, ElementRun, Joined, Lazy, Placed, read_strips
from bridge.checkpoint.parameter_names import Shapes
from bridge.errors import SourceError
from compat.megatron.checkpoint.ranks import (
    ENGINE_ORDER,
    LAYERS,
    OUTPUT,
    OWN_ORDER,
    WORDS,
    Parallel,
    local,
    order_parameters,
    place_slices,
)

KEY = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_\((.+)\)\.bucket_idx_(\d+)\.(\w+)"
)
UNPADDED = re.compile(r"optimizer\.distributed\.dp_group_idx_(\d+)\.per_bucket_numel_unpadded/.*")
ALIGNED = 64
"""Each parameter starts at a multiple of this number of elements
(distributed/param_and_grad_buffer.py).
"""
ADVICE = "save it with --dist-ckpt-optim-fully-reshardable"
MASTER = "param"

Buckets = dict[int, dict[int, dict[str, Lazy]]]
"""Tensors of the buckets: `buckets[group][bucket][kind]`, with the index of the group of data
ranks, the index of the bucket, and the kind of tensor.
"""


def unpack_buckets(
    place: Path,
    weights: Mapping[str, Lazy],
    tensors: Mapping[str, Lazy],
    values: Mapping[str, Any],
    args: Mapping[str, Any],
) -> dict[str, dict[str, Lazy]]:
    """Return the optimizer's tensors of each parameter, by kind. Raises `SourceError` unless the
    masters match the weights.

    The file has the number of elements of each bucket, but not the names of its parameters.
    Parameters are stored from the last to the first, at aligned offsets, in the order of modules in
    one of two layer specs. In the right order, all rounded masters equal the weights.
    """
    shapes = {name: weight.shape for name, weight in weights.items()}
    # decoder.layers.7.mlp...: the third part of a name is the number of the layer.
    numbers = {int(name.split(".")[2]) for name in shapes if name.startswith(LAYERS)}
    parallel = Parallel.of(args, len(numbers), str(place))
    buckets, sizes = _read_buckets(place, tensors), _sizes(values)
    if set(buckets) != set(range(parallel.tensor * parallel.pipeline)) or set(sizes) != set(
        buckets
    ):
        raise SourceError(
            f"{place}: found buckets of {len(buckets)} groups of ranks; expected"
            f" {parallel.tensor * parallel.pipeline}; the checkpoint is damaged"
        )
    for order in (OWN_ORDER, ENGINE_ORDER):
        states = _lay_out(shapes, parallel, buckets, sizes, order)
        if states is not None and all(
            _equals_master(states[name][MASTER], weight) for name, weight in weights.items()
        ):
            return states
    raise SourceError(
        f"{place}: the order of parameters in the buckets is not known (the masters do not match "
        f"the weights); {ADVICE}"
    )


def _read_buckets(place: Path, tensors: Mapping[str, Lazy]) -> Buckets:
    buckets: Buckets = {}
    for key, tensor in tensors.items():
        if match := KEY.fullmatch(key):
            group, buffer, _, bucket, kind = match.groups()
            # A buffer for each format of parameters and each chunk of the model, and one for
            # experts.
            if buffer != "0":
                raise SourceError(
                    f"{place}: {key}: found several gradient buffers (of experts, or of model "
                    f"chunks), which cannot be read; {ADVICE}"
                )
            buckets.setdefault(int(group), {}).setdefault(int(bucket), {})[kind] = tensor
    return buckets


def _sizes(values: Mapping[str, Any]) -> dict[int, list[int]]:
    """Return the number of elements of each bucket without padding, for each group of data ranks."""
    sizes = {}
    for key, value in values.items():
        if match := UNPADDED.fullmatch(key):
            # [[{format: sizes}]]: one rank's object, with one buffer, whose parameters have one
            # format.
            ((by_type,),) = value
            (sizes[int(match[1])],) = by_type.values()
    return sizes


def _lay_out(
    shapes: Shapes,
    parallel: Parallel,
    buckets: Buckets,
    sizes: Mapping[int, Sequence[int]],
    order: Sequence[str],
) -> dict[str, dict[str, Lazy]] | None:
    """Return the optimizer's tensors of each parameter if the model's modules are in `order`. None
    if the sizes of the buckets do not fit this order.
    """
    parts: dict[str, dict[str, list[Placed]]] = {}
    for group, flats in buckets.items():
        # Groups of data ranks are numbered with the tensor rank running fastest.
        stage, index = divmod(group, parallel.tensor)
        names = order_parameters(shapes, parallel, stage, order)
        places = _places(
            [(name, prod(local(name, shapes, parallel.tensor))) for name in names], sizes[group]
        )
        if places is None:
            return None
        for name, bucket, start, end in places:
            # Skip the last stage's copy of tied words, and what tensor ranks after the first hold
            # as a replica.
            copy = name == WORDS and stage > 0 and OUTPUT not in shapes
            own_shape = local(name, shapes, parallel.tensor)
            replica = index > 0 and len(own_shape) > 0 and own_shape == shapes[name]
            for kind, flat in flats[bucket].items() if not copy and not replica else ():
                own = Joined((ElementRun(flat, start, end),), (end - start,), flat.dtype)
                row = parts.setdefault(name, {}).setdefault(kind, [])
                row.extend(place_slices(name, shapes, index, parallel.tensor, own))
    return {
        name: {
            kind: Boxed(tuple(row), shapes[name], row[0].source.dtype)
            for kind, row in kinds.items()
        }
        for name, kinds in parts.items()
    }


def _places(
    names: Sequence[tuple[str, int]], sizes: Sequence[int]
) -> list[tuple[str, int, int, int]] | None:
    """Return the name, bucket, start and end of each parameter, in reverse order. None if the
    parameters do not fill the buckets exactly.
    """
    places, bucket, at = [], 0, 0
    for name, count in reversed(names):
        at += -at % ALIGNED  # up to the next multiple
        # Shared words have a bucket of their own. The one before is counted up to their aligned
        # start.
        if at and bucket + 1 < len(sizes) and at == sizes[bucket]:
            bucket, at = bucket + 1, 0
        if bucket == len(sizes) or at + count > sizes[bucket]:
            return None
        places.append((name, bucket, at, at + count))
        at += count
        if at == sizes[bucket]:
            bucket, at = bucket + 1, 0
    return places if bucket == len(sizes) else None


def _equals_master(master: Lazy, weight: Lazy) -> bool:
    """Whether a weight equals its master after rounding to the weight's format."""
    import torch

    at = 0
    # Strip by strip: neither tensor has to fit into memory.
    for strip in read_strips(master):
        own = weight.flat(at, at + len(strip))
        # Bytes are compared, since a NaN equals nothing.
        if not torch.equal(strip.to(own.dtype).view(torch.uint8), own.view(torch.uint8)):
            return False
        at += len(strip)
    return True
