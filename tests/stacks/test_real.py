"""Generated configs against the release of each stack that is installed here; `tests/versions` has the other releases."""

from __future__ import annotations

import json
import warnings
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import compat
from bridge.errors import VersionError
from bridge.stack.dialect import Config
from bridge.testing import configs
from tests.harvesting import judges

REAL = sorted(
    module.name for module in iter_modules(judges.__path__) if module.name in compat.names()
)
"""Dialects that can ask their stack."""
FEWER = settings(
    max_examples=50,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def installed(real: Any, name: str) -> str:
    """The release that is installed here, if the dialect knows it; skips the test otherwise."""
    try:
        version = compat.load(name).release(real.release_of_package())
    except VersionError as error:
        pytest.skip(str(error))
    return version


def test_there_are_stacks_to_ask() -> None:
    assert {"deepspeed", "megatron"} <= {*REAL}


@pytest.mark.parametrize("name", REAL)
def test_what_we_accept_the_installed_release_accepts(name: str) -> None:
    real = import_module(f"tests.harvesting.judges.{name}")
    version = installed(real, name)
    compared = []

    @FEWER
    @given(configs(compat.load(name), version))
    def law(config: Config) -> None:
        question, expected = real.pose_config(config)
        with warnings.catch_warnings(action="ignore"):
            held = real.answer(json.loads(json.dumps(question)))
        ours, theirs = (json.loads(json.dumps(values, default=str)) for values in (expected, held))
        both = ours.keys() & theirs.keys()
        compared.append(len(both))
        assert {path: ours[path] for path in both} == {path: theirs[path] for path in both}

    law()
    assert sum(count >= 60 for count in compared) > 0.9 * len(compared)


def test_some_stack_is_asked_where_one_is_installed() -> None:
    assert len(REAL) >= 2
