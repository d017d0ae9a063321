"""Live config objects of an installed stack read back as what they hold."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

import compat
from bridge.errors import BridgeError
from bridge.stack.dialect import Config, Dialect
from bridge.testing import configs, entries

DIALECTS = tuple(compat.load(name) for name in compat.names())
QUIET = settings(
    max_examples=80,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
each = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)


@each
def test_live_objects_come_back(dialect: Dialect) -> None:
    """An object of the stack's own class reads as what it holds, where its library is installed.

    It does not tell a field that was given as it is anyway from one that was not, so `given` is compared from then on.
    """
    live = [
        (entry, version)
        for entry in entries(dialect)[1:]
        for version in dialect.versions
        if makes(dialect, entry, version)
    ]
    if not live:
        pytest.skip(f"no library of {dialect.title} is installed that makes config objects")

    def law(config: Config) -> None:
        read = dialect.read(config.to_object(), config.version, config.world_size)
        assert read.effective == config.effective
        assert read.given.items() <= config.effective.items()
        assert config.opaque.items() <= read.opaque.items()
        assert dialect.read(read.to_object(), read.version, read.world_size).given == read.given

    for entry, version in live:
        QUIET(given(configs(dialect, version, entry=entry))(law))()


def makes(dialect: Dialect, entry: str, version: str) -> bool:
    """Whether an object of class `entry` can be made of a config of that release here."""
    try:
        made = dialect.config({}, version, 1, entry).to_object()
    except BridgeError:
        return False
    return type(made).__name__ == entry
