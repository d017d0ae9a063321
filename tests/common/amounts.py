"""How much is drawn: the suite takes a sample, and `tox -e long` many times as much."""

from __future__ import annotations

import os

MORE = int(os.environ.get("STAGEBRIDGE_MORE", "1"))
"""Factor for the number of examples of each law."""
