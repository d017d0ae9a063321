"""Joins a whole model from checkpoint parts: the parts of pipeline stages, or the parts of AutoTP's
tensor-parallel ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from bridge.checkpoint.hub import Hub, Parameter, ParameterGroup
from bridge.checkpoint.lazy import Boxed, Lazy, Placed, Shape, Strided
from bridge.errors import SourceError
from bridge.files.shown import show_value
from bridge.layout.boxes import Box
from compat.deepspeed.checkpoint.files import DAMAGED, StageFiles

MAP = "universal_checkpoint_info"
"""Key of the model states under which AutoTP, since DeepSpeed 0.19, stores the position of each
part in the whole parameter (`affine_map`).
"""
ADVICE = "merge the checkpoint with DeepSpeed's ds_to_universal.py"


def join_parts(parts: Sequence[StageFiles], hubs: Sequence[Hub]) -> Hub:
    """Return the whole model, joined from the parts of all model-parallel ranks. Raises
    `SourceError` if the parts do not fit together.
    """
    _of_one_run(parts, hubs)
    stages, ranks = _sizes(parts)
    whole = _stack_stages(parts, hubs) if stages > 1 else _side_by_side(parts, hubs)
    layout = {**hubs[0].origin.layout, "pipeline": stages, "tensor": ranks}
    paths = tuple(dict.fromkeys(path for hub in hubs for path in hub.origin.files))
    return replace(whole, origin=replace(whole.origin, layout=layout, files=paths))


def _sizes(parts: Sequence[StageFiles]) -> tuple[int, int]:
    """Return the number of pipeline stages and the number of tensor-parallel ranks."""
    dimensions = parts[0].model.get("checkpoint_parallel_dimensions") or {}
    stages, ranks = (
        dimensions.get("pp_degree", len(parts) if parts[0].layers else 1),
        dimensions.get("tp_degree", 1),
    )
    if stages > 1 and ranks > 1:
        raise SourceError(
            f"{parts[0].folder}: found {stages} stages with {ranks} tensor ranks each, which"
            f" stagebridge cannot read yet; {ADVICE}"
        )
    ranks = ranks if stages > 1 or dimensions.get("tp_degree") else len(parts)
    if stages * ranks != len(parts):
        raise SourceError(
            f"{parts[0].folder}: found {len(parts)} parts of a model, expected {stages * ranks};"
            f" {DAMAGED}"
        )
    return stages, ranks


def _of_one_run(parts: Sequence[StageFiles], hubs: Sequence[Hub]) -> None:
    for files, hub in zip(parts, hubs, strict=True):
        for key in ("where", "schedule", "scale", "config", "client"):
            if getattr(hub, key) != getattr(hubs[0], key):
                raise SourceError(
                    f"{files.models[0]}: {key} differs from {key} in {parts[0].models[0].name};"
                    " the two files belong to different runs or steps"
                )
        if len(hub.groups) != len(hubs[0].groups) or hub.origin.layout != hubs[0].origin.layout:
            raise SourceError(
                f"{files.models[0]}: found {len(hub.groups)} optimizer groups and the layout"
                f" {dict(hub.origin.layout)}, expected {len(hubs[0].groups)} groups and"
                f" {dict(hubs[0].origin.layout)} as in {parts[0].models[0].name}; {DAMAGED}"
            )


# Stages


def _stack_stages(parts: Sequence[StageFiles], hubs: Sequence[Hub]) -> Hub:
    """Return the model joined from the layers of all pipeline stages. A parameter on several stages
    is a tied one.
    """
    parameters: dict[str, Parameter] = {}
    for files, hub in zip(parts, hubs, strict=True):
        for name, parameter in hub.parameters.items():
            first = parameters.setdefault(name, parameter)
            if first.weight.shape != parameter.weight.shape:
                raise SourceError(
                    f"{files.models[0]}: {show_value(name)} has another shape on an earlier stage; {DAMAGED}"
                )
    groups = []
    for rows in zip(*(hub.groups for hub in hubs), strict=True):
        if any(row.settings != rows[0].settings for row in rows):
            raise SourceError(
                f"{parts[0].folder}: the settings of an optimizer group differ between the stages;"
                f" {DAMAGED}"
            )
        groups.append(
            ParameterGroup(
                tuple(dict.fromkeys(name for row in rows for name in row.names)), rows[0].settings
            )
        )
    buffers = {name: buffer for hub in hubs for name, buffer in hub.buffers.items()}
    ties = {alias: name for hub in hubs for alias, name in hub.ties.items()}
    return replace(hubs[0], parameters=parameters, groups=tuple(groups), buffers=buffers, ties=ties)


# Tensor ranks


def _side_by_side(parts: Sequence[StageFiles], hubs: Sequence[Hub]) -> Hub:
    """Return the model joined from the parts of the tensor-parallel ranks. AutoTP counts
    tensor-parallel ranks as data-parallel ranks, so the number of samples is divided by the number
    of tensor-parallel ranks.
    """
    map = _map_parts(parts[0])
    for files, hub in zip(parts, hubs, strict=True):
        if list(hub.parameters) != list(hubs[0].parameters):
            raise SourceError(
                f"{files.models[0]}: this file has other parameters than"
                f" {parts[0].models[0].name}; {DAMAGED}"
            )
    parameters = {name: _join_parameter(name, map, hubs, parts[0]) for name in hubs[0].parameters}
    where = hubs[0].where
    samples = where.samples if where.samples is None else where.samples // len(parts)
    return replace(hubs[0], parameters=parameters, where=replace(where, samples=samples))


def _map_parts(files: StageFiles) -> Mapping[str, Any]:
    """Return, by parameter name, the positions of the parameter's parts. The file has each name as
    a regular expression.
    """
    info = files.model.get(MAP) or {}
    rows = (info.get("affine_map") or {}).get("params")
    if not rows or info.get("autotp_unsupported_parameter_patterns"):
        message = (
            "the file lacks the map of the parts' positions, which AutoTP writes since"
            " DeepSpeed 0.19"
        )
        raise SourceError(f"{files.models[0]}: {message}; {ADVICE}")
    return {
        re.sub(r"\\(.)", r"\1", key.removeprefix("^").removesuffix("$")): row
        for key, row in rows.items()
    }


def _join_parameter(
    name: str, map: Mapping[str, Any], hubs: Sequence[Hub], files: StageFiles
) -> Parameter:
    if name not in map:
        raise SourceError(
            f"{files.models[0]}: the file does not say how the parts of {show_value(name)} are joined;"
            f" {ADVICE}"
        )
    row, parts = map[name], [hub.parameters[name] for hub in hubs]
    first = parts[0]
    kinds = (set(first.moments), first.step, first.master is None)
    if any((set(other.moments), other.step, other.master is None) != kinds for other in parts):
        raise SourceError(
            f"{files.folder}: the tensor-parallel ranks have different steps or moments of"
            f" {show_value(name)}; {DAMAGED}"
        )

    def put(tensors: Sequence[Lazy]) -> Lazy:
        return _place_parts(name, row, tensors, files)

    return replace(
        first,
        weight=put([other.weight for other in parts]),
        master=first.master and put([other.best for other in parts]),
        moments={kind: put([other.moments[kind] for other in parts]) for kind in first.moments},
    )


def _place_parts(
    name: str, row: Mapping[str, Any], tensors: Sequence[Lazy], files: StageFiles
) -> Lazy:
    """Return the whole tensor `name`, joined from its parts on all ranks. If several ranks have the
    same part, the part of the first of these ranks is read.
    """
    shape = tuple(row["logical_shape"])
    pieces_by_place: list[Placed] = []
    for rank, tensor in enumerate(tensors):
        part = row["ranks"][rank]
        if tuple(part["shard_shape"]) != tensor.shape:
            raise SourceError(
                f"{files.folder}: {show_value(name)} has shape {tensor.shape} on tensor-parallel rank"
                f" {rank}, expected {tuple(part['shard_shape'])}; {DAMAGED}"
            )
        # Replicas, such as norms, are on every rank: `locations` has all of them, and one is
        # enough.
        pieces = (piece for piece in part["pieces"] if rank == min(piece["locations"]))
        pieces_by_place += [
            Placed(_box_of_part(piece, shape, name, files), _own_part(piece, tensor))
            for piece in pieces
        ]
    if not _fills_shape(shape, [part.place for part in pieces_by_place]):
        raise SourceError(
            f"{files.folder}: the parts of {show_value(name)} do not fill the whole shape {shape};"
            f" {DAMAGED}"
        )
    return (
        pieces_by_place[0].source
        if len(pieces_by_place) == 1
        else Boxed(tuple(pieces_by_place), shape, tensors[0].dtype)
    )


def _box_of_part(piece: Mapping[str, Any], shape: Shape, name: str, files: StageFiles) -> Box:
    """Return the block of the whole tensor that a part fills. Raises `SourceError` if the part is
    not a rectangular block.
    """
    offset, strides = piece["source"]
    # Other strides would mean a transposed or strided part.
    if tuple(strides) != steps(shape) or offset < 0:
        raise SourceError(
            f"{files.models[0]}: a part of {show_value(name)} is not a rectangular block of the whole"
            f" tensor; {ADVICE}"
        )
    # A flat place in row-major order, taken apart: dimension by dimension, offset // stride modulo
    # size.
    offsets = tuple(offset // step % size for step, size in zip(steps(shape), shape, strict=True))
    return Box(offsets, tuple(piece["shape"]))


def _own_part(piece: Mapping[str, Any], tensor: Lazy) -> Lazy:
    """Return the part `piece` of the tensor `tensor` on one rank. Raises `ValueError` if the part is
    not a rectangular block of the tensor.
    """
    (offset, strides), sizes = piece["dest"], tuple(piece["shape"])
    offsets = tuple(
        offset // step % size for step, size in zip(steps(tensor.shape), tensor.shape, strict=True)
    )
    ends = zip(offsets, sizes, tensor.shape, strict=True)
    if (
        tuple(strides) != steps(tensor.shape)
        or offset < 0
        or any(start + size > whole or size < 1 for start, size, whole in ends)
    ):
        raise ValueError(f"{piece}: not a rectangular block of {tensor.shape}")
    return tensor if sizes == tensor.shape else Strided(tensor, offset, sizes, steps(tensor.shape))


def steps(shape: Shape) -> Shape:
    """Return the strides, in elements, of a row-major tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _fills_shape(shape: Shape, places: Sequence[Box]) -> bool:
    """Return whether the boxes exactly fill a tensor of this shape, without overlap."""
    inside = all(
        offset >= 0 and size > 0 and offset + size <= whole
        for place in places
        for offset, size, whole in zip(place.offsets, place.sizes, shape, strict=True)
    )
    # Two boxes are apart if in some dimension one ends before the other begins.
    apart = all(
        any(
            start + size <= begin or begin + length <= start
            for start, size, begin, length in zip(
                one.offsets, one.sizes, other.offsets, other.sizes, strict=True
            )
        )
        for number, one in enumerate(places)
        for other in places[:number]
    )
    return inside and apart and sum(prod(place.sizes) for place in places) == prod(shape)
