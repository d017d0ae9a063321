"""The batch triangle is solved from any two sides and the data ranks, and contradictions are refused."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from bridge.errors import ConfigError
from bridge.plan.batch import Triangle, solve

SIDES = st.integers(1, 64)


@given(SIDES, SIDES, SIDES)
def test_any_open_side_is_found(micro: int, accumulation: int, data: int) -> None:
    whole = Triangle(micro, accumulation, micro * accumulation * data, data)
    assert solve(micro, accumulation, None, data) == whole
    assert solve(micro, None, whole.global_, data) == whole
    assert solve(None, accumulation, whole.global_, data) == whole
    assert solve(micro, accumulation, whole.global_, None) == whole
    assert solve(micro, accumulation, whole.global_, data) == whole


@given(SIDES, SIDES, SIDES, st.integers(1, 5000))
def test_what_does_not_hold_is_refused(
    micro: int, accumulation: int, data: int, total: int
) -> None:
    if total == micro * accumulation * data:
        assert solve(micro, accumulation, total, data).global_ == total
    else:
        with pytest.raises(ConfigError, match=r"batch: .*global .* does not hold"):
            solve(micro, accumulation, total, data)


def test_too_little_stays_open() -> None:
    assert solve(2, None, None, 4) == Triangle(2, None, None, 4)
    assert solve(None, None, 64, 4) == Triangle(None, None, 64, 4)
    assert solve(None, None, None, None) == Triangle(None, None, None, None)


@pytest.mark.parametrize(("micro", "total", "data"), [(3, 64, 2), (4, 2, 1), (8, 64, 16)])
def test_a_rest_says_what_would_do(micro: int, total: int, data: int) -> None:
    with pytest.raises(ConfigError, match=f"make the global batch a multiple of {micro * data}"):
        solve(micro, None, total, data)
