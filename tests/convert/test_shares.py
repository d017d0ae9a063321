"""The generated configs leave no field out: each is off its default in one of a hundred that have it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import compat
from bridge.errors import BridgeError
from bridge.plan.section import fields
from bridge.stack.dialect import Dialect
from bridge.testing import entries
from bridge.testing.shares import Share, shares
from bridge.testing.strategies import part_of, values as typed_values

pytestmark = pytest.mark.once

DIALECTS = tuple(compat.load(name) for name in compat.names())
QUIET = settings(
    max_examples=20,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
each = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)


@each
def test_every_field_is_off_its_default_in_a_hundredth_of_the_configs_that_have_it(
    dialect: Dialect,
) -> None:
    """Drawn until each field shows it: a share below one in a hundred would give as many hits once in twenty times at most."""
    shown = {
        path: not unshown(share) for path, share in shares(dialect, 1000, wanted=unshown).items()
    }
    assert sorted(path for path, enough in shown.items() if not enough) == []
    assert fields(dialect.schema).keys() - shown.keys() == {*part_of(dialect).unsettable}


def unshown(share: Share) -> bool:
    return not share.exceeds(0.01, doubt=0.05)


@each
def test_what_is_said_to_be_unsettable_is_refused(dialect: Dialect) -> None:
    """Whatever is drawn for it, but for the default."""
    part = part_of(dialect)

    def law(version: str, value: Any) -> None:
        for entry in entries(dialect):
            usual = dialect.config(part.least, version, None, entry).effective.get(path)
            if value != usual and dialect.knows(path, value, version, entry):
                with pytest.raises(BridgeError):
                    dialect.config({**part.least, path: value}, version, None, entry)

    for path in part.unsettable:
        of_type = typed_values(fields(dialect.schema)[path].annotation)
        QUIET(given(st.sampled_from(dialect.versions), of_type)(law))()


def test_the_share_of_a_field_that_is_never_set_is_not_shown() -> None:
    assert unshown(Share(0, 10**4))
    assert unshown(Share(5, 500))
    assert not unshown(Share(15, 500))
