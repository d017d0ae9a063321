"""Types in words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt, MinLen

from bridge.plan.kinds import kind
from bridge.plan.section import Count, Real, Size


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (bool | None, "bool"),
        (Count | None, "int > 0"),
        (Size, "int >= 0"),
        (Annotated[Real, Ge(0), Lt(1)], "float >= 0 and < 1"),
        (Annotated[int, Gt(0), Le(127)] | str | None, "int > 0 and <= 127 or str"),
        (Literal["up", "down"] | None, "one of up, down"),
        (Literal[1], "1"),
        (tuple[str, ...], "list of str"),
        (Annotated[tuple[str, ...], MinLen(1)], "list of str, not empty"),
        (tuple[float, float], "(float, float)"),
        (tuple[tuple[str, ...], ...], "list of list of str"),
        (list[Any], "list of any"),
        (dict[str, Any] | str | None, "mapping or str"),
        (Any, "any"),
    ],
)
def test_kind(annotation: Any, words: str) -> None:
    assert kind(annotation) == words
