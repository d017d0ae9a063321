"""How much is drawn: the suite takes a sample, and `tox -e long` many times as much."""

from __future__ import annotations

import os

import pytest

MORE = int(os.environ.get("STAGEBRIDGE_MORE", "1"))
"""Factor for the number of examples of each law."""

LONG = pytest.mark.skipif(MORE == 1, reason="takes long; `tox -e long` runs it")
"""Mark of a case that costs minutes, and that cases next to it mostly cover."""
