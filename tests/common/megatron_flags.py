"""Megatron's parser of flags for tests: a list that it refuses is an error."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.errors import ConfigError
from compat.megatron import flags


def parse(words: Sequence[str], version: str, lenient: bool = False) -> flags.Parsed:
    """The given values of a list of flags; raises `ConfigError` with every problem."""
    found = flags.parse(words, version, lenient)
    ConfigError.raise_if(found.problems)
    return found
