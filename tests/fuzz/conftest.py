"""Fuzzers find `fuzzing`, which says how many inputs they try."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
