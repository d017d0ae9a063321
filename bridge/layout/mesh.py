"""The mesh: ranks arranged along the data, pipeline, tensor and context axes, and the groups of
ranks along each axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from bridge import limits
from bridge.errors import ConfigError, nearest
from bridge.plan.plan import Parallel

AXES = ("tensor", "context", "data", "pipeline")
"""The axes in the default order. Ranks with consecutive numbers are neighbours along the first
axis.
"""
EXPERT_AXES = ("tensor", "expert", "data", "pipeline")
"""The axes over which experts are spread, in the default order."""

_SHORT = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline", "ep": "expert"}


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh. `size` is the number of positions along the axis, and `stride` the
    difference between the numbers of two neighbouring ranks.
    """

    name: str
    size: int
    stride: int


@dataclass(frozen=True)
class Mesh:
    """The ranks 0 to `world - 1` as points of a grid. `sizes` has the size of each axis. Ranks with
    consecutive numbers are neighbours along the first axis.
    """

    sizes: Mapping[str, int]

    @classmethod
    def of(cls, parallel: Parallel, world: int) -> Mesh:
        """Return the mesh of `world` ranks for the sizes in `parallel`. If `data` is not set, the
        data axis gets as many positions as the other sizes leave. Raises `ConfigError` if the
        product of the sizes is not `world`.
        """
        sizes = {axis: getattr(parallel, axis) or 1 for axis in AXES}
        if max(world, *sizes.values()) > limits.RANKS:
            raise ConfigError(
                f"parallel: found {max(world, *sizes.values()):,} ranks, expected at most {limits.RANKS:,}"
            )
        if parallel.data is None:
            sizes["data"] = max(
                1, world // prod(size for axis, size in sizes.items() if axis != "data")
            )
        if prod(sizes.values()) != world:
            raise ConfigError(_wrong_product(sizes, world))
        return cls({axis: sizes[axis] for axis in _order(parallel.order, AXES)})

    def of_experts(self, parallel: Parallel) -> Mesh:
        """Return the mesh of the same ranks over which experts are spread: tensor ranks split each
        expert, expert ranks have different experts, and data ranks have the same ones. Raises
        `ConfigError` if the sizes do not divide the ranks, or if stages would have other ranks
        (Megatron: parallel_state.py).
        """
        sizes = {
            "tensor": parallel.expert_tensor or self.sizes["tensor"],
            "expert": parallel.expert or 1,
            "pipeline": self.sizes["pipeline"],
        }
        sizes["data"], rest = divmod(self.world, prod(sizes.values()))
        if rest:
            raise ConfigError(
                f"parallel.expert: {_product(sizes)} does not divide the {self.world} ranks"
            )
        mesh = Mesh({axis: sizes[axis] for axis in _order(parallel.order, EXPERT_AXES)})
        if sizes["pipeline"] > 1 and mesh.axes["pipeline"] != self.axes["pipeline"]:
            raise ConfigError(
                f"parallel.order: {parallel.order} puts experts on ranks of other stages;"
                " put the pipeline last"
            )
        return mesh

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

    @cached_property
    def axes(self) -> Mapping[str, Axis]:
        """The axes by name."""
        stride, axes = 1, {}
        for name, size in self.sizes.items():
            axes[name] = Axis(name, size, stride)
            stride *= size
        return axes

    def coordinate(self, rank: int, axis: str) -> int:
        """Position of `rank` along `axis`."""
        # Ranks count through the axes like digits of a number, the fastest axis first; the stride
        # is the weight of the digit.
        return rank // self.axes[axis].stride % self.axes[axis].size

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` along every axis."""
        return {axis: self.coordinate(rank, axis) for axis in self.sizes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at `coordinates`. An axis that is left out has coordinate 0."""
        return sum(self.axes[axis].stride * index for axis, index in coordinates.items())

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the group of `rank` along `axes`: the rank itself, and all ranks that differ from
        it along these axes only. The result is in increasing order.
        """
        # From the member of the group with coordinate 0 along each of the axes, every combination
        # of steps.
        base = rank - sum(self.coordinate(rank, axis) * self.axes[axis].stride for axis in axes)
        steps = [
            [self.axes[axis].stride * index for index in range(self.axes[axis].size)]
            for axis in axes
        ]
        return tuple(sorted(base + sum(offsets) for offsets in product(*steps)))

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return every group along `axes`. Each rank is in exactly one group."""
        return tuple(sorted({self.group(rank, *axes) for rank in range(self.world)}))


def _wrong_product(sizes: Mapping[str, int], world: int) -> str:
    contradicts = "is not the" if world % prod(sizes.values()) == 0 else "does not divide"
    return f"parallel: {_product(sizes) or 'data (1)'} {contradicts} world size ({world}); {_advice(sizes, world)}"


def _product(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} ({size})" for axis, size in sizes.items() if size > 1)


def _advice(sizes: Mapping[str, int], world: int) -> str:
    rest = prod(size for axis, size in sizes.items() if axis != "data")
    if world % rest == 0:
        return f"use {prod(sizes.values())} ranks, or data={world // rest}"
    ways = [f"use {-(-world // rest) * rest} ranks"]  # the next multiple of the ranks of one copy
    for axis, size in sizes.items():
        if axis == "data" or size == 1:
            continue
        # The largest smaller size of the axis with which the product divides the world.
        others = rest // size
        fitting = next((less for less in range(size - 1, 0, -1) if world % (less * others) == 0), 0)
        if fitting:
            return ", or ".join([*ways, f"{axis}={fitting}"])
    return ways[0]


def _order(order: str | None, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of `axes` in the order of a plan's `parallel.order`, such as
    "tp-cp-dp-pp". Axes that the order leaves out come last.
    """
    if order is None:
        return axes
    names = [_SHORT.get(name, name) for name in order.split("-")]
    ConfigError.raise_if(_order_problems(names))
    return (
        *(name for name in names if name in axes),
        *(axis for axis in axes if axis not in names),
    )


def _order_problems(names: list[str]) -> Iterator[str]:
    axes = (*AXES, "expert")
    for name in names:
        if name not in axes:
            yield f"parallel.order: found {name!r}, expected axes of {'-'.join(axes)}{nearest(name, axes)}"
        elif names.count(name) > 1:
            yield f"parallel.order: {name} occurs {names.count(name)} times, expected once; remove the others"
