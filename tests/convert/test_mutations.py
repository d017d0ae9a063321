"""One edit away from a valid config: every dialect refuses it and names the key, or means the same by it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

import compat
from bridge.errors import BridgeError
from bridge.plan.section import fields
from bridge.stack.dialect import Dialect
from bridge.testing import Mistake, Mutation, mutations
from bridge.testing.mutations import REST
from tests.common.amounts import MORE

pytestmark = pytest.mark.once

SOME = settings(
    max_examples=30 * MORE,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
MANY = settings(SOME, max_examples=2000)
COMMON = {
    Mistake.UNKNOWN,
    Mistake.MISSPELLED,
    Mistake.TYPE,
    Mistake.SWITCH,
    Mistake.FRACTION,
    Mistake.INFINITE,
    Mistake.RELATION,
}
"""Mistakes that every dialect has room for."""
NAMED = {Mistake.UNKNOWN, Mistake.MISSPELLED}
"""What a dialect only names, not refuses, whose stack keeps any key: test_single_edits.py holds that.

Relations are those of batch and ranks, which a config about the model alone has not.
"""


@pytest.mark.parametrize(
    "dialect", [*map(compat.load, compat.names())], ids=lambda dialect: dialect.name
)
def test_an_edit_is_refused_by_name_or_means_the_same(dialect: Dialect) -> None:
    seen: Counter[Mistake] = Counter()

    def check(mutation: Mutation) -> None:
        seen[mutation.mistake] += 1
        try:
            read = mutation.read()
        except BridgeError as error:
            assert isinstance(error, mutation.error), mutation
            assert mutation.is_named_by(error), (mutation.key, mutation.value, str(error))
        else:
            assert read.effective == mutation.config.effective, (mutation.key, mutation.value)

    SOME(given(mutations(dialect))(check))()
    wanted = (
        COMMON
        - (NAMED if REST in fields(dialect.schema) else set())
        - ({Mistake.RELATION} if dialect.about else set())
    )
    for mistake in wanted - seen.keys():
        check(
            find(
                mutations(dialect),
                lambda mutation, wanted=mistake: mutation.mistake is wanted,
                settings=MANY,
            )
        )
    assert seen.keys() >= wanted


def test_a_mutation_is_one_edit() -> None:
    """The valid source is the dialect's own; what differs from it is the edited key."""
    dialect = compat.load("deepspeed")

    @settings(SOME, max_examples=40)
    @given(mutations(dialect))
    def law(mutation: Mutation) -> None:
        before = _flat(mutation.config.given.as_nested())
        after = _flat(mutation.source)
        changed = {
            path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
        }
        moved = {path for path in changed if not f"{path}.".startswith(f"{mutation.key}.")}
        assert changed - moved
        assert not moved or (mutation.mistake is Mistake.MISSPELLED and len(moved) == 1), (
            changed,
            mutation.key,
        )

    law()


def _flat(data: object, prefix: str = "") -> dict[str, str]:
    """Leaves by dotted path, as text: NaN equals itself, and 1 is not true."""
    if not isinstance(data, dict) or not data:
        return {prefix: repr(list(data) if isinstance(data, tuple) else data)}
    found: dict[str, str] = {}
    for name, value in data.items():
        found |= _flat(value, f"{prefix}.{name}" if prefix else name)
    return found
