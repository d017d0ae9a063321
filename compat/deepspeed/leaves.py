"""DeepSpeed's values one at a time: what a key takes."""

from __future__ import annotations

from bridge.leaves import Leaves
from compat.deepspeed.schema import DeepSpeed

LEAVES = Leaves(DeepSpeed)
typed, expected = LEAVES.typed, LEAVES.expected
