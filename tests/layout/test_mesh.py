"""The mesh: groups cover the ranks once, neighbours follow the order, and misfits say what to change."""

from __future__ import annotations

import os
from math import prod

import pytest
from hypothesis import assume, given, settings, strategies as st

from bridge.errors import ConfigError
from bridge.layout.mesh import AXES, Mesh
from bridge.plan.plan import Parallel

sizes = st.integers(1, 4)
orders = st.none() | st.permutations(AXES).map("-".join)
parallels = st.builds(
    Parallel, data=sizes, tensor=sizes, pipeline=sizes, context=sizes, order=orders
)
meshes = parallels.map(
    lambda parallel: Mesh.of(parallel, prod(getattr(parallel, axis) for axis in AXES))
)


@given(meshes, st.sets(st.sampled_from(AXES)))
def test_groups_hold_each_rank_once(mesh: Mesh, axes: set[str]) -> None:
    ranks = [rank for group in mesh.groups(*axes) for rank in group]
    assert sorted(ranks) == list(range(mesh.world))


@given(meshes, st.sampled_from(AXES), st.data())
def test_a_group_varies_along_its_axis_only(mesh: Mesh, axis: str, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, mesh.world - 1))
    group = [mesh.coordinates(member) for member in mesh.group(rank, axis)]
    assert [point[axis] for point in group] == list(range(mesh.sizes[axis]))
    assert all({**point, axis: 0} == {**group[0], axis: 0} for point in group)


@given(meshes)
def test_coordinates_and_ranks_are_inverse(mesh: Mesh) -> None:
    assert all(mesh.rank(mesh.coordinates(rank)) == rank for rank in range(mesh.world))


def test_default_order_puts_tensor_neighbours_together_and_pipeline_ranks_furthest_apart() -> None:
    mesh = Mesh.of(Parallel(data=2, tensor=2, pipeline=2), 8)
    assert mesh.groups("tensor") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("data") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("pipeline") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("data", "pipeline") == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_short_names_give_the_same_order() -> None:
    long = Mesh.of(Parallel(data=2, tensor=2, pipeline=2, order="tensor-pipeline-data"), 8)
    assert long == Mesh.of(Parallel(data=2, tensor=2, pipeline=2, order="tp-cp-ep-pp-dp"), 8)
    assert long.groups("pipeline")[0] == (0, 2)


@given(sizes, sizes, sizes, st.integers(1, 4))
def test_unset_data_takes_the_ranks_that_are_left(
    tensor: int, pipeline: int, context: int, data: int
) -> None:
    parallel = Parallel(tensor=tensor, pipeline=pipeline, context=context)
    assert Mesh.of(parallel, data * tensor * pipeline * context).sizes["data"] == data


@pytest.mark.parametrize(
    ("parallel", "world", "message"),
    [
        (
            Parallel(tensor=4, pipeline=2),
            6,
            "parallel: tensor (4) x pipeline (2) does not divide world size (6); use 8 ranks, or tensor=3",
        ),
        (
            Parallel(data=1),
            4,
            "parallel: data (1) is not the world size (4); use 1 ranks, or data=4",
        ),
        (
            Parallel(data=4, tensor=2),
            6,
            "parallel: tensor (2) x data (4) does not divide world size (6); use 8 ranks, or data=3",
        ),
        (
            Parallel(order="tp-dq"),
            1,
            "parallel.order: found 'dq', expected axes of tensor-context-data-pipeline-expert",
        ),
        (
            Parallel(order="tp-tp"),
            1,
            "parallel.order: tensor occurs 2 times, expected once; remove the others",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_change(
    parallel: Parallel, world: int, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Mesh.of(parallel, world)
    assert caught.value.problems[0] == message


@given(sizes, sizes, sizes, st.integers(1, 64))
def test_the_world_size_advised_works(tensor: int, pipeline: int, context: int, world: int) -> None:
    parallel = Parallel(tensor=tensor, pipeline=pipeline, context=context)
    try:
        assert Mesh.of(parallel, world).world == world
    except ConfigError as error:
        advised = int(str(error).split("use ")[1].split()[0])
        assert Mesh.of(parallel, advised).world == advised >= world


@st.composite
def expert_layouts(draw: st.DrawFn) -> tuple[Parallel, int]:
    """Sizes of all axes, with the number of ranks: some divide, and some do not."""
    powers = st.integers(0, 4).map(lambda power: 2**power)
    sizes = {name: draw(powers | st.just(3)) for name in ("tensor", "context", "data", "pipeline")}
    world = prod(sizes.values())
    assume(world <= 2**14)
    expert, within = draw(powers | st.just(3)), draw(st.none() | powers)
    order = draw(st.none() | st.permutations(("tp", "cp", "ep", "dp", "pp")).map("-".join))
    return Parallel(**sizes, expert=expert, expert_tensor=within, order=order), world


@pytest.mark.once
@settings(max_examples=int(os.environ.get("STAGEBRIDGE_MORE", "1")) * 100, deadline=None)
@given(expert_layouts())
def test_groups_of_experts_are_megatrons(case: tuple[Parallel, int]) -> None:
    """What Megatron-Core's own generators of ranks give; and what it refuses has no stages of its own."""
    state = pytest.importorskip("megatron.core.parallel_state")
    parallel, world = case
    mesh = Mesh.of(parallel, world)
    order = parallel.order or "tp-cp-ep-dp-pp"
    within, expert = parallel.expert_tensor or mesh.sizes["tensor"], parallel.expert or 1
    pipeline = mesh.sizes["pipeline"]
    copies, rest = divmod(world, within * expert * pipeline)
    plain = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
    ranks = {short: mesh.sizes[axis] for short, axis in plain.items()}
    real = state.RankGenerator(**ranks, ep=1, order=order)
    for short, axis in plain.items():
        assert [list(group) for group in mesh.groups(axis)] == sorted(real.get_ranks(short))
    if rest:
        with pytest.raises(ConfigError, match="does not divide"):
            mesh.of_experts(parallel)
        return
    theirs = state.RankGenerator(tp=within, ep=expert, dp=copies, pp=pipeline, cp=1, order=order)
    if pipeline > 1 and real.get_ranks("pp") != theirs.get_ranks("pp"):
        with pytest.raises(ConfigError, match="on ranks of other stages"):
            mesh.of_experts(parallel)
        return
    ours = mesh.of_experts(parallel)
    spread = {"tp": "tensor", "ep": "expert", "dp": "data", "pp": "pipeline"}
    for short, axis in spread.items():
        assert [list(group) for group in ours.groups(axis)] == sorted(theirs.get_ranks(short))
