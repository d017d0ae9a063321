"""From every other stack: what AutoModel is told obeys its own rules, or the translation says why it cannot be told."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import bridge
import compat
from bridge.errors import BridgeError
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config, Dialect
from bridge.testing import configs, plans
from bridge.translation.translate import Result, translate
from tests.common.amounts import MORE

pytestmark = pytest.mark.once

AUTOMODEL = compat.load("automodel")
OTHERS = tuple(compat.load(name) for name in compat.names() if name != "automodel")
LAW = settings(
    max_examples=20 * MORE,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


def result_of(config: Config) -> Result | None:
    try:
        return translate(config, AUTOMODEL)
    except BridgeError as error:
        assert error.problems
        return None


@pytest.mark.parametrize("other", OTHERS, ids=lambda dialect: dialect.name)
def test_other_stacks_become_recipes_that_are_read(other: Dialect) -> None:
    told: Counter[bool] = Counter()

    def law(config: Config) -> None:
        result = result_of(config)
        told[result is not None] += 1
        if result is not None:
            read = AUTOMODEL.read(
                result.written.text, result.config.version, result.config.world_size
            )
            assert (read.given, read.effective) == (result.config.given, result.config.effective)

    LAW(given(configs(other))(law))()
    assert told[True] >= 7 * MORE


def test_plans_become_recipes_that_mean_the_same_again() -> None:
    told: Counter[bool] = Counter()

    def law(plan: Plan) -> None:
        try:
            config = bridge.lower(plan, AUTOMODEL)
        except BridgeError:
            told[False] += 1
            return
        told[True] += 1
        kept = bridge.lift(config)
        assert (
            bridge.lift(bridge.lower(kept, AUTOMODEL, None, config.world_size)).values()
            == kept.values()
        )

    # Recipes refuse many plans, such as those whose weight decay falls.
    settings(LAW, max_examples=30 * MORE)(given(plans())(law))()
    assert told[True] >= 5
