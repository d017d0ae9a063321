"""What Hypothesis needs to know of Kite: meshes that fit the ranks, and what each release has."""

from __future__ import annotations

from collections.abc import Sequence

from compat.kite.releases import has
from compat.kite.schema import Kite
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from bridge.plan.section import fields
from bridge.testing import StrategyCase, StrategyPart
from bridge.testing.strategies import Group


@st.composite
def core(draw: DrawFn, case: StrategyCase) -> Sequence[Group]:
    """Sizes whose product is the world size."""
    world = case.world_size or 8
    tensor = draw(st.sampled_from([size for size in (1, 2, 4) if world % size == 0]))
    pipeline = draw(st.sampled_from([size for size in (1, 2, 3) if world // tensor % size == 0]))
    sizes = {"ranks.tensor": tensor, "ranks.pipeline": pipeline}
    return [sizes, {"feed.each": draw(st.integers(1, 8)), "feed.times": draw(st.integers(1, 8))}]


PART = StrategyPart(
    core=core,
    paths=lambda case: [path for path in fields(Kite) if has(path, case.version)],
    values=lambda case, path: (
        st.floats(1e-5, 1e-1) if path in ("update.lr", "update.rate") else None
    ),
    reserved=("ranks.",),
    entries=("file",),
)
