"""Sharding: finds which part of a whole tensor a rank holds if torch distributes the tensor, as a
DTensor or as a part of a flat parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Shard

from bridge.engine.comm import Comm
from bridge.layout.mesh import Mesh
from bridge.trace.naming import modules_by_path, parameters_by_name, unwrap_module
from bridge.trace.placement import Placement

TENSOR_AXES = ("tp", "tensor", "tensor_parallel", "model")
"""Names of the dimensions of a device mesh along which tensor parallelism splits single weights."""


def mesh_of(model: nn.Module, world: int) -> Mesh:
    """Return the mesh along which torch distributes the weights of `model`. It has the axes of the
    largest device mesh of the weights, or only a data axis if there is none.

    If the device mesh has several data dimensions, torch shards weights along the last of them and
    replicates weights along the others.
    """
    meshes = [
        weight.device_mesh
        for weight in parameters_by_name(model).values()
        if isinstance(weight, DTensor)
    ]
    if not meshes or world == 1:
        return Mesh({"tensor": 1, "data": world})
    # Parts of a model may lie on meshes that are smaller than that of the whole.
    device_mesh = max(meshes, key=lambda mesh: (mesh.size(), mesh.ndim))
    # Our first axis is the fastest, torch's the slowest.
    axes = dict(
        zip(
            _mesh_axes(device_mesh, fully_sharded(model)),
            reversed(device_mesh.mesh.shape),
            strict=True,
        )
    )
    # Ranks beyond the mesh hold copies of what lies on it.
    rest = world // device_mesh.size()
    if rest > 1:
        axes["replica" if "data" in axes else "data"] = axes.get("replica", 1) * rest
    # Our meshes number ranks without gaps: of ranks in another order, only their count is used.
    ranks = device_mesh.mesh.flatten().tolist()
    in_order = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
    return Mesh({"tensor": 1, "data": 1, **axes} if in_order else {"tensor": 1, "data": world})


def _mesh_axes(device_mesh: Any, fully_sharded: bool) -> list[str]:
    """Return our names for the dimensions of a device mesh, in our order: the axis along which
    rank numbers grow fastest comes first.
    """
    names = device_mesh.mesh_dim_names or ("",) * device_mesh.ndim
    axes: list[str] = []
    for name in reversed(names):
        tensor = name in TENSOR_AXES or (
            device_mesh.ndim == 1 and not fully_sharded and name not in ("dp", "data", "fsdp")
        )
        axis = "replica"
        if tensor and "tensor" not in axes:
            axis = "tensor"
        elif "data" not in axes:
            # The fastest of several data axes shards; slower ones hold copies.
            axis = "data"
        axes.append(axis if axis not in axes else f"replica {len(axes)}")
    return axes


def is_split(tensor: Tensor) -> bool:
    """Whether torch distributes a tensor as a DTensor."""
    return isinstance(tensor, DTensor)


def fully_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard` was called on the model or on one of its modules."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def part_and_placement(
    tensor: Tensor, comm: Comm, others: Sequence[str]
) -> tuple[Tensor, Placement]:
    """Return this rank's part of `tensor`, and the placement of this part in the whole tensor. If
    torch does not distribute the tensor, the rank has all of it, and so have the ranks along the
    axes `others`.
    """
    if not isinstance(tensor, DTensor):
        return tensor, Placement.full(tuple(tensor.shape), tuple(others))
    if not in_boxes(tensor):
        # Partial sums, and shards that are strided: all ranks together make them whole.
        whole: Tensor = tensor.full_tensor()
        return whole, Placement.full(tuple(whole.shape))
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    split: set[str | None] = set()
    for at, place in enumerate(tensor.placements):
        if not place.is_replicate():
            # The axis of ours that has the same ranks; None if no axis of ours has them.
            ranks = tuple(dist.get_process_group_ranks(tensor.device_mesh.get_group(at)))
            same = (axis for axis in comm.mesh.sizes if comm.group(axis).ranks == ranks)
            split.add(next(same, None))
    alike = tuple(axis for axis in others if axis not in split) if None not in split else ()
    sizes = sizes if tensor._local_tensor.numel() else tuple(tensor._local_tensor.shape)
    return tensor._local_tensor, Placement.box(
        tuple(tensor.shape), tuple(offsets), tuple(sizes), alike
    )


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor: all of it unless it is a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_gradient(weight: nn.Parameter) -> Tensor | None:
    """Return the gradient of this rank's part of a weight. Return None if there is no gradient, or
    if torch splits the gradient otherwise than the weight.
    """
    gradient: Any = weight.grad
    if isinstance(weight, DTensor) and isinstance(gradient, DTensor):
        alike = (gradient.device_mesh, gradient.placements) == (
            weight.device_mesh,
            weight.placements,
        )
        return gradient._local_tensor if alike else None
    return None if isinstance(weight, DTensor) or isinstance(gradient, DTensor) else gradient


def in_boxes(tensor: Tensor) -> bool:
    """Return whether each rank's part of a tensor is a box of the whole tensor, at a position that
    the rank knows without the other ranks.
    """
    return not isinstance(tensor, DTensor) or all(
        type(placement) in (Shard, Replicate) for placement in tensor.placements
    )


@dataclass(frozen=True)
class FlatPiece:
    """The part of a parameter that a rank's shard of a flat parameter holds: the elements `start`
    to `stop` in row-major order. They begin at `offset` in the shard.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int


def flat_pieces(model: nn.Module) -> Mapping[int, list[FlatPiece]]:
    """Return the parts of parameters that this rank holds, for a model in
    FullyShardedDataParallel. The keys are Python's `id` of a flat parameter, and of each original
    parameter that is a view of a flat one.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return {}
    by_id: dict[int, list[FlatPiece]] = {}
    for root in FullyShardedDataParallel.fsdp_modules(model):
        flat = root._handle.flat_param if root._handle else None
        if flat is not None:
            pieces = list(_flat_pieces(flat, _wrapper_prefix(model, root)))
            by_id[id(flat)] = [piece for piece, _ in pieces]
            # An original parameter is a view that begins with its own elements.
            by_id |= {
                id(own): [replace(piece, offset=0)] for piece, own in pieces if own is not None
            }
    return by_id


def _wrapper_prefix(model: nn.Module, wrapper: nn.Module) -> str:
    inner = unwrap_module(wrapper)
    return next(path for path, module in modules_by_path(model) if module is inner)


def _flat_pieces(flat: Any, prefix: str) -> Iterator[tuple[FlatPiece, nn.Parameter | None]]:
    # With use_orig_params, these are the parameters that are views of the flat one.
    own = flat._params if flat._params is not None else [None] * len(flat._fqns)
    for fqn, shape, part, parameter in zip(
        flat._fqns, flat._shapes, flat._shard_param_infos, own, strict=True
    ):
        name = ".".join(
            word for word in (*prefix.split("."), *fqn.split(".")) if word and word not in _HIDDEN
        )
        if part.in_shard:
            start = part.intra_param_start_idx
            yield (
                FlatPiece(
                    name, tuple(shape), start, start + part.numel_in_shard, part.offset_in_shard
                ),
                parameter,
            )
        else:
            # Named even if nothing of it lies here: all ranks list the same tensors.
            yield FlatPiece(name, tuple(shape), 0, 0, 0), parameter


_HIDDEN = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
